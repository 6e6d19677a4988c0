"""LLGuidanceMatcher: a request's state in a grammar of llguidance; the matchers of a grammar share its Template."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher

from ..backend import MAX_FORCED_BYTES, Matcher, Usage
from ..errors import InvalidGrammar
from ..match.number_bound import NumberBound
from .llguidance_engines import TOO_MANY_ITEMS, Complaint, Engines, read_error

NUM_REPLAYED = 64  # tokens taken again between two masks, which give the lexer new fuel


@dataclass(slots=True)
class Template:
    """A grammar in llguidance, of which each request gets a copy. The copies share the lexer with its states.

    Attributes:
        engine: at the start of the grammar.
        scout: the same with few items a mask, once the engine has many (`LLGuidanceMatcher.compute_mask`).
    """

    engines: Engines
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
            raise Complaint(read_error(self.engine))
        time_s, reason = self.engines.compute_mask(self.engine), ""
        if TOO_MANY_ITEMS in self.engine.get_error():
            self.give_more_items()
            assert self.scout is not None
            if not (reason := self.find_slowness(self.scout)):
                time_s = self.engines.compute_mask(self.engine)
        if reason or self.engine.is_error():
            raise InvalidGrammar(f"the grammar allows no first token: {reason or read_error(self.engine)}")
        self.usage.note_mask(time_s)

    @property
    def num_items(self) -> tuple[int, int]:
        """The items that a mask may have at first, and later."""
        limits = self.engines.limits
        if self.is_slow:
            return limits.step_max_slow_items, limits.step_most_slow_items
        return limits.step_max_items, limits.step_most_items

    def find_slowness(self, scout: LLMatcher) -> str:
        """Return why a mask that needs more items than the scout has may not have them; "" if it may."""
        (few, many), limit_s = self.num_items, self.engines.limits.max_mask_s
        # The first mask may have made lexer states; the second finds them.
        forecast_s = min(self.engines.compute_mask(scout.deep_copy()) for _ in range(2)) * many / few
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
        return self.engines.make_engine(self.grammar, num_items, self.num_quotable)


class LLGuidanceMatcher(Matcher):
    """Grammar state of one request in llguidance."""

    def __init__(self, template: Template) -> None:
        super().__init__(template.engines.vocabulary, template.usage)
        self.engine = template.engine.deep_copy()
        self.scout = template.scout and template.scout.deep_copy()
        self._template = template
        self._token_ids: list[int] = []
        # The number of tokens at the last renewal, and whether it gave more items.
        self._renewed: tuple[int, bool] | None = None
        self._failure = ""

    @property
    def error(self) -> str | None:  # type: ignore[override]
        return self._failure or (read_error(self.engine) if self.engine.is_error() else None)

    def _fill(self, words: np.ndarray, address: int) -> None:
        # In its error state the engine allows EOS, which would end the text.
        if not self._compute_mask(address, words.nbytes):
            words[:] = 0
        self._bound_number(words)

    def _compute_mask(self, address: int, num_bytes: int) -> bool:
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

    def fill_draft(self, draft: Sequence[int], bitmask: np.ndarray, row: int) -> int:
        if not draft or self.scout is not None or not self.is_plain_text(draft):
            return super().fill_draft(draft, bitmask, row)
        num_valid: int = self.engine.validate_tokens(list(draft))
        span = range(row, row + num_valid + 1)
        address, row_bytes = bitmask.ctypes.data + row * bitmask.strides[0], 4 * self.vocabulary.num_words
        # The stubs of llguidance lack it.
        fill = self.engine.unsafe_compute_mask_ptr_with_draft_token  # type: ignore[attr-defined]
        fill(address, row_bytes, list(draft[: max(num_valid, 1)]))
        if self.engine.is_error():
            bitmask[span] = 0
        for place, each in enumerate(span):
            self._bound_number(bitmask[each], draft[:place])
        return num_valid

    def _bound_number(self, words: np.ndarray, draft: Sequence[int] = ()) -> None:
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
        backend = self._template.engines
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
    def is_renewable(self) -> bool:  # type: ignore[override]
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
            self._template.engines.compute_mask(engine)
            engine.consume_tokens(self._token_ids[start : start + NUM_REPLAYED])

    def is_plain_text(self, token_ids: Sequence[int]) -> bool:
        known, ends = range(self.vocabulary.size), self.vocabulary.eos_set
        return (not self.has_ended and ends.isdisjoint(token_ids) and all(token_id in known for token_id in token_ids))

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
