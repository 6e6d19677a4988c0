"""Tile sizes of the attention kernels, chosen by the layer: they compile without spills for sm_80 to sm_90."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


# Heads of more elements have latents for keys. Their tiles have 16 rows, or registers would spill.
WIDE_DIM = 256
_WIDE = Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2))
# By bytes of an element of the cache; for heads of about 64, 128 and 256 elements.
_TILES = {
    1: (
        Tiles(Tile(16, 64, 4, 3), Tile(64, 32, 8, 2)),
        Tiles(Tile(16, 64, 4, 3), Tile(64, 32, 8, 2)),
        Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
    ),
    2: (
        Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 3)),
        Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 2)),
        Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
    ),
    4: (
        Tiles(Tile(16, 32, 4, 3), Tile(32, 16, 8, 2)),
        Tiles(Tile(16, 32, 4, 2), Tile(32, 16, 8, 2)),
        Tiles(Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
    ),
}


def choose_tiles(itemsize: int, head_dim: int) -> Tiles:
    """Return the tiles of a layer.

    Args:
        itemsize: bytes of an element of the cache: 1, 2 or 4.
    """
    if head_dim > WIDE_DIM:
        return _WIDE
    return _TILES[itemsize][(head_dim > 90) + (head_dim > 181)]
