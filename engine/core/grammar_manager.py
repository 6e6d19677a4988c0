"""GrammarManager: the matchers of all running completions, and the masks of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engine.core.mask_pool import MaskPool
from engine.messages import DraftTarget, FillMasks, FindDrafts, GrammarFailed, MaskTarget, StepMasks
from engine.outputs import FinishReason
from engine.spec.forced import ForcedDrafts
from grammar import GrammarError, Matcher, allocate_bitmask, fill_draft_bitmask, is_panic

Problem = tuple[str, FinishReason]  # why a request cannot go on, and how it ends

# A matcher whose masks take more processor time is slow: they are filled in another thread, so that other rows do not
# wait. The time by the clock would also count other work of a busy machine.
SLOW_MASK_S = 0.005
# After this many quick masks in a row a matcher is no longer slow.
NUM_QUICK_MASKS = 16

logger = logging.getLogger("troupe.engine")


@dataclass(slots=True)
class SlowMask:
    """The masks of one row, filled by another thread. Until then no other thread uses the matcher."""

    step_id: int
    target: MaskTarget
    matcher: Matcher
    token_ids: list[int]  # to be accepted first
    bitmask: np.ndarray  # [1 + number of drafts, W]
    problem: Problem | None = None
    time_s: float = 0.0  # processor time

    def fill(self) -> None:
        start = time.thread_time()
        for token_id in self.token_ids:
            if (problem := accept(self.matcher, token_id, is_slow=True)) is not None:
                self.problem = problem
                return
        self.problem = fill_rows([self.matcher], [self.target.draft_token_ids], self.bitmask).get(0)
        self.time_s = time.thread_time() - start


class GrammarManager:
    """Owns one matcher per completion that has a grammar. Synchronous; one owner."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pool = MaskPool(vocab_size)
        self._all = allocate_bitmask(1, vocab_size)
        self._matchers: dict[int, Matcher] = {}
        self._slow: dict[int, int] = {}  # handle of a slow matcher -> quick masks in a row
        self._kept: dict[int, list[int]] = {}  # tokens that slow matchers have not accepted yet
        # How to make a matcher again, and the tokens that it has accepted: a limit met by a draft spoils it for good.
        self._histories: dict[int, tuple[Callable[[], Matcher], list[int]]] = {}
        # The last masks took too long: the next are filled one by one, to find the slow matcher.
        self._is_probing = False

    def __len__(self) -> int:
        return len(self._matchers)

    def open(
        self,
        handle: int,
        matcher: Matcher,
        generated_token_ids: Sequence[int] = (),
        make_matcher: Callable[[], Matcher] | None = None,
    ) -> list[GrammarFailed]:
        """Add a completion's matcher, and let it accept the tokens generated so far.

        Args:
            make_matcher: makes another one, at the start of the grammar; needed if there are drafts.
        """
        self._matchers[handle] = matcher
        if make_matcher is not None:
            self._histories[handle] = (make_matcher, [])
        return self._accept((handle, token_id) for token_id in generated_token_ids)

    def drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._matchers.pop(handle, None)
            self._slow.pop(handle, None)
            self._kept.pop(handle, None)
            self._histories.pop(handle, None)

    def find_drafts(
        self, order: FindDrafts, forced: ForcedDrafts
    ) -> tuple[list[DraftTarget], list[GrammarFailed]]:
        """Advance the matchers by the accepted tokens, then answer each target.

        Slow matchers, and those that meet a limit on the way, get no drafts.
        """
        failed = self._accept(order.accepted)
        answers = []
        for target in order.targets:
            handle = target.handle
            answer = DraftTarget(handle, "", [])
            if handle in self._matchers and handle not in self._slow:
                start = time.thread_time()
                try:
                    answer = forced.answer(self._matchers[handle], target)
                except BaseException as error:
                    if not is_fault(error):
                        raise
                if self._matchers[handle].error is not None:
                    answer = DraftTarget(handle, "", [])
                    self._make_again(handle)
                if time.thread_time() - start > SLOW_MASK_S:
                    self._slow[handle] = 0
            answers.append(answer)
        return answers, failed

    def _make_again(self, handle: int) -> bool:
        """Replace a matcher that met a limit while it looked at drafts. Returns whether the new one is sound."""
        if handle not in self._histories:
            return False
        make_matcher, token_ids = self._histories[handle]
        matcher = self._matchers[handle] = make_matcher()
        return all(accept(matcher, token_id) is None for token_id in token_ids)

    def fill(self, order: FillMasks) -> tuple[StepMasks, list[GrammarFailed], list[SlowMask]]:
        """Advance the matchers by the accepted tokens, then fill the masks of the targets that still live.

        A matcher that fails ends only its own completion. Fill the SlowMasks in another thread, then pass each to
        `finish`.
        """
        start = time.perf_counter()
        failed = self._accept(order.accepted)
        live = [target for target in order.targets if target.handle in self._matchers]
        slow = [self._make_slow(order.step_id, target) for target in live if target.handle in self._slow]
        quick = [target for target in live if target.handle not in self._slow]
        counts = np.array([1 + len(target.draft_token_ids) for target in quick], dtype=np.int64)
        bitmask = self._pool.take(int(counts.sum()))
        if len(bitmask) > len(quick):
            bitmask[:] = self._all  # a mask after a forbidden draft is not written, nor is its token used
        failed += self._fill_quick(quick, bitmask)
        is_kept = np.array([target.handle in self._matchers for target in quick], dtype=bool)
        indices = np.array([target.index for target in quick], dtype=np.int64)
        if not is_kept.all():
            bitmask = bitmask[np.repeat(is_kept, counts)]
            indices, counts = indices[is_kept], counts[is_kept]
        gone = [target.index for target in order.targets if target.handle not in self._matchers]
        time_s = time.perf_counter() - start
        return StepMasks(order.step_id, indices, counts, bitmask, [*order.ended, *gone], time_s), failed, slow

    def finish(self, mask: SlowMask) -> tuple[StepMasks, list[GrammarFailed]]:
        """Return the masks of a SlowMask that has been filled."""
        handle, index = mask.target.handle, mask.target.index
        nothing = np.zeros(0, dtype=np.int64)
        failed = []
        is_failed = self._matchers.get(handle) is mask.matcher and mask.problem is not None
        if is_failed and mask.target.draft_token_ids:
            is_failed = not self._fill_first(handle, mask.bitmask)
        if is_failed and mask.problem is not None:
            failed = [self._fail(handle, *mask.problem)]
        if handle not in self._matchers:
            return StepMasks(mask.step_id, nothing, nothing, mask.bitmask[:0], [index]), failed
        self._slow[handle] = 0 if mask.time_s > SLOW_MASK_S else self._slow[handle] + 1
        if self._slow[handle] >= NUM_QUICK_MASKS:
            del self._slow[handle]
        counts = np.array([len(mask.bitmask)], dtype=np.int64)
        return StepMasks(mask.step_id, np.array([index]), counts, mask.bitmask, [], mask.time_s), failed

    def _make_slow(self, step_id: int, target: MaskTarget) -> SlowMask:
        bitmask = allocate_bitmask(1 + len(target.draft_token_ids), self._vocab_size)
        token_ids = self._kept.pop(target.handle, [])
        return SlowMask(step_id, target, self._matchers[target.handle], token_ids, bitmask)

    def _fill_quick(self, targets: list[MaskTarget], bitmask: np.ndarray) -> list[GrammarFailed]:
        """Fill the masks of these targets in one call, or one by one to find the slow matcher."""
        groups = [[target] for target in targets] if self._is_probing else [targets]
        failed, row, is_slow = [], 0, False
        for group in groups:
            # The masks of several rows may be filled by threads of the engine; one row's are not.
            clock = time.thread_time if len(group) == 1 else time.perf_counter
            start = clock()
            drafts = [target.draft_token_ids for target in group]
            num_rows = sum(1 + len(draft) for draft in drafts)
            matchers = [self._matchers[target.handle] for target in group]
            rows = list(accumulate((1 + len(draft) for draft in drafts), initial=row))
            for at, problem in fill_rows(matchers, drafts, bitmask[row : row + num_rows]).items():
                if drafts[at] and self._fill_first(group[at].handle, bitmask[rows[at] : rows[at + 1]]):
                    continue
                failed.append(self._fail(group[at].handle, *problem))
            row += num_rows
            is_slow = clock() - start > SLOW_MASK_S
            if is_slow and len(group) == 1 and group[0].handle in self._matchers:
                self._slow[group[0].handle] = 0
        self._is_probing = is_slow and len(groups) == 1 and len(targets) > 1
        return failed

    def _fill_first(self, handle: int, bitmask: np.ndarray) -> bool:
        """Fill the mask before the drafts, which caused a failure. Returns whether that went well."""
        if not self._make_again(handle):
            return False
        bitmask[1:] = 0
        return not fill_rows([self._matchers[handle]], [[]], bitmask[:1])

    def _accept(self, tokens: Iterable[tuple[int, int]]) -> list[GrammarFailed]:
        """Advance the matchers. Returns those that cannot accept their token."""
        failed = []
        for handle, token_id in tokens:
            if handle in self._histories:
                self._histories[handle][1].append(token_id)
            if handle in self._slow:
                self._kept.setdefault(handle, []).append(token_id)
            elif handle in self._matchers:
                problem = accept(self._matchers[handle], token_id)
                if problem is not None:
                    failed.append(self._fail(handle, *problem))
        return failed

    def _fail(self, handle: int, problem: str, finish_reason: FinishReason) -> GrammarFailed:
        self.drop([handle])
        return GrammarFailed(handle, problem, finish_reason)


def accept(matcher: Matcher, token_id: int, is_slow: bool = False) -> Problem | None:
    """Advance a matcher by a token that its mask allowed. Returns a problem if the matcher cannot accept it."""
    try:
        if matcher.accept_allowed(token_id) if is_slow else matcher.accept_token(token_id):
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
    """Fill each matcher's masks, one for its next token and one after each draft, matcher by matcher.

    Returns index of the matcher -> problem, for those that failed.
    """
    problems: dict[int, Problem] = {}
    rows = list(accumulate((1 + len(draft) for draft in drafts), initial=0))[:-1]
    try:
        fill_draft_bitmask(matchers, drafts, rows, bitmask)
    except BaseException as failure:  # one by one, so that only the faulty matcher fails
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
    """A GrammarError is a dead end; any other error is a fault of the engine."""
    return (str(error), "dead_end") if isinstance(error, GrammarError) else (repr(error), "error")


def is_fault(error: BaseException) -> bool:
    """Whether a matcher or its library failed, as opposed to an interrupt of the process."""
    return isinstance(error, Exception) or is_panic(error)
