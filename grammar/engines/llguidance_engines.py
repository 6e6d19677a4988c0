"""Engines: makes engines of llguidance for one vocabulary, within limits."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..errors import UnsupportedGrammar
from ..limits import GrammarLimits
from ..match.number_bound import NumberBound
from ..vocabulary import Vocabulary

NUM_THREADS = 2  # that take tokens of slow grammars
LONG_GRAMMAR = 8192  # characters; longer ones may take 30 ms to compile
# llguidance's compiler recurses from rule to rule, up to 12 kB each, and an overflow ends the process. 256 KiB of rules
# that each call the next take 100 MB; only what is used of a stack takes memory.
STACK_BYTES = 512 * 1024**2
_STACK_LOCK = threading.Lock()
# llguidance's messages: for a state without a next byte, and for limits.
NOTHING = "NoExtensionBias"
TOO_MANY_ITEMS = "Too many items"
TOO_MANY_SYMBOLS = "grammar.symbols.len() < u16::MAX"
MAX_NUM_SYMBOLS = 65_525
# Parts of the vocabulary whose masks llguidance has ready. A part is used whole where a lexeme goes on with its class;
# > is apart, since free text goes on with any character but the last one of its triggers.
_PLAIN = r'[^"\\\x00-\x1F\x7F<>\[\]{}]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_PLAIN + count for count in ("{1,10}", "{1,30}", "+"))]
SLICES += [r'[^">\\\x00-\x1F\x7F]+', r'[^"\\\x00-\x1F\x7F]+', r"[^>]+"]


class Complaint(Exception):
    """An error of llguidance about a grammar."""


def read_error(engine: LLMatcher) -> str:
    """Return llguidance's error in terms of the grammar, "" for none."""
    error = engine.get_error()
    if TOO_MANY_ITEMS in error:
        return f"it is too ambiguous: {TOO_MANY_ITEMS.lower()} in a mask; repetitions inside repetitions are one cause"
    if TOO_MANY_SYMBOLS in error:
        return f"it is too large: its rules take more than {MAX_NUM_SYMBOLS:,} symbols"
    if error.startswith("panic"):
        return "it cannot be read, because of a fault in llguidance"
    return error.replace(NOTHING, "no text satisfies the rest of it").replace("<non-verbose/>", "").strip()


class _TokenizerAdapter:
    """A vocabulary in the form LLTokenizer asks for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = list(vocabulary.eos_token_ids)
        # A leading 0xFF marks a special token there; no UTF-8 text contains that byte.
        self.tokens = [b"" if b"\xff" in token else token for token in vocabulary.token_bytes]
        for index in vocabulary.eos_token_ids:
            self.tokens[index] = b"\xff<eos_%d>" % index
        # A token without text marks places in a grammar (tags/checked.py); one more, if a mask has the room.
        named = {*vocabulary.special_tokens.values()}
        blank = (i for i in range(vocabulary.size - 1, -1, -1) if not self.tokens[i] and i not in named)
        self.marker = next(blank, vocabulary.size if vocabulary.size % 32 else None)
        if self.marker == vocabulary.size:
            self.tokens.append(b"")
        self._ids = {token: index for index, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        # Asked only for forced tokens, which HEADER turns off; single bytes are good enough.
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([byte])] for byte in data if bytes([byte]) in self._ids]


class Engines:
    """Makes engines for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, native_pool: Executor | None = None) -> None:
        self.vocabulary = vocabulary
        self.limits = limits
        self._native_pool = native_pool
        self.number_bound = NumberBound(vocabulary)
        self.executor = LLExecutor(NUM_THREADS)
        adapter = _TokenizerAdapter(vocabulary)
        self._marker = adapter.marker
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(adapter), n_vocab=len(adapter.tokens), eos_token=list(vocabulary.eos_token_ids),
            slices=SLICES,
        )
        # The engine writes here and nothing reads it, so several threads may share it.
        self._scratch = np.empty(vocabulary.num_words, np.int32)

    @property
    def marker(self) -> int:
        """A token without text, which only a grammar with markers names."""
        if self._marker is None:
            raise UnsupportedGrammar("", "structural_tag", "the vocabulary has no token without text to mark values")
        return self._marker

    def make_engine(self, grammar: str, num_items: int | None = None, num_quotable: int = 0) -> LLMatcher:
        """Return a matcher at the start of a grammar, in its error state if llguidance does not take it."""
        limits = self.limits
        bounds = LLParserLimits(
            initial_lexer_fuel=limits.initial_lexer_fuel + 40 * num_quotable,
            step_lexer_fuel=limits.step_lexer_fuel + 20 * num_quotable,
            max_lexer_states=limits.max_lexer_states + num_quotable // 4,
            max_grammar_size=limits.max_grammar_size, max_items_in_row=limits.max_items_in_row,
            step_max_items=num_items or limits.step_max_items, verbose_errors=False,
        )
        make = partial(LLMatcher, self._tokenizer, grammar, log_level=0, limits=bounds)
        if len(grammar) <= LONG_GRAMMAR:
            return make()
        pool = self._native_pool
        return run_deep(make) if pool is None else pool.submit(run_deep, make).result()

    def compute_mask(self, engine: LLMatcher) -> float:
        """Compute a mask and discard it; returns its processor time."""
        start = time.thread_time()
        engine.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        return time.thread_time() - start


def run_deep(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Call a function in a thread with a large stack, which has the priority of this one."""
    with ThreadPoolExecutor(1) as pool:
        with _STACK_LOCK:
            usual = threading.stack_size(STACK_BYTES)
            try:
                made = pool.submit(make)
            finally:
                threading.stack_size(usual)
        return made.result()
