"""Chooses the tiles of the attention kernels by graph replay and writes the device's table."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from kernels.triton.bench.batches import AttentionBatch, make_attention
from kernels.triton.bench.timing import Bench
from kernels.triton.paged_attention import paged_attention
from kernels.triton.tiles import FOLDER, Entry, Kind, Tile, TileTable, load_table, name_device, write_table

BLOCKS_M: dict[Kind, tuple[int, ...]] = {"short": (16,), "long": (64, 128)}
BLOCKS_N = (32, 64, 128)
WARPS = (2, 4, 8)
STAGES = (2, 3, 4)
# Shapes used to tune each kind: requests, new tokens per request, context length.
WORK: dict[Kind, tuple[int, int, int]] = {"short": (256, 1, 1024), "long": (4, 2048, 2048)}


def tune(bench: Bench, folder: Path = FOLDER) -> dict[str, Any]:
    """Try all tiles for 128-wide heads in the device's dtype; write the table if any beats what there was.

    Returns the table, which belongs into `kernels/triton/tiles/`, and what was tried, best first.
    """
    table = load_table(bench.device)
    entries, tried = list(table.entries), {}
    for kind in ("short", "long"):
        requests, query_len, context = (
            WORK[kind] if not bench.is_smoke else (1, 1 if kind == "short" else 20, 20)
        )
        batch = make_attention(bench, requests, query_len, context, head_dim=bench.pick(128, 16))
        ranking = rank_tiles(bench, batch, kind, table)
        tried[kind] = [{"us": seconds * 1e6, "tile": str(tile)} for seconds, tile in ranking]
        best = Entry(kind, batch.k_cache.element_size(), batch.q.shape[2], ranking[0][1])
        same = [each for each in entries if replace(each, tile=best.tile) == best]
        entries = [each for each in entries if each not in same] + [best]
    name = name_device(torch.cuda.get_device_name(bench.device)) if bench.device.type == "cuda" else "cpu"
    path = folder / f"{name}.json"
    write_table(replace(table, name=name, entries=tuple(entries)), path)
    return {"table": path.name, "content": json.loads(path.read_text(encoding="utf-8")), "tried": tried}


def rank_tiles(bench: Bench, batch: AttentionBatch, kind: Kind, table: TileTable) -> list[tuple[float, Tile]]:
    """Seconds of a call with each tile that fits the device, best first."""
    ranking = []
    grid = itertools.product(BLOCKS_M[kind], BLOCKS_N, WARPS, STAGES)
    for sizes in grid if not bench.is_smoke else [(16, 16, 4, 2), (16, 32, 4, 2)]:
        tile = Tile(*sizes)
        entry = Entry(kind, batch.k_cache.element_size(), batch.q.shape[2], tile)
        one = replace(table, entries=(entry,))
        try:
            seconds = bench.time(
                lambda: paged_attention(*batch.tensors, scale=0.1, plan=batch.plan, tiles=one)  # noqa: B023
            )
        except TritonError:  # a tile too large for the device, or one that its compiler refuses
            continue
        ranking.append((seconds, tile))
    return sorted(ranking, key=lambda pair: pair[0])
