"""StepTable: how long a step takes by its tokens and their contexts, fitted to the steps of a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.actor_messages import StepPlan

# Numbers of tokens at which the table has a value; between them it is linear.
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_FITS = 5  # each weighted by the result of the last one
OUTLIER_RATIO = 30.0  # of a step that is left out, over its expected time
MIN_STEPS = 3  # for a value of the table


@dataclass(frozen=True, slots=True)
class StepSize:
    """The quantities that determine the time of a step."""

    num_tokens: int
    num_keys: int  # cached keys that the rows read
    num_pairs: float  # of a query and a key in attention

    @staticmethod
    def of(plan: StepPlan) -> StepSize:
        starts, counts = plan.starts, plan.num_scheduled_tokens
        ends = starts + counts
        return StepSize(int(counts.sum()), int(ends.sum()), float(np.dot(counts, starts + ends + 1)) / 2)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step = table value at its number of tokens + `key_s` x keys + `pair_s` x pairs.

    Attributes:
        num_tokens, seconds: the table, in ascending order.
        front_s: time of a request outside of steps, from its arrival to its queue and from a token to its reader.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    key_s: float = 0.0
    pair_s: float = 0.0
    front_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.num_tokens or len(self.num_tokens) != len(self.seconds):
            raise ValueError("num_tokens and seconds must be lists of the same length, at least 1")
        if list(self.num_tokens) != sorted(set(self.num_tokens)) or self.num_tokens[0] < 1:
            raise ValueError(f"num_tokens={list(self.num_tokens)} must ascend from at least 1")
        if not self.seconds[0] > 0 or list(self.seconds) != sorted(self.seconds):
            raise ValueError(f"seconds={list(self.seconds)} must be above 0 and must not fall")
        for name in ("key_s", "pair_s", "front_s"):
            if not 0 <= getattr(self, name) < 3600:
                raise ValueError(f"{name}={getattr(self, name)} must be from 0 to 3600")

    def estimate(self, size: StepSize) -> float:
        """Return the seconds of a step; beyond the table it grows as between the last two entries."""
        xs, ys = self.num_tokens, self.seconds
        if size.num_tokens <= xs[-1] or len(xs) == 1:
            seconds = float(np.interp(size.num_tokens, xs, ys))
        else:
            seconds = ys[-1] + (size.num_tokens - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return seconds + self.key_s * size.num_keys + self.pair_s * size.num_pairs

    @staticmethod
    def fit(sizes: Sequence[StepSize], seconds: Sequence[float], front_s: float = 0.0) -> StepTable:
        """Fit a table whose sums are those of the measured steps: least squares, weighted by the expected time.

        On a busy machine many steps are a few times slower than most. They count, because requests wait for them.
        """
        tokens = np.array([size.num_tokens for size in sizes], dtype=np.float64)
        times = np.array(seconds)
        knots = _choose_knots(tokens)
        parts = [np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]
        parts += [np.array([size.num_keys for size in sizes]), np.array([size.num_pairs for size in sizes])]
        rows = np.column_stack(parts)
        expected, is_kept = times, np.ones(len(times), dtype=bool)
        for _ in range(NUM_FITS):
            found = _solve(rows[is_kept] / expected[is_kept, None], (times / expected)[is_kept], len(knots))
            expected = np.maximum(rows @ found, 1e-6)
            is_kept = times < OUTLIER_RATIO * expected
        # More tokens never take less time.
        values = np.maximum.accumulate(np.maximum(found[:-2], 1e-6))
        key_s, pair_s = found[-2:].tolist()
        return StepTable(tuple(int(knot) for knot in knots), tuple(values.tolist()), key_s, pair_s, front_s)


def _choose_knots(tokens: np.ndarray) -> np.ndarray:
    """Return the smallest and the largest number of tokens, and knots between with enough steps below each."""
    low, high = tokens.min(), tokens.max()
    knots = [low]
    for knot in (each for each in KNOTS if low < each < high):
        if ((tokens > knots[-1]) & (tokens <= knot)).sum() >= MIN_STEPS:
            knots.append(knot)
    return np.array([*knots, high] if high > knots[-1] else knots)


def _solve(rows: np.ndarray, values: np.ndarray, num_knots: int) -> np.ndarray:
    """Solve rows x = values. Coefficients of keys and pairs below 0 are noise, and become 0."""
    columns = list(range(rows.shape[1]))
    while True:
        found = np.zeros(rows.shape[1])
        found[columns] = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
        negative = [column for column in columns if column >= num_knots and found[column] < 0]
        if not negative:
            return found
        columns.remove(min(negative, key=lambda column: found[column]))
