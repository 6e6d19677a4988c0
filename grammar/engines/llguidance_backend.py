"""llguidance: JSON schemas, and regular expressions that outlines-core cannot take.

Measured in its favour: it accepts nothing that a schema forbids but what `schema/problems.py` and
`schema/open_names.py` name, compiles within a millisecond, and its limits bound a hostile grammar from the inside.
"""

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
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

from ..bitmask import check_bitmask
from ..csv_table import make_csv_pattern
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..regex.text import choices_to_regex, explain_pattern
from ..schema.multiples import find_large_multiple
from ..schema.refusal import SIGN, explain_refusal
from ..schema.unsatisfiable import close_in_place, close_unsatisfiable
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from ..xml.lark import make_xml_lark
from .lark import explain_complaint
from .llguidance_json import HEADER, make_json_grammar

MAX_NUM_CLOSED = 16  # of schemas that nothing satisfies, in one schema
MAX_SHOWN = 80  # characters of a pattern in a message
# Parts of the vocabulary whose masks llguidance has ready. A part is used whole where a lexeme goes on with its class;
# brackets are apart, since free text goes on with any character but the last one of its triggers.
_PLAIN = r'[^"\\\x00-\x1F\x7F<>\[\]{}]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_PLAIN + count for count in ("{1,10}", "{1,30}", "+"))]
SLICES += [r'[^"\\\x00-\x1F\x7F]+', r"[^<>\[\]{}]+"]


class Complaint(Exception):
    """What llguidance says about a grammar that it does not take."""


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

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, num_threads: int) -> None:
        self.vocabulary = vocabulary
        self.filler = LLGuidanceFiller(vocabulary, num_threads)
        wrapper = TokenizerWrapper(_TokenizerAdapter(vocabulary))
        self._tokenizer = LLTokenizer(
            wrapper, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids), slices=SLICES
        )
        # Written and never read, so compiles of several threads may meet in it.
        self._scratch = np.empty(vocabulary.num_words, np.int32)
        self._limits = LLParserLimits(
            initial_lexer_fuel=limits.initial_lexer_fuel,
            step_lexer_fuel=limits.step_lexer_fuel,
            max_lexer_states=limits.max_lexer_states,
            max_grammar_size=limits.max_grammar_size,
            verbose_errors=False,
        )

    def compile(self, spec: GrammarSpec) -> "LLGuidanceProgram":
        """Compile a JSON schema (normalised), a Lark grammar or a regular language."""
        self.write(spec)
        matcher = self._make_matcher(spec)
        for _ in range(MAX_NUM_CLOSED):
            if not matcher.is_error():
                break
            closed = self._close_unsatisfiable(spec, matcher.get_error())
            if closed is None:
                break
            spec, matcher = closed, self._make_matcher(closed)
        if matcher.is_error():
            self._refuse(spec, matcher.get_error())
        return self._finish(matcher, make_grammar(spec))

    def write(self, spec: GrammarSpec) -> str:
        """Return the grammar of a spec in llguidance's format, or raise GrammarError for what it must not have."""
        if spec.kind == "json_schema" and '"multipleOf"' in spec.text:
            problem = find_large_multiple(json.loads(spec.text))
            if problem is not None:
                raise UnsupportedGrammar(problem.pointer, problem.keyword, problem.reason)
        return make_grammar(spec)

    def compile_json(self, grammar: str) -> "LLGuidanceProgram":
        """Compile what llguidance_json.py writes.

        Raises:
            Complaint: llguidance does not take it.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise Complaint(matcher.get_error())
        return self._finish(matcher, grammar)

    def is_empty(self, terminal: str) -> bool:
        """Tell whether a Lark terminal matches nothing."""
        grammar = LLMatcher.grammar_from_lark(f"{HEADER}start: T\nT: {terminal}")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise Complaint(matcher.get_error())
        if matcher.is_accepting():
            return False
        matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        return matcher.is_error()

    def _finish(self, matcher: LLMatcher, grammar: str) -> "LLGuidanceProgram":
        # The lexer states of the first mask are made once, here: copies share them.
        matcher.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        return LLGuidanceProgram(matcher, self, grammar)

    def _make_matcher(self, spec: GrammarSpec) -> LLMatcher:
        return LLMatcher(self._tokenizer, make_grammar(spec), log_level=0, limits=self._limits)

    def _close_unsatisfiable(self, spec: GrammarSpec, message: str) -> GrammarSpec | None:
        """Return an equivalent spec without what makes llguidance take a schema for unsatisfiable."""
        if spec.kind != "json_schema" or not message.startswith(SIGN):
            return None
        schema, probe = json.loads(spec.text), partial(self._probe, spec)
        closed = close_unsatisfiable(schema, probe)
        if closed is None and spec.property_order == "any":
            closed = close_in_place(schema, message, probe)
        return (
            replace(spec, text=json.dumps(closed, ensure_ascii=False)) if isinstance(closed, dict) else None
        )

    def _refuse(self, spec: GrammarSpec, message: str) -> None:
        if spec.kind == "json_schema":
            raise explain_refusal(json.loads(spec.text), message, partial(self._probe, spec))
        if spec.kind == "lark":
            raise InvalidGrammar(f"the Lark grammar cannot be used: {explain_complaint(message)}")
        if spec.kind == "regex":
            self._refuse_pattern(spec.text, message)
        if "error" in message and "not supported" not in message:
            raise InvalidGrammar(f"{spec.kind} cannot be parsed: {message}")
        raise UnsupportedGrammar("", spec.kind, message)

    def _refuse_pattern(self, pattern: str, message: str) -> None:
        shown = pattern if len(pattern) <= MAX_SHOWN else pattern[:MAX_SHOWN] + "…"
        reason = f"{shown!r}: {explain_pattern(pattern, message)}"
        if "regex parse error" in message and "not supported" not in message:
            raise InvalidGrammar(f"the regex cannot be parsed: {reason}")
        raise UnsupportedGrammar("", "regex", reason)

    def _probe(self, spec: GrammarSpec, schema: object) -> str:
        """Return llguidance's complaint about a schema, "" when it has none."""
        matcher = self._make_matcher(replace(spec, text=json.dumps(schema), property_order="schema"))
        return matcher.get_error()


def make_grammar(spec: GrammarSpec) -> str:
    """Return a spec in llguidance's own format: a Lark grammar, with the schema as a grammar beside it."""
    if spec.kind == "json_schema":
        return make_json_grammar(spec)
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(HEADER + spec.text)
    if spec.kind == "xml":
        return LLMatcher.grammar_from_lark(HEADER + make_xml_lark(spec.text, spec.whitespace))
    return LLMatcher.grammar_from_lark(f"{HEADER}start: /{regex_to_lark(make_pattern(spec))}/")


def make_pattern(spec: GrammarSpec) -> str:
    """Return the pattern of a spec that is a regular language."""
    match spec.kind:
        case "regex":
            return spec.text
        case "choice":
            return choices_to_regex(json.loads(spec.text))
        case "csv":
            return make_csv_pattern(spec.text)
        case _:
            raise UnsupportedGrammar("", spec.kind, "llguidance does not take this kind of grammar")


class LLGuidanceProgram:
    """A compiled grammar: a matcher at the start, copied for each request."""

    def __init__(self, pristine: LLMatcher, backend: LLGuidanceBackend, grammar: str) -> None:
        self.grammar = grammar
        self._pristine = pristine
        self._backend = backend
        # The engine does not tell; its lexer and productions are a small multiple of the text.
        self.size_bytes = 64 * 1024 + 32 * len(grammar)

    def new_matcher(self) -> "LLGuidanceMatcher":
        """Return a matcher at the start of the grammar."""
        return LLGuidanceMatcher(self._pristine.deep_copy(), self._backend)


class LLGuidanceMatcher:
    """Grammar state of one request in llguidance.

    EOS never reaches the engine: consuming it there is sometimes a no-op, which a rollback could not undo.
    """

    def __init__(self, engine: LLMatcher, backend: LLGuidanceBackend) -> None:
        self.engine = engine
        self.filler = backend.filler
        self._vocabulary = backend.vocabulary
        self._num_tokens = 0
        self._is_terminated = False

    @property
    def error(self) -> str | None:
        """Why the engine gave up (a resource limit), or None."""
        return self.engine.get_error() if self.engine.is_error() else None

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, with nothing changed, when it is not allowed here."""
        if self._is_terminated or not 0 <= token_id < self._vocabulary.size:
            return False
        if token_id in self._vocabulary.eos_token_ids:
            self._is_terminated = self.engine.is_accepting()
            return self._is_terminated
        # A refused consume_token would leave the engine in an error state for good.
        if self.engine.try_consume_tokens([token_id]) != 1:
            return False
        self._num_tokens += 1
        return True

    def count_valid(self, token_ids: list[int]) -> int:
        """Return how many of some tokens, one after the other, are allowed; EOS is where a text may end.

        Nothing changes. Much cheaper than accepting them where they end the text.
        """
        return 0 if self._is_terminated else self.engine.validate_tokens(token_ids)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int = 0) -> None:
        """Write the allowed tokens into one row."""
        if self._is_terminated:
            check_bitmask(bitmask, self._vocabulary.num_words, [row])
            bitmask[row] = self._vocabulary.eos_mask
        else:
            self.filler.fill([self], [row], bitmask)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, EOS included."""
        num_text = num_tokens - (self._is_terminated and num_tokens > 0)
        if not 0 <= num_text <= self._num_tokens:
            num_accepted = self._num_tokens + self._is_terminated
            raise ValueError(f"cannot roll back {num_tokens} tokens of {num_accepted}")
        if num_text and not self.engine.rollback(num_text):
            raise ValueError(f"llguidance cannot roll back: {self.engine.get_error()}")
        self._num_tokens -= num_text
        self._is_terminated = self._is_terminated and num_tokens == 0

    def is_completed(self) -> bool:
        """Tell whether the text so far is a complete sentence."""
        return self.engine.is_accepting()

    def is_terminated(self) -> bool:
        """Tell whether EOS was accepted."""
        return self._is_terminated


class LLGuidanceFiller:
    """Fills many rows, with the GIL released: by threads of its own if it may have several."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._vocabulary = vocabulary
        self._executor = LLExecutor(num_threads) if num_threads > 1 else None
        # The last bitmask, its address and its number of rows; an array in use is never moved.
        self._known: tuple[Callable[[], np.ndarray | None], int, int] = (lambda: None, 0, 0)

    def fill(self, matchers: Sequence[LLGuidanceMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        address, row_bytes = self._locate(bitmask, rows), 4 * self._vocabulary.num_words
        if len(matchers) == 1 or self._executor is None:
            # Handing over to another thread costs more than one mask.
            for matcher, row in zip(matchers, rows, strict=True):
                matcher.engine.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        else:
            pairs = [(matcher.engine, row) for matcher, row in zip(matchers, rows, strict=True)]
            self._executor.unsafe_compute_mask_ptr(pairs, address, row_bytes, len(bitmask))
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher.engine.is_error():
                # In its error state the engine allows EOS, which would end an incomplete text.
                bitmask[row] = 0

    def _locate(self, bitmask: np.ndarray, rows: Sequence[int]) -> int:
        """Return the address of a bitmask; one that was checked before is only asked for its rows."""
        known, address, num_rows = self._known
        if rows and known() is bitmask and min(rows) >= 0 and max(rows) < num_rows:
            return address
        check_bitmask(bitmask, self._vocabulary.num_words, rows)
        address = bitmask.ctypes.data
        self._known = weakref.ref(bitmask), address, len(bitmask)
        return address
