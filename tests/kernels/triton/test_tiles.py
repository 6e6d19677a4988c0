"""Choices on the host: tiles, sizes from plans, and integers on which a launch is not specialised."""

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from kernels.ops import StepShape
from kernels.step_buffers import StepBuffers
from kernels.triton import make_ops
from kernels.triton.attention_long import long_attention_kernel
from kernels.triton.attention_plan import SHORT_LIMIT, AttentionPlan
from kernels.triton.attention_short import fold_splits_kernel, short_attention_kernel
from kernels.triton.gather_inputs import gather_inputs, gather_tables_kernel, gather_tokens_kernel
from kernels.triton.paged_attention import MAX_DRAFT_BYTES, estimate_scratch, paged_attention
from kernels.triton.tiles import choose_tiles
from kernels.triton.token_bitmask import apply_bitmask_kernel
from tests.kernels.triton.conftest import IS_INTERPRETED


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256, 512])
def test_tiles_have_sizes_that_kernels_take(itemsize: int, head_dim: int) -> None:
    tiles = choose_tiles(itemsize, head_dim)
    for tile in (tiles.short, tiles.long):
        assert all(size & (size - 1) == 0 for size in (tile.block_m, tile.block_n, tile.num_warps))
        assert tile.block_m >= 16 and tile.block_n >= 16 and tile.num_stages >= 1
        assert tiles.min_split % tile.block_n == 0, "a split ends where a tile ends"


def test_a_plan_parts_requests_by_their_new_tokens() -> None:
    plan = AttentionPlan([1, SHORT_LIMIT, SHORT_LIMIT + 1], [9, 400, 30])
    assert (plan.has_decodes, plan.max_draft_len, plan.has_long, plan.max_seq_len) == (True, SHORT_LIMIT, True, 400)
    decode = AttentionPlan([1, 1], [5, 6])
    assert (decode.max_draft_len, decode.has_long) == (0, False)


def test_a_plan_knows_where_drafts_begin_and_end() -> None:
    plan = AttentionPlan([1, 40, 3, 1, 16, 20], [50] * 6)
    assert (plan.first_draft, plan.num_draft_tokens) == (41, 3 + 1 + 16)
    assert AttentionPlan([2, 1], [9, 9]).num_draft_tokens == 2
    assert AttentionPlan([1, 17], [9, 50]).num_draft_tokens == 0


def test_layers_of_a_step_share_their_scratch() -> None:
    plan = AttentionPlan([1], [9])
    first, _ = plan.take_scratch(4, 8, torch.device("cpu"))
    second, stats = plan.take_scratch(4, 8, torch.device("cpu"))
    assert first.data_ptr() == second.data_ptr() and stats.shape == (8,)


HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128


def catch_grids(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """The grids of what is launched from now on, by kernel, in place of the launches."""
    grids: dict[str, tuple[int, ...]] = {}

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        grids[kernel.__name__] = grid

    monkeypatch.setattr(JITFunction, "run", run)
    return grids


def launch(
    lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, num_key_heads: int = KEY_HEADS
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Bytes of scratch and the grids of one layer of a step, on the meta device."""
    grids = catch_grids(monkeypatch)
    query_lens, seq_lens = [list(each) for each in zip(*lens, strict=True)]
    with torch.device("meta"):
        cache = torch.empty(9, 16, num_key_heads, HEAD_DIM, dtype=torch.bfloat16)
        q = torch.empty(sum(query_lens), HEADS, HEAD_DIM, dtype=torch.bfloat16)
        tables, lengths = torch.empty(len(lens), 4).int(), torch.empty(len(lens)).int()
        starts = torch.empty(len(lens) + 1).int()
    plan = AttentionPlan(query_lens, seq_lens)
    paged_attention(q, cache, cache, tables, starts, lengths, scale=0.1, plan=plan)
    return (0 if plan._scratch is None else plan._scratch.nbytes), grids


def test_the_rest_of_a_prompt_takes_scratch_for_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for as many of every request beside it: 1,024 decodes with 16 tokens of a prompt took 4 GiB."""
    decodes = [(1, 8192)] * 64
    alone, _ = launch(decodes, monkeypatch)
    mixed, _ = launch([*decodes, (16, 8192)], monkeypatch)
    assert 0 < mixed <= alone * 65 // 64
    assert launch([(700, 8192), *decodes, (16, 8192)], monkeypatch)[0] == mixed * 66 // 65


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device, which is not there, is of sm_80."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.mark.parametrize(
    "lens",
    [
        [(1, 9000)] * 72, [(16, 700)] * 64, [(16, 9000)] * 512, [(2, 9000), (5000, 5000), (2, 9000)],
        [(1, 100_000)] * 9 + [(3, 100_000)],
    ],
)
def test_no_step_takes_more_scratch_than_was_estimated(
    lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = sum(query_len for query_len, _ in lens)
    taken, grids = launch(lens, monkeypatch)
    estimate = make_ops(torch.device("cuda"), torch.bfloat16).estimate_scratch
    assert estimate is estimate_scratch
    lengths = [seq_len for _, seq_len in lens]
    sizes = (len(lens), num_tokens, max(lengths), sum(lengths))
    assert taken <= estimate(StepShape(*sizes, HEADS, KEY_HEADS, HEAD_DIM, 4096, 14336, 2))
    if lens[0][0] > 1:
        assert taken <= MAX_DRAFT_BYTES
        assert ("fold_splits_kernel" in grids) is (taken > 0), "without scratch one program does all parts"


@pytest.mark.parametrize("num_key_heads", [1, KEY_HEADS])
@pytest.mark.parametrize("lens", [[*[(1, 9000)] * 4095, (16, 9000)], [(16, 9000)] * 4096, [(2**22, 2**22)]], ids=len)
def test_only_the_first_axis_of_a_grid_is_long(
    lens: list[tuple[int, int]], num_key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes 65,535 programs along the others."""
    _, grids = launch(lens, monkeypatch, num_key_heads)
    assert grids
    for grid in grids.values():
        assert grid[0] < 2**31 and all(size < 2**16 for size in grid[1:])


def test_a_table_of_any_width_is_gathered_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest context in the smallest blocks: 2 ** 24 columns."""
    grids = catch_grids(monkeypatch)
    num_rows, width = 4096, 2**24
    with torch.device("meta"):
        ids, rows = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.int32)
        tables = torch.empty(1, num_rows, width, dtype=torch.int32)
        starts, bounds = torch.empty(num_rows).int(), torch.empty(num_rows + 1).int()
    buffers = StepBuffers(ids, ids, ids.unsqueeze(0), tables, rows)
    gather_inputs(tables, tables, rows, starts, bounds, 1, buffers)
    assert all(grid[0] < 2**31 and max(grid[1:], default=0) < 2**16 for grid in grids.values())
    assert set(grids) == {"gather_tokens_kernel", "gather_tables_kernel"}


@pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets does not specialise")
@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        (short_attention_kernel, ("query_tiles", "first_draft", "table_stride", "num_slots")),
        (fold_splits_kernel, ("max_query_len", "first_draft", "num_slots")),
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
    assert (ops.name, ops.is_graph_safe, ops.cache_dtypes) == ("triton", True, (torch.float8_e4m3fn,))
    with pytest.raises(ValueError, match=r"dtype must be float32, float16 or bfloat16, not torch\.int8"):
        make_ops(torch.device("cuda"), torch.int8)
