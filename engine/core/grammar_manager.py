"""GrammarManager: the matchers of all running completions, and the masks of a step.

Masks of slow programs are filled apart, by other threads, one after the other for each program:

    fill ──▶ StepMasks of the quick rows
      └────▶ ApartMasks ──▶ a lane: ApartMask.fill ──▶ finish ──▶ StepMasks of one row, the program's next ApartMask
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from engine.core.actor_messages import (
    DraftTarget,
    FailureCause,
    FillMasks,
    FindDrafts,
    GrammarFailed,
    MaskTarget,
    StepMasks,
)
from engine.spec.forced import ForcedDrafts
from grammar import (
    GrammarError,
    MaskClock,
    Matcher,
    Usage,
    allocate_bitmask,
    fill_draft_bitmask,
    is_panic,
    is_set,
)

Problem = tuple[str, FailureCause]  # why a request cannot go on

# A program whose mask takes more processor time is slow: its next NUM_APART masks are filled apart, so that other rows
# do not wait. The time by the clock would also count other work of a busy machine.
SLOW_MASK_S = 0.002
NUM_APART = 16
# Slower programs have a lane of their own, so that the others do not wait for them either.
VERY_SLOW_MASK_S = 0.02
# Processor time of one mask and of all slow masks of a completion, after which it ends. llguidance's own limits
# (`GrammarLimits`) end a mask on the way.
MAX_MASK_S = 0.5
MAX_MASKS_S = 60.0

logger = logging.getLogger("troupe.engine")


@dataclass(slots=True)
class ApartMask:
    """The masks of one row, filled by another thread. Until then no other thread uses the program's matchers."""

    step_id: int
    target: MaskTarget
    matcher: Matcher
    token_ids: list[int]  # to be accepted first
    bitmask: np.ndarray  # [1 + number of drafts, W]
    problem: Problem | None = None
    time_s: float = 0.0  # processor time
    is_void: bool = False  # its request has ended, so the mask is not used

    @property
    def is_very_slow(self) -> bool:
        """Whether the program's last mask was."""
        return self.matcher.usage.longest_s > VERY_SLOW_MASK_S

    def fill(self) -> None:
        """Fill the masks; a matcher that meets a limit is renewed as long as that helps."""
        start = time.thread_time()
        try:
            self.problem = self._accept(self.token_ids) or self._fill(0)
            if self.problem is None:
                self._fill_drafts()
        except BaseException as error:
            if not is_fault(error):
                raise
            self.problem = describe_problem(error)
        self.time_s = time.thread_time() - start

    def _accept(self, token_ids: Iterable[int]) -> Problem | None:
        for token_id in token_ids:
            while not self.is_void and (problem := accept(self.matcher, token_id, is_apart=True)) is not None:
                if not self.matcher.renew():
                    return problem
        return None

    def _fill(self, row: int) -> Problem | None:
        usage = self.matcher.usage
        while not self.is_void:
            usage.longest_s = 0.0
            problem = fill_rows([self.matcher], [[]], self.bitmask[row : row + 1]).get(0)
            if problem is None and usage.longest_s > MAX_MASK_S:
                return describe_slow("a mask", usage.longest_s, MAX_MASK_S)
            if problem is None or not self.matcher.renew():
                return problem
        return None

    def _fill_drafts(self) -> None:
        """Fill the masks after the drafts that are allowed. One that cannot be filled allows nothing."""
        num_taken = 0
        for place, token_id in enumerate(self.target.draft_token_ids):
            if self.is_void or not is_set(self.bitmask[place], token_id):
                break
            has_problem = self._accept([token_id]) is not None
            num_taken += not has_problem
            if self.matcher.is_terminated():
                break
            if has_problem or self._fill(place + 1):
                self.bitmask[place + 1 :] = 0
                break
        self.matcher.rollback(num_taken)
        if self.matcher.error is not None:
            self.matcher.renew()


class GrammarManager:
    """Owns one matcher per completion that has a grammar. Synchronous; one owner."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._all = allocate_bitmask(1, vocab_size)
        self._matchers: dict[int, Matcher] = {}
        self._kept: dict[int, list[int]] = {}  # tokens that matchers have not accepted yet
        self._spent_s: dict[int, float] = {}  # processor time of masks filled apart
        # Programs of which another thread fills a mask -> the masks to fill after it.
        self._waiting: dict[Usage, deque[ApartMask]] = {}
        self._apart: dict[int, ApartMask] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def open(
        self, handle: int, matcher: Matcher, generated_token_ids: Sequence[int] = ()
    ) -> list[GrammarFailed]:
        """Add a completion's matcher, and let it accept the tokens generated so far."""
        self._matchers[handle] = matcher
        return self._accept((handle, token_id) for token_id in generated_token_ids)

    def drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            for each in (self._matchers, self._kept, self._spent_s):
                each.pop(handle, None)
            if (mask := self._apart.pop(handle, None)) is not None:
                mask.is_void = True

    def find_drafts(
        self, order: FindDrafts, forced: ForcedDrafts
    ) -> list[DraftTarget]:
        """Answer each target. Matchers of slow programs get no drafts."""
        answers, clock = [], MaskClock()
        for target in order.targets:
            matcher = self._matchers.get(target.handle)
            answer = DraftTarget(target.handle, "", [])
            if matcher is not None and not self._is_apart(target.handle, matcher):
                clock.take()
                try:
                    answer = forced.answer(matcher, target)
                except BaseException as error:
                    if not is_fault(error):
                        raise
                if matcher.error is not None:
                    answer = DraftTarget(target.handle, "", [])
                if clock.take() > SLOW_MASK_S:
                    matcher.usage.num_apart = NUM_APART
            answers.append(answer)
        return answers

    def fill(self, order: FillMasks) -> tuple[StepMasks, list[GrammarFailed], list[ApartMask]]:
        """Advance the matchers by the accepted tokens, then fill the masks of the targets that still live.

        A matcher that fails ends only its own completion. Fill the ApartMasks in other threads, then pass each to
        `finish`.
        """
        start = time.perf_counter()
        failed = self._accept(order.accepted)
        quick: list[MaskTarget] = []
        apart: list[MaskTarget] = []
        for target in order.targets:
            if (matcher := self._matchers.get(target.handle)) is not None:
                (apart if self._is_apart(target.handle, matcher) else quick).append(target)
        counts = np.array([1 + len(target.draft_token_ids) for target in quick], dtype=np.int64)
        bitmask = np.empty((int(counts.sum()), self._all.shape[1]), np.int32)
        if len(bitmask) > len(quick):
            bitmask[:] = self._all  # a mask after a forbidden draft is not written, nor is its token used
        problems = self._fill_quick(quick, bitmask)
        for at, problem in problems.items():
            if self._matchers[quick[at].handle].is_renewable:
                apart.append(quick[at])
            else:
                failed.append(self._fail(quick[at].handle, *problem))
        indices = np.array([target.index for target in quick], dtype=np.int64)
        if problems:
            is_kept = np.array([at not in problems for at in range(len(quick))])
            bitmask = bitmask[np.repeat(is_kept, counts)]
            indices, counts = indices[is_kept], counts[is_kept]
        begun = [mask for target in apart if (mask := self._put_apart(order.step_id, target)) is not None]
        gone = [target.index for target in order.targets if target.handle not in self._matchers]
        time_s = time.perf_counter() - start
        return StepMasks(order.step_id, indices, counts, bitmask, gone, time_s), failed, begun

    def finish(self, mask: ApartMask) -> tuple[StepMasks, list[GrammarFailed], ApartMask | None]:
        """Return the masks of an ApartMask that has been filled, and the one that may be filled next."""
        handle, index, usage = mask.target.handle, mask.target.index, mask.matcher.usage
        is_slow = usage.longest_s > SLOW_MASK_S
        usage.num_apart = NUM_APART if is_slow else max(usage.num_apart - 1, 0)
        waiting = self._waiting[usage]
        following = waiting.popleft() if waiting else None
        if following is None:
            del self._waiting[usage]
        failed = []
        if not mask.is_void:
            del self._apart[handle]
            spent_s = self._spent_s[handle] = self._spent_s.get(handle, 0.0) + is_slow * mask.time_s
            problem = mask.problem
            if problem is None and spent_s > MAX_MASKS_S:
                problem = describe_slow("the masks of the answer", spent_s, MAX_MASKS_S)
            if problem is not None:
                failed = [self._fail(handle, *problem)]
        if mask.is_void or failed:
            nothing = np.zeros(0, dtype=np.int64)
            return StepMasks(mask.step_id, nothing, nothing, mask.bitmask[:0], [index]), failed, following
        counts = np.array([len(mask.bitmask)], dtype=np.int64)
        masks = StepMasks(mask.step_id, np.array([index]), counts, mask.bitmask, [], mask.time_s)
        return masks, failed, following

    def _is_apart(self, handle: int, matcher: Matcher) -> bool:
        return matcher.usage.num_apart > 0 or handle in self._kept or matcher.usage in self._waiting

    def _put_apart(self, step_id: int, target: MaskTarget) -> ApartMask | None:
        """Make the ApartMask of a row. Returns it if it may be filled at once."""
        bitmask = allocate_bitmask(1 + len(target.draft_token_ids), self._vocab_size)
        token_ids, matcher = self._kept.pop(target.handle, []), self._matchers[target.handle]
        mask = self._apart[target.handle] = ApartMask(step_id, target, matcher, token_ids, bitmask)
        if matcher.usage in self._waiting:
            self._waiting[matcher.usage].append(mask)
            return None
        self._waiting[matcher.usage] = deque()
        return mask

    def _fill_quick(self, targets: list[MaskTarget], bitmask: np.ndarray) -> dict[int, Problem]:
        """Fill the masks of these targets in one call. Returns the problems of those that failed."""
        matchers = [self._matchers[target.handle] for target in targets]
        problems = fill_rows(matchers, [target.draft_token_ids for target in targets], bitmask)
        for matcher in matchers:
            usage = matcher.usage
            if usage.longest_s > SLOW_MASK_S:
                usage.num_apart = NUM_APART
            usage.longest_s = 0.0
        return problems

    def _accept(self, tokens: Iterable[tuple[int, int]]) -> list[GrammarFailed]:
        """Advance the matchers. Returns those that cannot accept their token."""
        failed = []
        for handle, token_id in tokens:
            if (matcher := self._matchers.get(handle)) is None:
                continue
            if not self._is_apart(handle, matcher):
                problem = accept(matcher, token_id)
                if problem is None:
                    continue
                if not matcher.is_renewable:
                    failed.append(self._fail(handle, *problem))
                    continue
            self._kept.setdefault(handle, []).append(token_id)
        return failed

    def _fail(self, handle: int, problem: str, cause: FailureCause) -> GrammarFailed:
        self.drop([handle])
        return GrammarFailed(handle, problem, cause)


def describe_slow(what: str, time_s: float, limit_s: float) -> Problem:
    text = f"the grammar is too slow: {what} took {time_s:.2g} s of processor time; the limit is {limit_s:g} s"
    return text, "slow"


def accept(matcher: Matcher, token_id: int, is_apart: bool = False) -> Problem | None:
    """Advance a matcher by a token that its mask allowed. Returns a problem if the matcher cannot accept it."""
    try:
        if matcher.accept_allowed(token_id) if is_apart else matcher.accept_token(token_id):
            return None
    except BaseException as error:
        if not is_fault(error):
            raise
        if not isinstance(error, GrammarError):
            logger.exception("a matcher failed")
        return describe_problem(error)
    if matcher.error is not None:  # it met one of its limits
        return matcher.error, "limit"
    return f"token {token_id} is not allowed by the grammar", "fault"


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
            problems[at] = matcher.error, "limit"
    return {
        at: (f"the grammar could not go on: {problem}", cause) for at, (problem, cause) in problems.items()
    }


def describe_problem(error: BaseException) -> Problem:
    """A GrammarError is a limit of the grammar; any other error is a fault of the engine."""
    return (str(error), "limit") if isinstance(error, GrammarError) else (repr(error), "fault")


def is_fault(error: BaseException) -> bool:
    """Whether a matcher or its library failed, as opposed to an interrupt of the process."""
    return isinstance(error, Exception) or is_panic(error)
