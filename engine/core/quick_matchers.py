"""QuickMatchers: checks tokens after they are drawn, so that most rows with a grammar need no mask.

    token drawn without a mask ─▶ accept ─▶ allowed: it is the token that the mask would have given
                                    └─ no ─▶ fill ─▶ the row is drawn again under its mask ─▶ take

A row of temperature alone draws the token with the largest sum of score and noise. The noise depends on seed, position
and token id; scores are relative to the largest logit. So a mask changes nothing, to the last bit, if it allows that
token and the likeliest one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.actor_messages import StepPlan
from engine.core.grammar_manager import fill_rows, is_fault
from engine.sampling_params import SamplingParams
from grammar import Matcher

logger = logging.getLogger("troupe.engine")


@dataclass(frozen=True, slots=True)
class OpenMatcher:
    """Message to the thread that owns the matcher from then on; it cannot be sent to another process."""

    handle: int
    matcher: Matcher
    token_ids: Sequence[int] = ()  # to be accepted first


def is_drawn_alike(params: SamplingParams) -> bool:
    """Return whether a token drawn without a mask is, if allowed, the one that is drawn with it."""
    is_greedy = params.temperature == 0 or params.top_k == 1
    has_history = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    has_edits = params.logit_bias or params.allowed_token_ids is not None or params.bad_words or params.min_tokens
    if params.logprobs is not None or has_history or has_edits:
        return False
    return is_greedy or not (params.top_k or params.top_p < 1 or params.min_p)


class QuickMatchers:
    """The matchers of quick programs; the executor's thread owns them. Others belong to the grammar thread.

    A matcher whose program has become slow is given up: it moves to the grammar thread.
    """

    def __init__(self) -> None:
        self._matchers: dict[int, Matcher] = {}
        self._found = -1, dict[int, int]()  # the last step, and what `find` returned
        self._given_up: list[OpenMatcher] = []
        self._passed_on: set[int] = set()

    def open(self, handle: int, matcher: Matcher) -> None:
        self._matchers[handle] = matcher

    def drop(self, handles: Iterable[int]) -> list[int]:
        """Remove ended completions. Returns those whose matchers have moved to the grammar thread."""
        passed_on = self._passed_on.intersection(handles)
        self._passed_on -= passed_on
        for handle in handles:
            self._matchers.pop(handle, None)
        self._found = -1, {}
        return list(passed_on)

    def find(self, plan: StepPlan) -> dict[int, int]:
        """Return index -> handle of the step's rows whose matchers are here."""
        if not self._matchers or not plan.gated_handles:
            return {}
        if self._found[0] != plan.step_id:
            pairs = zip(plan.is_gated.nonzero()[0].tolist(), plan.gated_handles, strict=True)
            found = {index: handle for index, handle in pairs if handle in self._matchers}
            self._found = plan.step_id, found
        return self._found[1]

    def accept(self, handle: int, token_id: int, best_id: int) -> bool:
        """Advance a matcher by a token drawn without a mask, if that and the likeliest one are surely allowed."""
        try:
            return self._matchers[handle].accept_drawn(token_id, best_id)
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.exception("a matcher failed")
            return False

    def fill(self, handles: Sequence[int]) -> np.ndarray:
        """Return one mask for each handle, [N, W] int32. A matcher that cannot go on allows nothing."""
        matchers = [self._matchers[handle] for handle in handles]
        bitmask = np.empty((len(handles), matchers[0].vocabulary.num_words), np.int32)
        for place, problem in fill_rows(matchers, [[]] * len(handles), bitmask).items():
            logger.warning("a matcher met a problem: %s", problem[0])
            row = bitmask[place : place + 1]
            while matchers[place].renew():
                if not fill_rows([matchers[place]], [[]], row):
                    break
            else:
                row[:] = 0
        return bitmask

    def take(self, handle: int, token_id: int) -> None:
        """Advance a matcher by a token drawn under its mask, negative if there was none."""
        matcher = self._matchers[handle]
        if token_id >= 0 and not matcher.accept_token(token_id):
            self._give_up(handle, [token_id])  # the grammar thread reports the failure
        elif not matcher.is_quick():
            self._give_up(handle)

    def take_given_up(self) -> list[OpenMatcher]:
        """Return the matchers that the grammar thread has not got yet."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _give_up(self, handle: int, token_ids: Sequence[int] = ()) -> None:
        self._given_up.append(OpenMatcher(handle, self._matchers.pop(handle), token_ids))
        self._passed_on.add(handle)
