"""Units: what stores hold. A unit has the keys and values of 16 tokens in one group of layers.

    key     chained hash of the tokens and extra keys up to the end of the unit, and the group's number if it is not 0
    value   layer after layer: keys, then values of each token, all KV heads of a token together

Where layers have states, the state after a unit is cut into further units of the same size, of which the last one is
filled up. Their keys start with their number.

Units do not depend on the block size or on the number of ranks, so replicas that differ in these share them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UNIT_TOKENS = 16
Unit = tuple[bytes, Sequence[np.ndarray]]  # key, and the parts of the value: contiguous arrays of uint8


def count_units(block_size: int) -> int:
    """Return how many units a block has. Blocks below the size of a unit do not leave their core."""
    return max(1, block_size // UNIT_TOKENS)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The properties that all units of a store share."""

    fingerprint: str  # of weights, arithmetic and layout
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.fingerprint}-{self.num_bytes}"


@dataclass(slots=True)
class RequestTransfer:
    """The state of a request in BlockTransfers; the request may run when `is_settled`."""

    is_settled: bool = False
    num_saved: int = 0  # leading blocks of each group that the store has, or that are being saved
    unit_hashes: list[bytes] = field(default_factory=list)  # if blocks are larger than units
    states: list[int] = field(default_factory=list)  # positions of states that were saved or loaded


def compute_checksum(key: bytes, parts: Sequence[np.ndarray]) -> int:
    """Return the checksum of a value under its key."""
    checksum = zlib.crc32(key)
    for part in parts:
        checksum = zlib.crc32(part.data, checksum)
    return checksum
