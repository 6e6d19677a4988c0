"""GrammarManager: the matchers of all running completions, and the masks of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from engine.messages import FillMasks, GrammarFailed, StepMasks
from engine.outputs import FinishReason
from grammar import GrammarError, Matcher, allocate_bitmask, fill_draft_bitmask, is_panic

Problem = tuple[str, FinishReason]  # why a request cannot go on, and how it ends

logger = logging.getLogger("troupe.engine")


class GrammarManager:
    """Owns one matcher per completion that has a grammar. Synchronous; one owner."""

    def __init__(self) -> None:
        self._matchers: dict[int, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def open(
        self, handle: int, matcher: Matcher, generated_token_ids: Sequence[int] = ()
    ) -> list[GrammarFailed]:
        """Take a completion's matcher, and lead it behind the tokens that there are."""
        self._matchers[handle] = matcher
        return self._accept((handle, token_id) for token_id in generated_token_ids)

    def drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._matchers.pop(handle, None)

    def fill(self, order: FillMasks, vocab_size: int) -> tuple[StepMasks, list[GrammarFailed]]:
        """Advance the matchers by the accepted tokens, then fill the masks of the targets that still live.

        A matcher that fails takes only its own completion with it.
        """
        failed = self._accept(order.accepted)
        live = [target for target in order.targets if target.handle in self._matchers]
        counts = np.array([1 + len(target.draft_token_ids) for target in live], dtype=np.int64)
        bitmask = allocate_bitmask(int(counts.sum()), vocab_size)
        matchers = [self._matchers[target.handle] for target in live]
        drafts = [target.draft_token_ids for target in live]
        for at, (problem, finish_reason) in fill_rows(matchers, drafts, bitmask).items():
            handle, error = live[at].handle, f"the grammar could not go on: {problem}"
            failed.append(GrammarFailed(handle, error, finish_reason))
            del self._matchers[handle]
        indices = np.array([target.index for target in live], dtype=np.int64)
        is_kept = np.array([target.handle in self._matchers for target in live], dtype=bool)
        if not is_kept.all():
            bitmask = bitmask[np.repeat(is_kept, counts)]
            indices, counts = indices[is_kept], counts[is_kept]
        return StepMasks(order.step_id, indices, counts, bitmask), failed

    def _accept(self, tokens: Iterable[tuple[int, int]]) -> list[GrammarFailed]:
        failed = []
        for handle, token_id in tokens:
            matcher = self._matchers.get(handle)
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
                    logger.exception("the grammar of completion %d failed", handle)
                problem = describe_problem(error)
            del self._matchers[handle]
            failed.append(GrammarFailed(handle, *problem))
        return failed


def fill_rows(matchers: list[Matcher], drafts: list[list[int]], bitmask: np.ndarray) -> dict[int, Problem]:
    """Fill each matcher's masks, of its next token and behind each draft, one matcher after another.

    Returns matcher's number -> problem of those that could not go on.
    """
    problems: dict[int, Problem] = {}
    rows = list(accumulate((1 + len(draft) for draft in drafts), initial=0))[:-1]
    try:
        fill_draft_bitmask(matchers, drafts, rows, bitmask)
    except BaseException as failure:  # whichever matcher it was: one by one, only that one fails
        if not is_fault(failure):
            raise
        logger.exception("the masks of a step failed; they are filled one by one")
        for at, matcher in enumerate(matchers):
            try:
                fill_draft_bitmask([matcher], [drafts[at]], [rows[at]], bitmask)
            except BaseException as error:
                if not is_fault(error):
                    raise
                problems[at] = describe_problem(error)
    for at, matcher in enumerate(matchers):
        if at not in problems and matcher.error is not None:  # a limit was hit; the row allows nothing
            problems[at] = matcher.error, "dead_end"
    return problems


def describe_problem(error: BaseException) -> Problem:
    """The grammar's own limits are a dead end; anything else is a fault of ours."""
    return (str(error), "dead_end") if isinstance(error, GrammarError) else (repr(error), "error")


def is_fault(error: BaseException) -> bool:
    """Whether it is the matcher's own; an interrupt of the process is not."""
    return isinstance(error, Exception) or is_panic(error)
