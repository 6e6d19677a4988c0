"""GrammarManager: the matchers of all running completions, and the masks of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engine.messages import FillMasks, GrammarFailed, MaskTarget, StepMasks
from engine.outputs import FinishReason
from grammar import GrammarError, Matcher, allocate_bitmask, fill_draft_bitmask, is_panic

Problem = tuple[str, FinishReason]  # why a request cannot go on, and how it ends

# Masks that take longer are filled beside the others, so that the others do not wait for them.
SLOW_MASK_S = 0.005
# So many quick masks make a slow matcher quick again.
NUM_QUICK_MASKS = 16

logger = logging.getLogger("troupe.engine")


@dataclass(slots=True)
class SlowMask:
    """Masks of one row, to be filled by another thread, which has the matcher to itself meanwhile."""

    step_id: int
    target: MaskTarget
    matcher: Matcher
    token_ids: list[int]  # to be accepted first
    bitmask: np.ndarray  # [1 + number of drafts, W]
    problem: Problem | None = None
    time_s: float = 0.0

    def fill(self) -> None:
        start = time.perf_counter()
        for token_id in self.token_ids:
            if (problem := accept(self.matcher, token_id)) is not None:
                self.problem = problem
                return
        self.problem = fill_rows([self.matcher], [self.target.draft_token_ids], self.bitmask).get(0)
        self.time_s = time.perf_counter() - start


class GrammarManager:
    """Owns one matcher per completion that has a grammar. Synchronous; one owner."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._matchers: dict[int, Matcher] = {}
        self._slow: dict[int, int] = {}  # handle of a slow matcher -> quick masks in a row
        self._kept: dict[int, list[int]] = {}  # tokens that slow matchers have not accepted yet
        self._is_probing = (
            False  # the last masks were slow: the next are filled one by one, to find out which
        )

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
            self._slow.pop(handle, None)
            self._kept.pop(handle, None)

    def fill(self, order: FillMasks) -> tuple[StepMasks, list[GrammarFailed], list[SlowMask]]:
        """Advance the matchers by the accepted tokens, then fill the masks of the targets that still live.

        A matcher that fails takes only its own completion with it. The slow masks are to be filled elsewhere, and
        come back by `finish`.
        """
        failed = self._accept(order.accepted)
        live = [target for target in order.targets if target.handle in self._matchers]
        slow = [self._set_apart(order.step_id, target) for target in live if target.handle in self._slow]
        quick = [target for target in live if target.handle not in self._slow]
        counts = np.array([1 + len(target.draft_token_ids) for target in quick], dtype=np.int64)
        bitmask = allocate_bitmask(int(counts.sum()), self._vocab_size)
        failed += self._fill_quick(quick, bitmask)
        is_kept = np.array([target.handle in self._matchers for target in quick], dtype=bool)
        indices = np.array([target.index for target in quick], dtype=np.int64)
        if not is_kept.all():
            bitmask = bitmask[np.repeat(is_kept, counts)]
            indices, counts = indices[is_kept], counts[is_kept]
        gone = [target.index for target in order.targets if target.handle not in self._matchers]
        return StepMasks(order.step_id, indices, counts, bitmask, [*order.ended, *gone]), failed, slow

    def finish(self, mask: SlowMask) -> tuple[StepMasks, list[GrammarFailed]]:
        """Take back a matcher with its masks."""
        handle, index = mask.target.handle, mask.target.index
        nothing = np.zeros(0, dtype=np.int64)
        failed = []
        if self._matchers.get(handle) is mask.matcher and mask.problem is not None:
            failed = [self._fail(handle, *mask.problem)]
        if handle not in self._matchers:
            return StepMasks(mask.step_id, nothing, nothing, mask.bitmask[:0], [index]), failed
        self._slow[handle] = 0 if mask.time_s > SLOW_MASK_S else self._slow[handle] + 1
        if self._slow[handle] >= NUM_QUICK_MASKS:
            del self._slow[handle]
        counts = np.array([len(mask.bitmask)], dtype=np.int64)
        return StepMasks(mask.step_id, np.array([index], dtype=np.int64), counts, mask.bitmask), failed

    def _set_apart(self, step_id: int, target: MaskTarget) -> SlowMask:
        bitmask = allocate_bitmask(1 + len(target.draft_token_ids), self._vocab_size)
        token_ids = self._kept.pop(target.handle, [])
        return SlowMask(step_id, target, self._matchers[target.handle], token_ids, bitmask)

    def _fill_quick(self, targets: list[MaskTarget], bitmask: np.ndarray) -> list[GrammarFailed]:
        """Fill the masks of these targets, one behind the other; all at once unless a slow one is looked for."""
        groups = [[target] for target in targets] if self._is_probing else [targets]
        failed, start = [], 0
        begun = time.perf_counter()
        for group in groups:
            drafts = [target.draft_token_ids for target in group]
            end = start + sum(1 + len(draft) for draft in drafts)
            before = time.perf_counter()
            matchers = [self._matchers[target.handle] for target in group]
            for at, problem in fill_rows(matchers, drafts, bitmask[start:end]).items():
                failed.append(self._fail(group[at].handle, *problem))
            if len(group) == 1 and time.perf_counter() - before > SLOW_MASK_S:
                self._slow |= {target.handle: 0 for target in group if target.handle in self._matchers}
            start = end
        self._is_probing = len(targets) > 1 and time.perf_counter() - begun > SLOW_MASK_S
        return failed

    def _accept(self, tokens: Iterable[tuple[int, int]]) -> list[GrammarFailed]:
        failed = []
        for handle, token_id in tokens:
            if handle in self._slow:
                self._kept.setdefault(handle, []).append(token_id)
            elif (
                handle in self._matchers and (problem := accept(self._matchers[handle], token_id)) is not None
            ):
                failed.append(self._fail(handle, *problem))
        return failed

    def _fail(self, handle: int, problem: str, finish_reason: FinishReason) -> GrammarFailed:
        self.drop([handle])
        return GrammarFailed(handle, problem, finish_reason)


def accept(matcher: Matcher, token_id: int) -> Problem | None:
    """Advance a matcher by a token; why it cannot, if it cannot."""
    try:
        if matcher.accept_token(token_id):
            return None
    except BaseException as error:
        if not is_fault(error):
            raise
        if not isinstance(error, GrammarError):
            logger.exception("a matcher failed")
        return describe_problem(error)
    if matcher.error is not None:  # it met one of its limits
        return matcher.error, "dead_end"
    return f"token {token_id} is not allowed by the grammar", "error"


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
    return {
        at: (f"the grammar could not go on: {problem}", reason) for at, (problem, reason) in problems.items()
    }


def describe_problem(error: BaseException) -> Problem:
    """The grammar's own limits are a dead end; anything else is a fault of ours."""
    return (str(error), "dead_end") if isinstance(error, GrammarError) else (repr(error), "error")


def is_fault(error: BaseException) -> bool:
    """Whether it is the matcher's own; an interrupt of the process is not."""
    return isinstance(error, Exception) or is_panic(error)
