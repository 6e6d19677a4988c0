"""xgrammar: EBNF, and the few JSON schemas that llguidance refuses and xgrammar enforces exactly.

xgrammar drops keywords with no more than a warning on stderr, so schemas come here only through an
allow-list (json_schema/xgrammar_subset.py). It has no limits of its own and cannot be cancelled, so grammars
are bounded by text size and counted repetitions before they reach it. It imports torch and transformers,
which takes seconds, so it is loaded when first used and not when this package is.
"""

import importlib
import re
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from .bitmask import check_bitmask
from .errors import InvalidGrammar, UnsupportedGrammar
from .limits import GrammarLimits
from .spec import GrammarSpec
from .vocabulary import Vocabulary

_SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":"), "any": None}
_REPETITION = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class XGrammarBackend:
    """Compiles grammars with xgrammar for one vocabulary."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, num_threads: int) -> None:
        self.vocabulary = vocabulary
        self._limits = limits
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._compiler: Any = None
        self._xgrammar: ModuleType | None = None
        self.filler: XGrammarFiller | None = None

    def compile(self, spec: GrammarSpec) -> "XGrammarProgram":
        """Compile an EBNF grammar, or a JSON schema from the exact subset."""
        check_bounds(spec, self._limits)
        with self._lock:
            xgrammar = self._load()
        try:
            if spec.kind == "ebnf":
                compiled = self._compiler.compile_grammar(spec.text)
            elif spec.kind == "json_schema":
                compiled = self._compiler.compile_json_schema(
                    spec.text,
                    any_whitespace=spec.whitespace == "any",
                    separators=_SEPARATORS[spec.whitespace],
                    max_whitespace_cnt=64 if spec.whitespace == "any" else None,
                    strict_mode=False,
                )
            else:
                raise UnsupportedGrammar("", spec.kind, "xgrammar does not take this kind of grammar")
        except RuntimeError as error:
            raise InvalidGrammar(f"{spec.kind} cannot be compiled: {tidy(error)}") from error
        return XGrammarProgram(compiled, xgrammar, self)

    def _load(self) -> ModuleType:
        if self._xgrammar is None:
            xgrammar = importlib.import_module("xgrammar")
            info = xgrammar.TokenizerInfo(
                # Only empty tokens count as special there.
                list(self.vocabulary.token_bytes),
                xgrammar.VocabType.RAW,
                vocab_size=self.vocabulary.size,
                stop_token_ids=list(self.vocabulary.eos_token_ids),
                add_prefix_space=False,
            )
            # Compiled grammars are cached one level up, for all backends together.
            threads = self._num_threads
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
            self.filler = XGrammarFiller(self.vocabulary, xgrammar.BatchGrammarMatcher(threads))
            self._xgrammar = xgrammar
        return self._xgrammar


def check_bounds(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Refuse what could take xgrammar long: it can neither be limited nor stopped."""
    num_bytes = len(spec.text.encode())
    if num_bytes > limits.max_xgrammar_bytes:
        reason = f"{num_bytes} bytes are more than the {limits.max_xgrammar_bytes} that xgrammar is given"
        raise UnsupportedGrammar("", spec.kind, reason)
    if spec.kind != "ebnf":
        return
    total = sum(max(int(count or 0) for count in pair) for pair in _REPETITION.findall(spec.text))
    if total > limits.max_xgrammar_repetition:
        reason = f"counted repetitions add up to {total}; the limit is {limits.max_xgrammar_repetition}"
        raise UnsupportedGrammar("", spec.kind, reason)


def tidy(error: RuntimeError) -> str:
    """Return xgrammar's message without its log prefix."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip().split("\n")[0]


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


class XGrammarMatcher:
    """Grammar state of one request in xgrammar."""

    error: str | None = None

    def __init__(self, engine: Any, backend: XGrammarBackend) -> None:
        assert backend.filler is not None, "a matcher exists only after its backend was loaded"
        self.engine = engine
        self.filler = backend.filler
        self._vocabulary = backend.vocabulary
        self._num_tokens = 0

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        vocabulary = self._vocabulary
        if self.engine.is_terminated() or not 0 <= token_id < vocabulary.size:
            return False
        if not vocabulary.token_bytes[token_id] and token_id not in vocabulary.eos_token_ids:
            # The engine refuses special tokens too, but writes a line to stderr each time.
            return False
        is_accepted = self.engine.accept_token(token_id)
        self._num_tokens += is_accepted
        return is_accepted

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row."""
        if self.engine.is_terminated():
            check_bitmask(bitmask, self._vocabulary.num_words, [row])
            bitmask[row] = self._vocabulary.eos_mask
        else:
            self.filler.fill([self], [row], bitmask)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"cannot roll back {num_tokens} tokens of {self._num_tokens}")
        if num_tokens:
            self.engine.rollback(num_tokens)
            self._num_tokens -= num_tokens

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence."""
        return self.engine.is_completed()

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""
        return self.engine.is_terminated()


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
