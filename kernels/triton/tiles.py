"""Tile sizes of the attention kernels, chosen by the layer: they compile without spills for sm_80 to sm_90."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.triton.launch import next_power_of_2

Kind = Literal["short", "long"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes and launch settings of one attention kernel."""

    block_m: int  # rows: queries times heads of a group; short queries use at least so many
    block_n: int  # keys
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one layer."""

    short: Tile
    long: Tile
    min_split: int = 512  # keys of a context before it is split
    target_programs: int = 512  # programs that fill a device


# Heads whose padded size is larger have tiles of 16 rows, or registers would spill.
WIDE_DIM = 256
# The keys are the bytes of a cache element, then the padded head size; the last entry also serves larger heads.
_TILES = {
    1: {
        64: Tiles(Tile(16, 64, 4, 3), Tile(64, 32, 8, 2)),
        128: Tiles(Tile(16, 64, 4, 3), Tile(64, 32, 8, 2)),
        256: Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
        512: Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
    },
    2: {
        64: Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 2)),
        256: Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
        512: Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
    },
    4: {
        64: Tiles(Tile(16, 32, 4, 3), Tile(32, 16, 8, 2)),
        128: Tiles(Tile(16, 32, 4, 2), Tile(32, 16, 8, 2)),
        256: Tiles(Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
        512: Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
}


def choose_tiles(itemsize: int, head_dim: int) -> Tiles:
    """Return the tiles of a layer.

    Args:
        itemsize: bytes of an element of the cache: 1, 2 or 4.
    """
    return _TILES[itemsize][min(max(64, next_power_of_2(head_dim)), 512)]


def limit_short_rows(head_dim: int) -> int:
    """Return the rows of a tile of short queries at most, unless one group of heads is larger."""
    return 32 if head_dim <= 128 else 16
