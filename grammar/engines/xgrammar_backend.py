"""xgrammar: EBNF, matched character by character.

Its compiler has no limits and cannot be cancelled (400 character classes in a row take minutes), so it runs in a
process that is killed at a deadline (xgrammar_worker.py). It imports torch and transformers, which takes seconds, so
it is loaded when first used and not before.
"""

import importlib
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..backend import MAX_FORCED_BYTES, Matcher
from ..bit_row import check_bitmask
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .gbnf import rewrite_gbnf
from .killable_worker import KillableWorker, WorkerDied

WORKER_SCRIPT = Path(__file__).with_name("xgrammar_worker.py")
_REPETITION = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class XGrammarBackend:
    """Compiles grammars with xgrammar for one vocabulary."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, num_threads: int) -> None:
        self.vocabulary = vocabulary
        self._limits = limits
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._info: Any = None
        self._loaded: tuple[ModuleType, KillableWorker] | None = None
        self.filler: XGrammarFiller | None = None

    def compile(self, spec: GrammarSpec) -> "XGrammarProgram":
        """Compile an EBNF grammar."""
        check_bounds(spec, self._limits)
        order = {"text": rewrite_gbnf(spec.text)}
        with self._lock:
            xgrammar, worker = self._load()
        try:
            answer = worker.ask(order, self._limits.max_xgrammar_s)
        except WorkerDied as error:
            raise UnsupportedGrammar("", spec.kind, f"too large for xgrammar: {error}") from error
        if "error" in answer:
            raise InvalidGrammar(f"{spec.kind} cannot be compiled: {tidy(answer['error'])}")
        compiled = xgrammar.CompiledGrammar.deserialize_json(answer["compiled"], self._info)
        return XGrammarProgram(compiled, xgrammar, self)

    def close(self) -> None:
        """End the compile process."""
        if self._loaded is not None:
            self._loaded[1].close()

    def _load(self) -> tuple[ModuleType, KillableWorker]:
        if self._loaded is None:
            xgrammar = importlib.import_module("xgrammar")
            self._info = xgrammar.TokenizerInfo(
                # Only empty tokens count as special there.
                list(self.vocabulary.token_bytes),
                xgrammar.VocabType.RAW,
                vocab_size=self.vocabulary.size,
                stop_token_ids=list(self.vocabulary.eos_token_ids),
                add_prefix_space=False,
            )
            hello = {
                "tokenizer": self._info.serialize_json(),
                "max_memory_bytes": self._limits.max_xgrammar_memory_bytes,
                "max_seconds": math.ceil(self._limits.max_xgrammar_s) + 1,
            }
            worker = KillableWorker(WORKER_SCRIPT, hello, start_seconds=60)
            self.filler = XGrammarFiller(self.vocabulary, xgrammar.BatchGrammarMatcher(self._num_threads))
            self._loaded = xgrammar, worker
        return self._loaded


def check_bounds(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Refuse what could take xgrammar long: it can neither be limited nor stopped."""
    num_bytes = len(spec.text.encode())
    if num_bytes > limits.max_xgrammar_bytes:
        reason = f"{num_bytes} bytes are more than the {limits.max_xgrammar_bytes} that xgrammar is given"
        raise UnsupportedGrammar("", spec.kind, reason)
    total = sum(max(int(count or 0) for count in pair) for pair in _REPETITION.findall(spec.text))
    if total > limits.max_xgrammar_repetition:
        reason = f"counted repetitions add up to {total}; the limit is {limits.max_xgrammar_repetition}"
        raise UnsupportedGrammar("", spec.kind, reason)


def tidy(message: str) -> str:
    """Return xgrammar's message without its log prefix."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", message).strip().split("\n")[0]


class XGrammarProgram:
    """A compiled grammar, shared by its matchers."""

    def __init__(self, compiled: Any, xgrammar: ModuleType, backend: XGrammarBackend) -> None:
        self._compiled = compiled
        self._xgrammar = xgrammar
        self._backend = backend
        self.size_bytes: int = compiled.memory_size_bytes

    def new_matcher(self) -> "XGrammarMatcher":
        """Return a matcher at the start of the grammar."""
        return XGrammarMatcher(self._xgrammar.GrammarMatcher(self._compiled), self._backend)


class XGrammarMatcher(Matcher):
    """Grammar state of one request in xgrammar."""

    def __init__(self, engine: Any, backend: XGrammarBackend) -> None:
        assert backend.filler is not None, "a matcher exists only after its backend was loaded"
        super().__init__(backend.vocabulary)
        self.engine = engine
        self.filler = backend.filler

    def _take(self, token_id: int) -> bool:
        # The engine refuses special tokens too, but writes a line to stderr each time.
        return bool(self.vocabulary.token_bytes[token_id]) and bool(self.engine.accept_token(token_id))

    def _take_back(self, num_tokens: int) -> None:
        self.engine.rollback(num_tokens)

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence."""
        return bool(self.engine.is_completed())

    def _find_forced(self) -> bytes:
        return str(self.engine.find_jump_forward_string()).encode()[:MAX_FORCED_BYTES]


class XGrammarFiller:
    """Fills many rows in one call that releases the GIL."""

    def __init__(self, vocabulary: Vocabulary, batch: Any) -> None:
        self._vocabulary = vocabulary
        self._batch = batch
        rest = vocabulary.size % 32
        self._last_word = np.int32((1 << rest) - 1 if rest else -1)

    def fill(self, matchers: Sequence[XGrammarMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        check_bitmask(bitmask, self._vocabulary.num_words, rows)
        if len(matchers) == 1:
            matchers[0].engine.fill_next_token_bitmask(bitmask, rows[0])
        else:
            self._batch.batch_fill_next_token_bitmask([m.engine for m in matchers], bitmask, list(rows))
        # The engine sets bits beyond the vocabulary.
        bitmask[rows, -1] &= self._last_word
