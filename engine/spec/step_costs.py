"""StepCosts: how long a step of n tokens takes, as measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Weight of a new measurement. Disturbances only ever make a step slower, so higher values count less.
MEMORY, HIGHER_MEMORY = 0.2, 0.04
NOTES_PER_TABLE = 8  # the table is computed again after this many steps; that takes 20 us
MAX_IDLE_S = 0.05  # longer times between steps are not typical
MAX_TOKENS = 4096  # larger steps are extrapolated


class StepCosts:
    """Times of steps by their number of tokens, without prompts.

    The first measurements come from the warm-up; every step of the engine corrects the entry of its size and, by a
    common factor, all others, because another process or other ops change all of them together.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        sizes = sorted(measured) or [(1, 0.01), (64, 0.011)]
        self._sizes = np.array([size for size, _ in sizes], dtype=np.float64)
        # More tokens never take less time.
        self._seconds = np.maximum.accumulate(np.array([seconds for _, seconds in sizes]))
        self._scale = 1.0
        self._idle_s: float | None = None
        self.gap_s = 0.0  # between two steps, if the second is planned after the result of the first
        self._draft_start_s = self._draft_s = 0.0  # of a proposal, for all rows, and of each of its positions
        self.version = 0  # of the table of times
        self._num_notes = 0
        self._times = self._compute_times()

    def note(self, num_tokens: int, seconds: float) -> None:
        expected = self.estimate(num_tokens)
        # A step that takes many times as long waited for something else.
        ratio = min(seconds / max(expected, 1e-9), 4.0)
        weight = _weigh(ratio, 1.0)
        self._scale *= 1 + weight * (ratio - 1)
        place = int(np.argmin(np.abs(self._sizes - num_tokens)))
        self._seconds[place] *= 1 + 0.5 * weight * (ratio - 1)
        self._num_notes += 1
        if self._num_notes % NOTES_PER_TABLE == 0:
            self._times = self._compute_times()
            self.version += 1

    @property
    def idle_s(self) -> float:
        """The time between two steps that overlap on the host; before it is measured, that of others."""
        return self.gap_s if self._idle_s is None else self._idle_s

    def note_idle(self, seconds: float) -> None:
        """Take the time between two steps that overlap on the host."""
        idle_s = self.idle_s
        self._idle_s = idle_s + _weigh(seconds, idle_s) * (min(seconds, MAX_IDLE_S) - idle_s)

    def note_gap(self, seconds: float) -> None:
        """Take the time between two steps, if the second was planned after the result of the first."""
        self.gap_s += _weigh(seconds, self.gap_s) * (min(seconds, MAX_IDLE_S) - self.gap_s)

    def note_draft(self, num_positions: int, seconds: float) -> None:
        expected = self.estimate_drafts(num_positions)
        # Correct both numbers by the least that makes the estimate right.
        step = (seconds - expected) / (1 + num_positions**2)
        weight = _weigh(seconds, expected) if expected else 1.0
        self._draft_start_s = max(0.0, self._draft_start_s + weight * step)
        self._draft_s = max(0.0, self._draft_s + weight * step * num_positions)

    def estimate_drafts(self, num_positions: int) -> float:
        """Return the seconds of proposing so many drafts per row on the device."""
        return self._draft_start_s + self._draft_s * num_positions if num_positions else 0.0

    def estimate(self, num_tokens: int) -> float:
        return float(self._times[min(num_tokens, MAX_TOKENS)])

    def price_token(self, num_rows: int, num_drafting: int) -> float:
        """Return the seconds that one more token of a row that drafts is worth.

        Where all rows draft, each token saves its share of a step. A row that alone goes faster only leaves the batch
        sooner, which saves the time by which a row makes a step longer.
        """
        step_s = self.estimate(num_rows)
        share = min(1.0, num_drafting / num_rows)
        longer_s = num_rows * (step_s - self.estimate(num_rows - 1))
        worth = share + (1 - share) * min(1.0, longer_s / step_s)
        return worth * (step_s + self.idle_s) / num_rows

    def estimate_range(self, num_tokens: int, num_more: int) -> np.ndarray:
        """Return the seconds of steps of `num_tokens` to `num_tokens + num_more` tokens, [num_more + 1]."""
        return self._times[np.minimum(np.arange(num_tokens, num_tokens + num_more + 1), MAX_TOKENS)]

    def _compute_times(self) -> np.ndarray:
        seconds = np.maximum.accumulate(self._seconds) * self._scale
        found = np.interp(np.arange(MAX_TOKENS + 1), self._sizes, seconds)
        last = int(self._sizes[-1])
        if last < MAX_TOKENS and len(self._sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
            found[last:] += slope * np.arange(MAX_TOKENS + 1 - last)
        return found


def _weigh(value: float, mean: float) -> float:
    """Return the weight of a new value in a moving average."""
    return HIGHER_MEMORY if value > mean else MEMORY
