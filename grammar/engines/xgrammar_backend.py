"""xgrammar: EBNF, matched character by character.

Its compiler has no limits and cannot be cancelled (400 character classes in a row take minutes), so each compile runs
in a process that is killed at a deadline (xgrammar_worker.py). xgrammar imports torch and transformers, which takes
seconds, so it is loaded when first used and not before.
"""

import importlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..backend import MAX_FORCED_BYTES, Matcher
from ..bit_row import check_bitmask
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..spec import GrammarSpec
from ..tags.gbnf_rules import write_ebnf
from ..vocabulary import Vocabulary

START_SECONDS = 60
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
        self._tokenizer = ""  # the vocabulary as the process reads it
        self.xgrammar: Any = None
        self.filler: XGrammarFiller | None = None

    def compile(self, spec: GrammarSpec) -> "XGrammarProgram":
        """Compile an EBNF grammar."""
        check_bounds(spec, self._limits)
        text = write_ebnf(spec.text)
        with self._lock:
            self._load()
        answer = self._run_worker(text)
        if "error" in answer:
            raise InvalidGrammar(f"{spec.kind} cannot be compiled: {tidy(answer['error'])}")
        return XGrammarProgram(
            self.xgrammar.CompiledGrammar.deserialize_json(answer["compiled"], self._info), self
        )

    def _run_worker(self, text: str) -> dict[str, str]:
        limits = self._limits
        order = {
            "tokenizer": self._tokenizer,
            "text": text,
            "max_seconds": limits.max_xgrammar_s,
            "max_memory_bytes": limits.max_xgrammar_memory_bytes,
        }
        # -P keeps the script's folder, whose module names are ours, off the import path.
        command = [sys.executable, "-P", str(WORKER_SCRIPT)]
        data, seconds = json.dumps(order).encode(), START_SECONDS + limits.max_xgrammar_s
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=seconds, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            reason = f"too large for xgrammar: no answer within {limits.max_xgrammar_s:g} s or out of memory"
            raise UnsupportedGrammar("", "ebnf", reason) from error
        answer: dict[str, str] = json.loads(done.stdout)
        return answer

    def _load(self) -> None:
        if self.filler is not None:
            return
        self.xgrammar = importlib.import_module("xgrammar")
        self._info = self.xgrammar.TokenizerInfo(
            # xgrammar treats only empty tokens as special.
            list(self.vocabulary.token_bytes),
            self.xgrammar.VocabType.RAW,
            vocab_size=self.vocabulary.size,
            stop_token_ids=list(self.vocabulary.eos_token_ids),
            add_prefix_space=False,
        )
        self._tokenizer = self._info.serialize_json()
        self.filler = XGrammarFiller(self.vocabulary, self.xgrammar.BatchGrammarMatcher(self._num_threads))


def check_bounds(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Refuse grammars that could take xgrammar long, because its compile can be neither limited nor cancelled."""
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

    def __init__(self, compiled: Any, backend: XGrammarBackend) -> None:
        self._compiled = compiled
        self._backend = backend
        self.size_bytes: int = compiled.memory_size_bytes

    def new_matcher(self) -> "XGrammarMatcher":
        """Return a matcher at the start of the grammar."""
        return XGrammarMatcher(self._backend.xgrammar.GrammarMatcher(self._compiled), self._backend)


class XGrammarMatcher(Matcher):
    """Grammar state of one request in xgrammar."""

    def __init__(self, engine: Any, backend: XGrammarBackend) -> None:
        assert backend.filler is not None, "a matcher exists only after its backend was loaded"
        super().__init__(backend.vocabulary)
        self.engine = engine
        self.filler = backend.filler

    def _take(self, token_id: int) -> bool:
        # xgrammar also refuses special tokens, but prints a line to stderr each time.
        return bool(self.vocabulary.token_bytes[token_id]) and bool(self.engine.accept_token(token_id))

    def _take_back(self, num_tokens: int) -> None:
        self.engine.rollback(num_tokens)

    def is_completed(self) -> bool:
        """Return whether the text so far is a complete sentence."""
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
