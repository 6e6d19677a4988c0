"""Batch fills of residual matchers: the engines' rows at once, then the checks where there is anything to decide."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..backend import Matcher
from ..bitmask import fill_bitmask
from .closing_tokens import RestOfClass


class Checked(Protocol):
    """What a fill needs of a matcher with checks."""

    @property
    def inner(self) -> Matcher:
        """The matcher of the weakened grammar."""

    @property
    def settled(self) -> RestOfClass | None:
        """All that would have to be looked at, where every other token is known to be allowed; None elsewhere."""

    def clear_violations(self, words: np.ndarray) -> None:
        """Clear the tokens of one row that would complete a value that violates its schema."""


class ResidualFiller:
    """Fills the rows of many residual matchers."""

    def fill(self, matchers: Sequence[Checked], rows: Sequence[int], bitmask: np.ndarray) -> None:
        """Write matcher i's mask into row rows[i]."""
        fill_bitmask([matcher.inner for matcher in matchers], rows, bitmask)
        groups: dict[RestOfClass, list[int]] = {}
        for index, matcher in enumerate(matchers):
            if matcher.settled is None:
                matcher.clear_violations(bitmask[rows[index]])
            else:
                groups.setdefault(matcher.settled, []).append(index)
        for rest, members in groups.items():
            if rest.is_in(bitmask, [rows[index] for index in members]):
                for index in members:
                    matchers[index].clear_violations(bitmask[rows[index]])


# It has no state; one object makes all residual matchers of a batch one group.
FILLER = ResidualFiller()
