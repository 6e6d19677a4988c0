"""What is chosen on the host: tiles from tables, sizes from plans, and what a launch is not specialised on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.triton import make_ops
from kernels.triton.attention_long import long_attention_kernel
from kernels.triton.attention_plan import SHORT_LIMIT, AttentionPlan
from kernels.triton.attention_shared import shared_prefix_kernel
from kernels.triton.attention_short import fold_splits_kernel, short_attention_kernel
from kernels.triton.gather_inputs import gather_tables_kernel, gather_tokens_kernel
from kernels.triton.tiles import (
    FOLDER,
    Entry,
    Tile,
    TileTable,
    load_table,
    name_device,
    pick_generation,
    read_table,
    write_table,
)
from kernels.triton.token_bitmask import apply_bitmask_kernel
from tests.kernels.triton.conftest import IS_INTERPRETED

TABLES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_hold_sizes_that_kernels_take(path: Path) -> None:
    table = read_table(path)
    assert {entry.kind for entry in table.entries} == {"short", "long"}
    for entry in table.entries:
        sizes = (entry.tile.block_m, entry.tile.block_n, entry.tile.num_warps)
        assert all(size & (size - 1) == 0 for size in sizes)
        assert entry.tile.block_m >= 16 and entry.tile.block_n >= 16 and entry.tile.num_stages >= 1
        assert table.min_split % entry.tile.block_n == 0, "a split ends where a tile ends"


@pytest.mark.parametrize(
    ("capability", "stem"),
    [(75, "sm_80"), (80, "sm_80"), (86, "sm_80"), (89, "sm_89"), (90, "sm_90"), (120, "sm_90")],
)
def test_a_device_without_a_table_gets_that_of_its_generation(capability: int, stem: str) -> None:
    assert pick_generation(capability).stem == stem


def test_the_nearest_entry_is_chosen_by_element_size_first() -> None:
    tiles = [Tile(16, size, 4, 2) for size in (16, 32, 64)]
    entries = (
        Entry("short", 2, 64, tiles[0]),
        Entry("short", 2, 256, tiles[1]),
        Entry("short", 4, 128, tiles[2]),
        Entry("long", 2, 128, Tile(64, 64, 4, 2)),
    )
    table = TileTable("test", 64, 1, entries)
    assert table.choose("short", 2, 80) == tiles[0]
    assert table.choose("short", 2, 192) == tiles[1]
    assert table.choose("short", 4, 64) == tiles[2]


def test_a_written_table_is_read_back(tmp_path: Path) -> None:
    table = read_table(TABLES[0])
    path = tmp_path / f"{table.name}.json"
    write_table(table, path)
    assert read_table(path) == table
    assert name_device("NVIDIA H200") == "NVIDIA_H200"
    assert load_table(torch.device("cpu")).entries


def test_a_device_has_its_own_table_or_that_of_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [replace(read_table(path), min_split=256 * (1 + at)) for at, path in enumerate(TABLES)]
    for table in tables:
        write_table(table, tmp_path / f"{table.name}.json")
    monkeypatch.setattr("kernels.triton.tiles.FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    device = torch.device("cuda")
    assert load_table.__wrapped__(device) == read_table(tmp_path / "sm_90.json")
    write_table(replace(tables[0], min_split=1024), tmp_path / "NVIDIA_H200.json")
    assert load_table.__wrapped__(device).min_split == 1024


def test_a_plan_parts_requests_by_their_new_tokens() -> None:
    plan = AttentionPlan([1, SHORT_LIMIT, SHORT_LIMIT + 1], [9, 400, 30])
    assert (plan.has_decodes, plan.max_draft_len, plan.has_long, plan.max_seq_len) == (
        True,
        SHORT_LIMIT,
        True,
        400,
    )
    decode = AttentionPlan([1, 1], [5, 6])
    assert (decode.max_draft_len, decode.has_long) == (0, False)


def test_layers_of_a_step_share_their_scratch() -> None:
    plan = AttentionPlan([1], [9])
    first, _ = plan.take_scratch(4, 8, torch.device("cpu"))
    second, stats = plan.take_scratch(4, 8, torch.device("cpu"))
    assert first.data_ptr() == second.data_ptr() and stats.shape == (8,)


@pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets does not specialise")
@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        (short_attention_kernel, ("query_tiles", "max_query_len", "table_stride", "num_slots")),
        (fold_splits_kernel, ("max_query_len", "num_slots")),
        (shared_prefix_kernel, ("table_stride", "num_groups", "num_slots")),
        (long_attention_kernel, ("num_requests", "table_stride")),
        (gather_tokens_kernel, ("num_tokens", "num_requests")),
        (gather_tables_kernel, ("width",)),
        (apply_bitmask_kernel, ("num_words",)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_changes_from_step_to_step_compiles_nothing_new(kernel: object, names: tuple[str, ...]) -> None:
    free = {param.name for param in kernel.params if param.do_not_specialize}  # type: ignore[attr-defined]
    assert set(names) <= free


def test_ops_are_made_for_the_dtypes_that_kernels_take() -> None:
    ops = make_ops(torch.device("cuda"), torch.bfloat16)
    assert (ops.name, ops.is_graph_safe, ops.takes_fp8_cache) == ("triton", True, True)
    with pytest.raises(ValueError, match=r"dtype must be float32, float16 or bfloat16, not torch\.int8"):
        make_ops(torch.device("cuda"), torch.int8)
