"""Tile sizes of the attention kernels, in one JSON table per device. A layer without an entry uses the nearest one.

The tuner writes `tiles/<device name>.json`. A device without such a file uses `tiles/sm_<xy>.json` of its generation.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

FOLDER = Path(__file__).parent / "tiles"
Kind = Literal["short", "long"]


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes and launch settings of one attention kernel."""

    block_m: int  # rows: queries times heads of a group; short queries use at least so many
    block_n: int  # keys
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tile, and the layer for which it was chosen."""

    kind: Kind
    itemsize: int  # bytes of an element of the cache
    head_dim: int
    tile: Tile

    def distance(self, itemsize: int, head_dim: int) -> tuple[float, float]:
        """Return the distance of this entry from a layer. The element size is compared first, then the head size."""
        return abs(math.log2(self.itemsize / itemsize)), abs(math.log2(self.head_dim / head_dim))


@dataclass(frozen=True, slots=True)
class TileTable:
    """The tiles of one device."""

    name: str
    min_split: int  # keys of a context before it is split
    target_programs: int  # programs that fill the device
    entries: tuple[Entry, ...]

    def choose(self, kind: Kind, itemsize: int, head_dim: int) -> Tile:
        """Return the tile of the nearest entry."""
        entries = [entry for entry in self.entries if entry.kind == kind]
        return min(entries, key=lambda entry: entry.distance(itemsize, head_dim)).tile


def read_table(path: Path) -> TileTable:
    """Read one table."""
    content = json.loads(path.read_text(encoding="utf-8"))
    entries = tuple(
        Entry(each["kind"], each["itemsize"], each["head_dim"], Tile(**each["tile"]))
        for each in content["entries"]
    )
    return TileTable(path.stem, content["min_split"], content["target_programs"], entries)


def write_table(table: TileTable, path: Path) -> None:
    """Write one table."""
    content = asdict(table)
    content.pop("name")
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def name_device(name: str) -> str:
    """Return the name of a device's table."""
    return "".join(each if each.isalnum() else "_" for each in name)


@cache
def load_table(device: torch.device) -> TileTable:
    """Return the table of a device, or else of the newest generation that is not newer than the device."""
    if device.type != "cuda":
        return read_table(FOLDER / "sm_80.json")
    own = FOLDER / f"{name_device(torch.cuda.get_device_name(device))}.json"
    if own.exists():
        return read_table(own)
    major, minor = torch.cuda.get_device_capability(device)
    return read_table(pick_generation(10 * major + minor))


def pick_generation(capability: int) -> Path:
    """Return the table of the newest generation that is not newer than this one, or else of the oldest generation."""
    known = sorted((int(path.stem[3:]), path) for path in FOLDER.glob("sm_*.json"))
    older = [path for number, path in known if number <= capability]
    return older[-1] if older else known[0][1]
