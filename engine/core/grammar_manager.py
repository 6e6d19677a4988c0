"""GrammarManager: the matchers of all running requests, and the masks of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from engine.messages import FillMasks, GrammarBroken, SampleGate
from engine.outputs import FinishReason
from grammar import GrammarError, Matcher, allocate_bitmask, fill_bitmask, is_panic

Problem = tuple[str, FinishReason]  # why a request cannot go on, and how it ends

logger = logging.getLogger("troupe.engine")


class GrammarManager:
    """Owns one matcher per request that has a grammar. Synchronous; one owner."""

    def __init__(self) -> None:
        self._matchers: dict[str, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def open(self, request_id: str, matcher: Matcher) -> None:
        self._matchers[request_id] = matcher

    def drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._matchers.pop(request_id, None)

    def fill(self, order: FillMasks, vocab_size: int) -> tuple[SampleGate, list[GrammarBroken]]:
        """Advance the matchers by the accepted tokens, then fill the masks of the targets that still live.

        A matcher that fails takes only its own request with it.
        """
        broken = self._accept(order)
        live = [(index, name) for index, name in order.targets if name in self._matchers]
        matchers = [self._matchers[name] for _, name in live]
        bitmask = allocate_bitmask(len(live), vocab_size)
        for row, (problem, finish_reason) in fill_rows(matchers, bitmask).items():
            name, error = live[row][1], f"the grammar could not go on: {problem}"
            broken.append(GrammarBroken(order.step_id, name, error, finish_reason))
            del self._matchers[name]
        kept = [row for row, (_, name) in enumerate(live) if name in self._matchers]
        indices = np.array([live[row][0] for row in kept], dtype=np.int64)
        masks = bitmask if len(kept) == len(live) else bitmask[kept]
        return SampleGate(order.step_id, indices, masks), broken

    def _accept(self, order: FillMasks) -> list[GrammarBroken]:
        broken = []
        for request_id, token_id in order.accepted:
            matcher = self._matchers.get(request_id)
            if matcher is None:
                continue
            try:
                if matcher.accept_token(token_id):
                    continue
                problem: Problem = (f"token {token_id} is not allowed by the grammar", "error")
                if matcher.error is not None:  # the matcher met one of its limits
                    problem = matcher.error, "dead_end"
            except BaseException as error:
                if not is_fault(error):
                    raise
                if not isinstance(error, GrammarError):
                    logger.exception("the grammar of request %s failed", request_id)
                problem = describe_problem(error)
            del self._matchers[request_id]
            broken.append(GrammarBroken(order.step_id, request_id, *problem))
        return broken


def fill_rows(matchers: list[Matcher], bitmask: np.ndarray) -> dict[int, Problem]:
    """Fill the mask of each matcher into its row; return row -> problem of those that could not go on."""
    problems: dict[int, Problem] = {}
    try:
        fill_bitmask(matchers, range(len(matchers)), bitmask)
    except BaseException as failure:  # whichever matcher it was: one by one, only that one fails
        if not is_fault(failure):
            raise
        logger.exception("the masks of a step failed; they are filled one by one")
        for row, matcher in enumerate(matchers):
            try:
                fill_bitmask([matcher], [row], bitmask)
            except BaseException as error:
                if not is_fault(error):
                    raise
                problems[row] = describe_problem(error)
    for row, matcher in enumerate(matchers):
        if row not in problems and matcher.error is not None:  # a limit was hit; the row allows nothing
            problems[row] = matcher.error, "dead_end"
    return problems


def describe_problem(error: BaseException) -> Problem:
    """The grammar's own limits are a dead end; anything else is a fault of ours."""
    return (str(error), "dead_end") if isinstance(error, GrammarError) else (repr(error), "error")


def is_fault(error: BaseException) -> bool:
    """Whether it is the matcher's own; an interrupt of the process is not."""
    return isinstance(error, Exception) or is_panic(error)
