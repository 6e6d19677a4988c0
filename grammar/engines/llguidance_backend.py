"""llguidance: JSON schemas, Lark, GBNF, XML, CSV and regular expressions.

Measured in its favour: it accepts nothing that a schema forbids but what `schema/exactness.py` names, compiles within
a millisecond, and its limits bound a hostile grammar from the inside.
"""

import json
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np
from llguidance import (
    LLExecutor,
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    regex_to_lark,
)

from ..backend import MAX_FORCED_BYTES, Filler, Matcher, Program
from ..bitmask import check_bitmask
from ..csv_table import make_csv_pattern
from ..errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..regex.text import choices_to_regex, explain_pattern
from ..spec import GrammarSpec
from ..tags.gbnf_rules import write_gbnf
from ..vocabulary import Vocabulary
from ..xml.lark import make_xml_lark
from .lark import explain_complaint
from .llguidance_json import HEADER

FEW_ROWS = 16
LONG_GRAMMAR = 8192  # characters; longer ones may take 30 ms to compile
MAX_SHOWN = 80  # characters of a pattern in a message
# Parts of the vocabulary whose masks llguidance has ready. A part is used whole where a lexeme goes on with its class;
# > is apart, since free text goes on with any character but the last one of its triggers.
_PLAIN = r'[^"\\\x00-\x1F\x7F<>\[\]{}]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_PLAIN + count for count in ("{1,10}", "{1,30}", "+"))]
SLICES += [r'[^">\\\x00-\x1F\x7F]+', r'[^"\\\x00-\x1F\x7F]+', r"[^>]+"]


class Complaint(Exception):
    """An error of llguidance about a grammar."""


class LexerShare:
    """The lexer states that one grammar may make; it lives as long as the grammar or a matcher of it."""

    def __init__(self, num_states: int, granted: dict[int, int]) -> None:
        self.num_states = num_states
        self._granted = granted
        granted[id(self)] = num_states

    def __del__(self) -> None:
        self._granted.pop(id(self), None)


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
        self._ids = {token: index for index, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        # Asked only for forced tokens, which HEADER turns off; single bytes are good enough.
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([byte])] for byte in data if bytes([byte]) in self._ids]


class LLGuidanceBackend:
    """Compiles grammars with llguidance for one vocabulary."""

    name = "llguidance"

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: GrammarLimits,
        num_threads: int,
        native_pool: Executor | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._native_pool = native_pool
        self.filler = LLGuidanceFiller(vocabulary, num_threads)
        wrapper = TokenizerWrapper(_TokenizerAdapter(vocabulary))
        self.tokenizer = LLTokenizer(
            wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids), slices=SLICES
        )
        # The engine writes here and nothing reads it, so compiles in several threads may share it.
        self._scratch = np.empty(vocabulary.num_words, np.int32)
        self._limits = limits
        # The states of each share that is alive.
        self._granted: dict[int, int] = {}
        self._lock = threading.Lock()

    def count_states_left(self) -> int:
        """Return how many states no grammar may make yet; below 0 where grammars in use exceed the limit."""
        return self._limits.max_total_lexer_states - sum(self._granted.copy().values())

    def _make_share(self, num_more: int) -> LexerShare:
        limits = self._limits
        with self._lock:
            left = self.count_states_left()
            wanted = min(limits.max_lexer_states + num_more, left // 8)
            least = min(limits.min_lexer_states, limits.max_lexer_states)
            return LexerShare(max(wanted, least), self._granted)

    def compile(self, spec: GrammarSpec) -> Program:
        """Compile a Lark grammar, an XML tree or a regular language."""
        max_items = self._limits.max_gbnf_items if spec.kind == "ebnf" else None
        try:
            return self.compile_text(make_grammar(spec), max_items=max_items)
        except Complaint as complaint:
            raise explain_refusal(spec, str(complaint)) from complaint

    def compile_text(self, grammar: str, num_quotable: int = 0, max_items: int | None = None) -> Program:
        """Compile a grammar in llguidance's own format.

        Args:
            num_quotable: the characters of a source in it, whose every word is a part of the lexer.
            max_items: bound on the work of one mask, llguidance's own by default.

        Raises:
            Complaint: llguidance does not take it.
        """
        share = self._make_share(num_quotable // 4)
        matcher = self._make_matcher(grammar, share.num_states, max_items, num_quotable)
        if matcher.is_error():
            raise Complaint(matcher.get_error())
        # The lexer states of the first mask are made once, here: copies share them.
        matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        if matcher.is_error():
            raise InvalidGrammar(f"the grammar allows no first token: {matcher.get_error()}")
        # llguidance reports no size; its lexer and productions take a small multiple of the text.
        size = 64 * 1024 + 32 * len(grammar)
        return Program(lambda: LLGuidanceMatcher(matcher.deep_copy(), self, share), size, grammar)

    def find_complaint(self, grammar: str) -> str:
        """Return llguidance's complaint about a grammar, "" when it has none."""
        return self._make_matcher(grammar).get_error()

    def is_empty(self, terminal: str) -> bool:
        """Return whether a Lark terminal matches nothing.

        Raises:
            Complaint: llguidance does not take it.
        """
        matcher = self._make_matcher(LLMatcher.grammar_from_lark(f"{HEADER}start: T\nT: {terminal}"))
        if matcher.is_error():
            raise Complaint(matcher.get_error())
        if matcher.is_accepting():
            return False
        matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        return matcher.is_error()

    def _make_matcher(
        self, grammar: str, num_states: int | None = None, max_items: int | None = None, num_quotable: int = 0
    ) -> LLMatcher:
        """Return a matcher at the start of a grammar, in its error state if llguidance does not take it."""
        bounds = LLParserLimits(
            initial_lexer_fuel=self._limits.initial_lexer_fuel + 40 * num_quotable,
            step_lexer_fuel=self._limits.step_lexer_fuel + 20 * num_quotable,
            max_lexer_states=num_states or self._limits.max_lexer_states,
            max_grammar_size=self._limits.max_grammar_size,
            max_items_in_row=self._limits.max_items_in_row,
            step_max_items=max_items,
            verbose_errors=False,
        )
        make = partial(LLMatcher, self.tokenizer, grammar, log_level=0, limits=bounds)
        pool = self._native_pool if len(grammar) > LONG_GRAMMAR else None
        return make() if pool is None else pool.submit(make).result()


def explain_refusal(spec: GrammarSpec, message: str) -> GrammarError:
    """Return the error for a spec about which llguidance complains."""
    if spec.kind == "lark":
        return InvalidGrammar(f"the Lark grammar cannot be used: {explain_complaint(message)}")
    if spec.kind == "ebnf":
        # Its places are those of the Lark grammar, which is not the user's.
        reason = re.sub(r"^(?:at )?\d+\(\d+\): ", "", explain_pattern("\n", message))
        return InvalidGrammar(f"the GBNF grammar cannot be used: {reason}")
    reason = message
    if spec.kind == "regex":
        shown = spec.text if len(spec.text) <= MAX_SHOWN else spec.text[:MAX_SHOWN] + "…"
        reason = f"{shown!r}: {explain_pattern(spec.text, message)}"
    if "parse error" in message and "not supported" not in message:
        return InvalidGrammar(f"the {spec.kind} cannot be parsed: {reason}")
    return UnsupportedGrammar("", spec.kind, reason)


def make_grammar(spec: GrammarSpec) -> str:
    """Return a spec in llguidance's own format."""
    match spec.kind:
        case "lark":
            lark = spec.text
        case "ebnf":
            # One lexeme for each character, so that text is read as GBNF means it and not in the longest lexemes.
            lark = f"start: groot\n{write_gbnf(spec.text, 'g')}"
        case "xml":
            lark = make_xml_lark(spec.text, spec.whitespace)
        case "choice":
            lark = f"start: /{regex_to_lark(choices_to_regex(json.loads(spec.text)))}/"
        case "csv":
            lark = f"start: /{regex_to_lark(make_csv_pattern(spec.text))}/"
        case _:
            lark = f"start: /{regex_to_lark(spec.text)}/"
    return LLMatcher.grammar_from_lark(HEADER + lark)


class LLGuidanceMatcher(Matcher):
    """Grammar state of one request in llguidance."""

    def __init__(self, engine: LLMatcher, backend: LLGuidanceBackend, share: LexerShare) -> None:
        super().__init__(backend.vocabulary)
        self.engine = engine
        self.filler = backend.filler
        self._tokenizer = backend.tokenizer
        self._share = share

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """Why the engine gave up (a resource limit), or None."""
        return self.engine.get_error() if self.engine.is_error() else None

    def _take(self, token_id: int) -> bool:
        # Calling consume_token with a forbidden token would leave the engine in a permanent error state.
        return self.engine.try_consume_tokens([token_id]) == 1

    def accept_allowed(self, token_id: int) -> bool:
        """Advance by a token that the last mask allows; where that takes long, other threads run Python meanwhile."""
        if not self.is_plain_text([token_id]):
            return self.accept_token(token_id)
        # Only the call for several matchers releases the GIL. The other one is in its error state.
        pairs = [(self.engine, token_id), (LLMatcher(self._tokenizer, "", log_level=0), token_id)]
        is_taken: bool = LLExecutor(1).consume_token_par(pairs)[0]
        self.num_text_tokens += is_taken
        return is_taken

    def _take_back(self, num_tokens: int) -> None:
        if not self.engine.rollback(num_tokens):
            raise ValueError(f"llguidance cannot roll back: {self.engine.get_error()}")

    def is_plain_text(self, token_ids: Sequence[int]) -> bool:
        known, ends = range(self.vocabulary.size), self.vocabulary.eos_set
        return (
            not self.has_ended
            and ends.isdisjoint(token_ids)
            and all(token_id in known for token_id in token_ids)
        )

    def count_valid(self, token_ids: list[int]) -> int:
        """Return how many of some tokens, one after the other, are allowed; EOS is where a text may end.

        Nothing changes. Much cheaper than accepting them where they end the text.
        """
        return 0 if self.has_ended else self.engine.validate_tokens(token_ids)

    def is_completed(self) -> bool:
        return self.engine.is_accepting()

    def _find_forced(self) -> bytes:
        # Ask a copy, because the engine treats forced tokens as written.
        return self.engine.deep_copy().compute_ff_bytes()[:MAX_FORCED_BYTES]


class LLGuidanceFiller(Filler):
    """Fills many rows, with the GIL released: by threads of its own if it may have several."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads)
        # The executor fills in threads of its own. One alone gains nothing; waking several takes as long as some rows.
        self._num_direct = FEW_ROWS if num_threads > 1 else sys.maxsize

    def fill(self, matchers: Sequence[LLGuidanceMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        address, row_bytes = self._locate(bitmask, rows), 4 * self._vocabulary.num_words
        if len(matchers) <= self._num_direct:
            for matcher, row in zip(matchers, rows, strict=True):
                matcher.engine.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        else:
            pairs = [(matcher.engine, row) for matcher, row in zip(matchers, rows, strict=True)]
            self._executor.unsafe_compute_mask_ptr(pairs, address, row_bytes, len(bitmask))
        # In its error state the engine allows EOS, which would end the text.
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher.engine.is_error():
                bitmask[row] = 0

    def fill_drafts(
        self,
        matchers: Sequence[LLGuidanceMatcher],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        bitmask: np.ndarray,
    ) -> list[int]:
        own = [i for i, draft in enumerate(drafts) if draft and matchers[i].is_plain_text(draft)]
        rest = [i for i in range(len(matchers)) if i not in own]
        others = [matchers[i] for i in rest], [drafts[i] for i in rest], [rows[i] for i in rest]
        counts = dict(zip(rest, super().fill_drafts(*others, bitmask), strict=True))
        counts |= {i: matchers[i].engine.validate_tokens(list(drafts[i])) for i in own}
        spans = [range(rows[i], rows[i] + counts[i] + 1) for i in own]
        address = self._locate(bitmask, [row for span in spans for row in (span[0], span[-1])])
        asked = [(matchers[i].engine, rows[i], list(drafts[i][: max(counts[i], 1)])) for i in own]
        row_bytes = 4 * self._vocabulary.num_words
        if asked:  # the call fails without matchers
            self._executor.unsafe_compute_mask_ptr_with_draft_token(asked, address, row_bytes, len(bitmask))
        for i, span in zip(own, spans, strict=True):
            if matchers[i].engine.is_error():
                bitmask[span] = 0
        return [counts[i] for i in range(len(matchers))]

    def _locate(self, bitmask: np.ndarray, rows: Sequence[int]) -> int:
        """Return the address of a bitmask, checked for these rows."""
        check_bitmask(bitmask, self._vocabulary.num_words, rows)
        return bitmask.ctypes.data
