"""Units: what stores hold. A unit has the keys and values of UNIT_TOKENS tokens in one group of layers.

    key     chained hash of the tokens and extra keys up to the end of the unit, and the group's number if it is not 0
    value   layer after layer: keys, then values of each token, all KV heads of a token together

Where layers have states, the state after a unit is cut into further units of the same size, of which the last one is
filled up. Their keys start with their number.

Units do not depend on the block size or on the number of ranks, so replicas that differ in these share them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Unit = tuple[bytes, Sequence[np.ndarray]]  # key, and the parts of the value: contiguous arrays of uint8


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The properties that all units of a store share."""

    fingerprint: str  # of weights, arithmetic and layout
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.fingerprint}-{self.num_bytes}"


def compute_checksum(key: bytes, parts: Sequence[np.ndarray]) -> int:
    """Return the checksum of a value under its key."""
    checksum = zlib.crc32(key)
    for part in parts:
        checksum = zlib.crc32(part.data, checksum)
    return checksum
