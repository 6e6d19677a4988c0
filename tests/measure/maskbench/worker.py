"""One engine of the grammar benchmark in a process of its own, which ends itself when a schema takes too long.

    python -m tests.measure.maskbench.worker troupe|llguidance|xgrammar RANKS LIMIT_S wall|cpu

JSON lines: in {"schema": ..., "texts": [...]} or {"rows": 64}, out what `measure` and `measure_rows` return.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import llguidance
import numpy as np

from grammar import GrammarCompiler, GrammarError, GrammarSpec, Vocabulary, allocate_bitmask, fill_bitmask
from tests.measure.maskbench.token_ranks import TokenRanks

MAX_MEMORY_BYTES = 6 * 1024**3
NUM_REPEATS = 15
# The schemas of the batch's rows. The second has residual checks in Troupe, but in no other engine.
ROW_SCHEMAS: dict[str, dict[str, Any]] = {
    "plain": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "unique items": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
}
ROW_STARTS = {"plain": '{"text": "It was', "unique items": '["It was", "a'}


Clock = Callable[[], int]  # nanoseconds


class Refused(Exception):
    """The engine does not take the schema; the message says why."""


class Session(Protocol):
    """One text being written."""

    def fill(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the mask of the next token into a row."""

    def accept(self, token_id: int) -> bool:
        """Take a token."""

    def is_complete(self) -> bool:
        """Return whether the text may end here."""


class Peer(Protocol):
    """One engine with the vocabulary."""

    def compile(self, schema: Any) -> Callable[[], Session]:
        """Return a maker of sessions.

        Raises:
            Refused: the engine does not take the schema.
        """

    def fill_rows(self, sessions: Sequence[Any], bitmask: np.ndarray) -> None:
        """Write the masks of many sessions at once."""


class TroupePeer:
    """This project's grammars."""

    def __init__(self, ranks: TokenRanks) -> None:
        vocabulary = Vocabulary([*ranks.token_bytes, b""], [ranks.eos_token_id])
        self._compiler = GrammarCompiler(vocabulary)

    def compile(self, schema: Any) -> Callable[[], MatcherSession]:
        try:
            compiled = self._compiler.compile(GrammarSpec.json_schema(schema))
        except GrammarError as error:
            raise Refused(str(error)) from error
        return lambda: MatcherSession(compiled.matcher())

    def fill_rows(self, sessions: Sequence[MatcherSession], bitmask: np.ndarray) -> None:
        fill_bitmask([session.matcher for session in sessions], range(len(sessions)), bitmask)


class MatcherSession:
    """A matcher of this project or of xgrammar: both have the same methods."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self.fill = matcher.fill_next_token_bitmask
        self.accept = matcher.accept_token
        self.is_complete = matcher.is_completed


class LLGuidancePeer:
    """llguidance as it comes, with the separators of json.dumps."""

    bos_token_id = None

    def __init__(self, ranks: TokenRanks) -> None:
        self.eos_token_id = ranks.eos_token_id
        self.special_token_ids = [ranks.eos_token_id]
        self.tokens = [*ranks.token_bytes, b"\xff<eos>"]
        self._ranks = ranks
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), n_vocab=len(self.tokens))
        self._executor = llguidance.LLExecutor(1)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._ranks.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)

    def compile(self, schema: Any) -> Callable[[], LLGuidanceSession]:
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        text = json.dumps(schema if isinstance(schema, dict) else {"anyOf": [schema]})
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return lambda: LLGuidanceSession(matcher.deep_copy())

    def fill_rows(self, sessions: Sequence[LLGuidanceSession], bitmask: np.ndarray) -> None:
        pairs = [(session.matcher, row) for row, session in enumerate(sessions)]
        self._executor.unsafe_compute_mask_ptr(
            pairs, bitmask.ctypes.data, bitmask.shape[1] * bitmask.itemsize, len(bitmask)
        )


class LLGuidanceSession:
    """A matcher of llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    def fill(self, bitmask: np.ndarray, row: int = 0) -> None:
        width = bitmask.shape[1] * bitmask.itemsize
        self.matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data + row * width, width)

    def accept(self, token_id: int) -> bool:
        return self.matcher.try_consume_tokens([token_id]) == 1

    def is_complete(self) -> bool:
        return self.matcher.is_accepting()


class XGrammarPeer:
    """xgrammar as engines use it: its strict mode, with the separators of json.dumps. Its import takes seconds."""

    def __init__(self, ranks: TokenRanks) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        info = self._library.TokenizerInfo(
            [*ranks.token_bytes, b""], vocab_size=ranks.eos_token_id + 1, stop_token_ids=[ranks.eos_token_id]
        )
        self._compiler = self._library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._batch = self._library.BatchGrammarMatcher(1)

    def compile(self, schema: Any) -> Callable[[], MatcherSession]:
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        except RuntimeError as error:
            raise Refused(str(error)) from error
        return lambda: MatcherSession(self._library.GrammarMatcher(compiled))

    def fill_rows(self, sessions: Sequence[MatcherSession], bitmask: np.ndarray) -> None:
        self._batch.batch_fill_next_token_bitmask([session.matcher for session in sessions], bitmask)


PEERS: dict[str, Callable[[TokenRanks], Peer]] = {
    "troupe": TroupePeer, "llguidance": LLGuidancePeer, "xgrammar": XGrammarPeer,
}
# Processor time is the better one where other programs take the core away.
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter_ns, "cpu": time.process_time_ns}


def measure(
    peer: Peer, ranks: TokenRanks, order: dict[str, Any], clock: Clock = time.perf_counter_ns
) -> dict[str, Any]:
    """Compile a schema and write each text: the times, and which texts were taken whole."""
    bitmask = allocate_bitmask(1, ranks.eos_token_id + 1)
    start = clock()
    try:
        make_session = peer.compile(order["schema"])
    except Refused as error:
        return {"refused": str(error)[:300], "compile_ms": (clock() - start) / 1e6}
    make_session().fill(bitmask)
    compile_ms = (clock() - start) / 1e6
    fill_us: list[float] = []
    step_us: list[float] = []
    verdicts = []
    for text in order["texts"]:
        session = make_session()
        is_taken = all(time_step(session, each, bitmask, clock, fill_us, step_us) for each in ranks.encode(text))
        verdicts.append(is_taken and session.is_complete())
    return {"compile_ms": compile_ms, "fill_us": fill_us, "step_us": step_us, "verdicts": verdicts}


def time_step(
    session: Session,
    token_id: int,
    bitmask: np.ndarray,
    clock: Clock,
    fill_us: list[float],
    step_us: list[float],
) -> bool:
    """Fill a mask and take a token; mask and engine have to agree on it."""
    start = clock()
    session.fill(bitmask)
    filled = clock()
    is_taken = session.accept(token_id)
    end = clock()
    fill_us.append((filled - start) / 1e3)
    step_us.append((end - start) / 1e3)
    is_allowed = bool(bitmask[0, token_id >> 5] >> (token_id & 31) & 1)
    if is_allowed != is_taken:
        raise AssertionError(f"token {token_id}: the mask says {is_allowed}, the engine {is_taken}")
    return is_taken


def measure_rows(
    peer: Peer, ranks: TokenRanks, num_rows: int, clock: Clock = time.perf_counter_ns
) -> dict[str, float]:
    """Return the best time of one fill of rows that are all inside a string, in us; fresh states each time."""
    found = {}
    letters = ranks.encode(" the old house")
    for name, schema in ROW_SCHEMAS.items():
        try:
            make_session = peer.compile(schema)
        except Refused:
            continue
        sessions = [make_session() for _ in range(num_rows)]
        for number, session in enumerate(sessions):
            for token_id in [*ranks.encode(ROW_STARTS[name]), *letters[: number % 3]]:
                session.accept(token_id)
        bitmask = allocate_bitmask(num_rows, ranks.eos_token_id + 1)
        times = []
        for _ in range(NUM_REPEATS):
            for session in sessions:
                session.accept(letters[0])
            start = clock()
            peer.fill_rows(sessions, bitmask)
            times.append((clock() - start) / 1e3)
        # Whatever else the machine does can only add to it.
        found[name] = min(times)
    return found


def limit_memory() -> None:
    """Limit the address space to this much more than the imports use, if the system reports their use."""
    try:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY_BYTES, used + MAX_MEMORY_BYTES))


def main(arguments: Sequence[str]) -> None:
    """Answer orders until the other side closes the stream."""
    name, path, limit_s, clock_name = arguments
    clock = CLOCKS[clock_name]
    answers = os.fdopen(os.dup(1), "w")
    # Output printed by libraries must not get between the answers.
    os.dup2(2, 1)
    ranks = TokenRanks(Path(path))
    peer = PEERS[name](ranks)
    limit_memory()
    # Warm up: the first schema would otherwise be charged for the library's one-time setup.
    measure(peer, ranks, {"schema": ROW_SCHEMAS["unique items"], "texts": ['["a", "b"]']})
    for line in sys.stdin:
        order = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, float(limit_s))
        rows = order.get("rows")
        answer = (measure(peer, ranks, order, clock) if rows is None else measure_rows(peer, ranks, rows, clock))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
