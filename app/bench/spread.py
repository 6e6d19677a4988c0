"""Spread: several measurements of one thing; percentiles; and the text that shows both honestly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

NOISY_FROM = 0.15  # (highest - lowest) / median of the repeats
PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """The repeats of one measurement."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def width(self) -> float:
        """Distance of the extremes as a share of the median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def __str__(self) -> str:
        mark = "?" if self.width > NOISY_FROM else ""
        return f"{self.median:.4g}{mark} ({min(self.values):.4g}..{max(self.values):.4g})"


def ratio(ours: Spread, theirs: Spread) -> Spread:
    """Repeat by repeat, which were taken one after the other and so on the same kind of machine."""
    return Spread(tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True)))


def percentiles(values: Sequence[float], points: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Percentiles by name, such as p50; linear between two values."""
    if not values:
        return {}
    found = np.percentile(np.asarray(values, dtype=float), list(points))
    return {f"p{point:g}": float(value) for point, value in zip(points, found, strict=True)}
