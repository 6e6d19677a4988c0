"""llguidance: JSON schemas, Lark, GBNF, XML, CSV and regular expressions.

Measured in its favour: it accepts nothing that a schema forbids but what `schema/exactness.py` names, compiles within
a millisecond, and its limits bound a hostile grammar from the inside.
"""

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from ..backend import MAX_FORCED_BYTES, Filler, Matcher, Program, Usage
from ..bitmask import check_bitmask
from ..csv_table import make_csv_pattern
from ..errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from ..limits import GrammarLimits
from ..match.number_bound import NumberBound
from ..regex.text import choices_to_regex, explain_pattern
from ..spec import GrammarSpec
from ..tags.gbnf_rules import write_gbnf
from ..vocabulary import Vocabulary
from ..xml.lark import make_xml_lark
from .lark import explain_complaint
from .llguidance_json import HEADER

NUM_THREADS = 2  # that take tokens of slow grammars
LONG_GRAMMAR = 8192  # characters; longer ones may take 30 ms to compile
MAX_SHOWN = 80  # characters of a pattern in a message
# Masks of these kinds walk through the vocabulary character by character, so that a program begins apart from others.
SLOW_KINDS = ("ebnf", "lark")
NUM_APART = 16
TOO_MANY_ITEMS = "Too many items"  # llguidance's message
NUM_REPLAYED = 64  # tokens taken again between two masks, which give the lexer new fuel
# Parts of the vocabulary whose masks llguidance has ready. A part is used whole where a lexeme goes on with its class;
# > is apart, since free text goes on with any character but the last one of its triggers.
_PLAIN = r'[^"\\\x00-\x1F\x7F<>\[\]{}]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_PLAIN + count for count in ("{1,10}", "{1,30}", "+"))]
SLICES += [r'[^">\\\x00-\x1F\x7F]+', r'[^"\\\x00-\x1F\x7F]+', r"[^>]+"]


class Complaint(Exception):
    """An error of llguidance about a grammar."""


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


class LLGuidanceBackend:
    """Compiles grammars with llguidance for one vocabulary."""

    name = "llguidance"

    def __init__(
        self, vocabulary: Vocabulary, limits: GrammarLimits, native_pool: Executor | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self.limits = limits
        self._native_pool = native_pool
        self.filler = LLGuidanceFiller(vocabulary)
        self.number_bound = NumberBound(vocabulary)
        self.executor = LLExecutor(NUM_THREADS)
        adapter = _TokenizerAdapter(vocabulary)
        self._marker = adapter.marker
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(adapter),
            n_vocab=len(adapter.tokens),
            eos_token=list(vocabulary.eos_token_ids),
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

    def compile(self, spec: GrammarSpec) -> Program:
        """Compile a Lark grammar, an XML tree or a regular language."""
        try:
            return self.compile_text(make_grammar(spec), is_slow=spec.kind in SLOW_KINDS)
        except Complaint as complaint:
            raise explain_refusal(spec, str(complaint)) from complaint

    def compile_text(
        self, grammar: str, num_quotable: int = 0, is_slow: bool = False, is_json: bool = False
    ) -> Program:
        """Compile a grammar in llguidance's own format.

        Args:
            num_quotable: the characters of a source in it, whose every word is a part of the lexer.
            is_slow: its masks may take milliseconds.
            is_json: the text is JSON from its first byte, so that long numbers are ended (`NumberBound`).

        Raises:
            Complaint: llguidance does not take it.
            InvalidGrammar: it allows no first token, or the first mask takes too long.
        """
        template = Template(self, grammar, num_quotable, is_slow, self.number_bound if is_json else None)
        template.start()
        template.usage.num_apart = NUM_APART if is_slow else 0
        # llguidance reports no size; its lexer and productions take a small multiple of the text.
        size = 256 * 1024 + 32 * len(grammar)
        return Program(lambda: LLGuidanceMatcher(template), size, grammar, usage=template.usage)

    def compute_mask(self, engine: LLMatcher) -> float:
        """Compute a mask and discard it; returns its processor time."""
        start = time.thread_time()
        engine.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        return time.thread_time() - start

    def find_complaint(self, grammar: str) -> str:
        """Return llguidance's complaint about a grammar, "" when it has none."""
        return self.make_engine(grammar).get_error()

    def is_empty(self, terminal: str) -> bool:
        """Return whether a Lark terminal matches nothing.

        Raises:
            Complaint: llguidance does not take it.
        """
        engine = self.make_engine(LLMatcher.grammar_from_lark(f"{HEADER}start: T\nT: {terminal}"))
        if engine.is_error():
            raise Complaint(engine.get_error())
        if engine.is_accepting():
            return False
        self.compute_mask(engine)
        return engine.is_error()

    def make_engine(
        self, grammar: str, num_items: int | None = None, num_quotable: int = 0
    ) -> LLMatcher:
        """Return a matcher at the start of a grammar, in its error state if llguidance does not take it."""
        limits = self.limits
        bounds = LLParserLimits(
            initial_lexer_fuel=limits.initial_lexer_fuel + 40 * num_quotable,
            step_lexer_fuel=limits.step_lexer_fuel + 20 * num_quotable,
            max_lexer_states=limits.max_lexer_states + num_quotable // 4,
            max_grammar_size=limits.max_grammar_size,
            max_items_in_row=limits.max_items_in_row,
            step_max_items=num_items or limits.step_max_items,
            verbose_errors=False,
        )
        make = partial(LLMatcher, self._tokenizer, grammar, log_level=0, limits=bounds)
        pool = self._native_pool if len(grammar) > LONG_GRAMMAR else None
        return make() if pool is None else pool.submit(make).result()


@dataclass(slots=True)
class Template:
    """A grammar in llguidance, of which each request gets a copy. The copies share the lexer with its states.

    Attributes:
        engine: at the start of the grammar.
        scout: the same with few items a mask, once the engine has many (`LLGuidanceMatcher.compute_mask`).
    """

    backend: LLGuidanceBackend
    grammar: str
    num_quotable: int
    is_slow: bool
    number_bound: NumberBound | None
    usage: Usage = field(default_factory=Usage)
    engine: LLMatcher = field(init=False)
    scout: LLMatcher | None = None

    def start(self) -> None:
        """Make the engine and its first mask: the lexer states of that are made once."""
        self.renew()
        if self.engine.is_error():
            raise Complaint(self.engine.get_error())
        time_s, reason = self.backend.compute_mask(self.engine), ""
        if TOO_MANY_ITEMS in self.engine.get_error():
            self.give_more_items()
            assert self.scout is not None
            if not (reason := self.find_slowness(self.scout)):
                time_s = self.backend.compute_mask(self.engine)
        if reason or self.engine.is_error():
            raise InvalidGrammar(f"the grammar allows no first token: {reason or tidy(self.engine.get_error())}")
        self.usage.note_mask(time_s)

    @property
    def num_items(self) -> tuple[int, int]:
        """The items that a mask may have at first, and later."""
        limits = self.backend.limits
        if self.is_slow:
            return limits.step_max_slow_items, limits.step_most_slow_items
        return limits.step_max_items, limits.step_most_items

    def find_slowness(self, scout: LLMatcher) -> str:
        """Return why a mask that needs more items than the scout has may not have them; "" if it may."""
        (few, many), limit_s = self.num_items, self.backend.limits.max_mask_s
        # The first mask may have made lexer states; the second finds them.
        forecast_s = min(self.backend.compute_mask(scout.deep_copy()) for _ in range(2)) * many / few
        if forecast_s <= limit_s:
            return ""
        return f"it is too slow: a mask may take {forecast_s:.2g} s of processor time; the limit is {limit_s:g} s"

    def give_more_items(self) -> None:
        if self.scout is None:
            self.scout = self._make_engine(self.num_items[0])
        self.renew()

    def renew(self) -> None:
        """Begin anew, with a lexer that has no states yet."""
        self.engine = self._make_engine(self.num_items[self.scout is not None])

    def _make_engine(self, num_items: int) -> LLMatcher:
        return self.backend.make_engine(self.grammar, num_items, self.num_quotable)


def tidy(error: str) -> str:
    """Return llguidance's message about a limit in terms of the grammar."""
    if TOO_MANY_ITEMS in error:
        return f"it is too ambiguous: {TOO_MANY_ITEMS.lower()} in a mask; repetitions inside repetitions are one cause"
    return error.replace("<non-verbose/>", "").strip()


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

    def __init__(self, template: Template) -> None:
        super().__init__(template.backend.vocabulary, template.usage)
        self.engine = template.engine.deep_copy()
        self.scout = template.scout and template.scout.deep_copy()
        self.filler = template.backend.filler
        self._template = template
        self._token_ids: list[int] = []
        # The number of tokens at the last renewal, and whether it gave more items.
        self._renewed: tuple[int, bool] | None = None
        self._failure = ""

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """Why the engine gave up (a resource limit), or None."""
        return self._failure or (tidy(self.engine.get_error()) if self.engine.is_error() else None)

    def compute_mask(self, address: int, num_bytes: int) -> bool:
        """Write the next mask to an address; False if a limit was met.

        With many items, an ambiguous part of the grammar could take minutes. So a scout with few goes first, and its
        time is a forecast.
        """
        if self.scout is not None:
            scout = self.scout.deep_copy()
            scout.unsafe_compute_mask_ptr(address, num_bytes)
            if not scout.is_error():
                return True
            if TOO_MANY_ITEMS in scout.get_error() and (reason := self._template.find_slowness(self.scout)):
                self._failure = reason
                return False
        self.engine.unsafe_compute_mask_ptr(address, num_bytes)
        return not self.engine.is_error()

    def bound_number(self, words: np.ndarray, draft: Sequence[int] = ()) -> None:
        """End a long number in the mask of the text and a draft."""
        if self._template.number_bound is not None:
            self._template.number_bound.apply([*self._token_ids, *draft] if draft else self._token_ids, words)

    def _take(self, token_id: int) -> bool:
        # Calling consume_token with a forbidden token would leave the engine in a permanent error state.
        if self.engine.try_consume_tokens([token_id]) != 1:
            return False
        self._token_ids.append(token_id)
        if self.scout is not None:
            self.scout.try_consume_tokens([token_id])
        return True

    def accept_allowed(self, token_id: int) -> bool:
        """Advance by a token that the last mask allows, without the GIL where that may take long."""
        if not self._template.is_slow or not self.is_plain_text([token_id]):
            return self.accept_token(token_id)
        # Only the call for several matchers releases the GIL.
        backend = self._template.backend
        other = self.scout or backend.make_engine("")
        is_taken: bool = backend.executor.consume_token_par([(self.engine, token_id), (other, token_id)])[0]
        if is_taken:
            self._token_ids.append(token_id)
            self.num_text_tokens += 1
        return is_taken

    def _take_back(self, num_tokens: int) -> None:
        del self._token_ids[-num_tokens:]
        if self.scout is not None:
            self.scout.rollback(num_tokens)
        # An engine that met a limit cannot roll back; its successor takes the tokens that are left.
        if not self.engine.rollback(num_tokens) and not self.engine.is_error():
            raise ValueError("llguidance cannot roll back")

    @property
    def is_renewable(self) -> bool:
        return not self._failure

    def renew(self) -> bool:
        template, needs_more = self._template, TOO_MANY_ITEMS in self.engine.get_error()
        place = len(self._token_ids), needs_more
        if self._failure or place == self._renewed:
            # The lexer, which requests to come would share, may be the cause.
            template.renew()
            return False
        self._renewed = place
        if needs_more:
            template.give_more_items()
        else:
            template.renew()
        self.engine, self.usage.grown_bytes = template.engine.deep_copy(), 0
        self._replay(self.engine)
        self.scout = template.scout and template.scout.deep_copy()
        if self.scout is not None:
            self._replay(self.scout)
        return True

    def _replay(self, engine: LLMatcher) -> None:
        for start in range(0, len(self._token_ids), NUM_REPLAYED):
            self._template.backend.compute_mask(engine)
            engine.consume_tokens(self._token_ids[start : start + NUM_REPLAYED])

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
    """Fills rows one after the other, with the GIL released."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def fill(self, matchers: Sequence[LLGuidanceMatcher], rows: Sequence[int], bitmask: np.ndarray) -> None:
        address, row_bytes = self._locate(bitmask, rows), 4 * self._vocabulary.num_words
        start = time.thread_time()
        for matcher, row in zip(matchers, rows, strict=True):
            # In its error state the engine allows EOS, which would end the text.
            if not matcher.compute_mask(address + row * row_bytes, row_bytes):
                bitmask[row] = 0
            matcher.bound_number(bitmask[row])
            end = time.thread_time()
            matcher.usage.note_mask(end - start)
            start = end

    def fill_drafts(
        self,
        matchers: Sequence[LLGuidanceMatcher],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        bitmask: np.ndarray,
    ) -> list[int]:
        own = [
            i
            for i, draft in enumerate(drafts)
            if draft and matchers[i].scout is None and matchers[i].is_plain_text(draft)
        ]
        rest = [i for i in range(len(matchers)) if i not in own]
        others = [matchers[i] for i in rest], [drafts[i] for i in rest], [rows[i] for i in rest]
        counts = dict(zip(rest, super().fill_drafts(*others, bitmask), strict=True))
        row_bytes = 4 * self._vocabulary.num_words
        for i in own:
            engine, start = matchers[i].engine, time.thread_time()
            counts[i] = engine.validate_tokens(list(drafts[i]))
            span = range(rows[i], rows[i] + counts[i] + 1)
            address = self._locate(bitmask, (span[0], span[-1])) + rows[i] * row_bytes
            draft = list(drafts[i][: max(counts[i], 1)])
            # The stubs of llguidance lack it.
            engine.unsafe_compute_mask_ptr_with_draft_token(address, row_bytes, draft)  # type: ignore[attr-defined]
            if engine.is_error():
                bitmask[span] = 0
            for place, row in enumerate(span):
                matchers[i].bound_number(bitmask[row], drafts[i][:place])
            matchers[i].usage.note_mask((time.thread_time() - start) / len(span))
        return [counts[i] for i in range(len(matchers))]

    def _locate(self, bitmask: np.ndarray, rows: Sequence[int]) -> int:
        """Return the address of a bitmask, checked for these rows."""
        check_bitmask(bitmask, self._vocabulary.num_words, rows)
        return bitmask.ctypes.data
