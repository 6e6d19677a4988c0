"""The kernels compiled for GPUs that are not here: no spills, wide loads, asynchronous copies, tensor cores.

What is compiled is what the tile tables choose, so that a table cannot ship a tile that does not fit its GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kernels.triton.add_rms_norm import add_rms_norm_kernel
from kernels.triton.attention_long import long_attention_kernel
from kernels.triton.attention_short import fold_splits_kernel, short_attention_kernel
from kernels.triton.draw_filtered import draw_filtered_kernel
from kernels.triton.draw_tiles import pick_winner_kernel, tile_mass_kernel, tile_max_kernel, tile_noise_kernel
from kernels.triton.gather_inputs import gather_tables_kernel, gather_tokens_kernel
from kernels.triton.launch import EXACT, FUSED
from kernels.triton.lm_head_sample import lm_head_sample_kernel
from kernels.triton.norm_rope_store import norm_rope_store_kernel
from kernels.triton.rms_norm import rms_norm_kernel
from kernels.triton.silu_mul import silu_mul_kernel
from kernels.triton.tiles import Kind, Tile, pick_generation, read_table
from kernels.triton.token_bitmask import apply_bitmask_kernel
from tests.kernels.triton.ahead import Compiled, compile_for
from tests.kernels.triton.conftest import IS_INTERPRETED

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets does not compile"),
    pytest.mark.timeout(600),
]

ARCHITECTURES = [80, 89, 90]
# Shared memory that one program may have.
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compile afresh, and leave nothing in the home folder."""
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


@cache
def compile_attention(
    arch: int,
    kind: Kind,
    dtype: str = "bf16",
    cache_dtype: str | None = None,
    head_dim: int = 128,
    is_folded: bool = True,
    window: int = 0,
) -> tuple[Compiled, Tile]:
    """Compile the tile that the table of an architecture chooses, for 16 heads in groups of two."""
    cache_dtype = cache_dtype or dtype
    table = read_table(pick_generation(arch))
    tile = table.choose(kind, ITEMSIZE[cache_dtype], head_dim)
    arguments = dict.fromkeys(("out_ptr", "q_ptr"), f"*{dtype}")
    arguments |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache_dtype}")
    arguments |= dict.fromkeys(("tables_ptr", "query_start_ptr", "seq_lens_ptr"), "*i32")
    arguments |= {"q_stride": "i32:16", "table_stride": "i32", "scale": "fp32", "soft_cap": "fp32"}
    constants: dict[str, object] = {
        "NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_DIM": head_dim, "BLOCK_SIZE": 16,
        "WINDOW": window, "HAS_SOFT_CAP": False, "IS_FP8": cache_dtype == "u8", "SHORT_LIMIT": 16,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    }  # fmt: skip
    if kind == "short":
        arguments |= {"parts_ptr": "*fp32", "stats_ptr": "*fp32"}
        arguments |= dict.fromkeys(("query_tiles", "max_query_len", "num_slots"), "i32")
        constants |= {"MIN_SPLIT": table.min_split, "MAX_SPLITS": 16, "IS_FOLDED": is_folded}
    else:
        arguments |= {"num_requests": "i32"}
    kernel = short_attention_kernel if kind == "short" else long_attention_kernel
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(arch, kernel, arguments, constants, **options, **FUSED), tile


def assert_fits(compiled: Compiled, arch: int) -> None:
    assert compiled.stack_bytes == 0, "registers spill"
    assert compiled.shared_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize("kind", ["short", "long"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_streams_its_keys(arch: int, kind: Kind) -> None:
    """Copies to shared memory run ahead of the products, 16 bytes a thread."""
    compiled, _ = compile_attention(arch, kind)
    assert_fits(compiled, arch)
    assert "cp.async" in compiled.ptx
    assert compiled.count(r"LDGSTS\S*\.128") >= 8
    assert not compiled.count(r"LDGSTS\.E\.(BYPASS\.)?(64|32) ")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_decode_uses_tensor_cores(arch: int) -> None:
    assert compile_attention(arch, "short")[0].count(r"\bHMMA\.")


def test_prefill_uses_warpgroup_products_where_there_are_some() -> None:
    compiled, tile = compile_attention(90, "long")
    assert tile.block_m >= 64
    assert "wgmma" in compiled.ptx and compiled.count("HGMMA")


@pytest.mark.parametrize("kind", ["short", "long"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "head_dim", "window"),
    [("bf16", "u8", 128, 0), ("fp32", None, 128, 0), ("fp16", None, 64, 4096), ("bf16", None, 256, 0)],
)
def test_other_attention_variants_fit(
    kind: Kind, dtype: str, cache_dtype: str | None, head_dim: int, window: int
) -> None:
    for arch in (80, 90):
        compiled, _ = compile_attention(arch, kind, dtype, cache_dtype, head_dim, window=window)
        assert_fits(compiled, arch)


def test_a_split_context_costs_no_more_registers_than_a_folded_one() -> None:
    parted, folded = (compile_attention(90, "short", is_folded=flag)[0] for flag in (False, True))
    assert_fits(parted, 90)
    assert parted.num_registers <= folded.num_registers + 16


PARTS = dict.fromkeys(("parts_ptr", "stats_ptr"), "*fp32")
LENGTHS = dict.fromkeys(("query_start_ptr", "seq_lens_ptr"), "*i32")
VOCAB = {"VOCAB": 151936, "NUM_TILES": 75, "TILE": 2048}
BLOCK_TILES = {"BLOCK_TILES": 128}
DRAW = {
    "best_ptr": "*fp32", "best_id_ptr": "*i32", "logits_ptr": "*fp32", "row_stride": "i32:16", "noisy_ptr": "*fp32",
    "noisy_id_ptr": "*i32", "keys_ptr": "*i32", "temperature_ptr": "*fp32", "log_min_p_ptr": "*fp32",
    "mass_ptr": "*i64", "token_ptr": "*i64", "top_k_ptr": "*i64", "top_p_ptr": "*fp32",
}  # fmt: skip
STEP = {
    "input_ids_ptr": "*i64", "positions_ptr": "*i64", "slots_ptr": "*i64", "pool_ptr": "*i64", "tables_ptr": "*i32",
    "rows_ptr": "*i64", "starts_ptr": "*i64", "query_start_ptr": "*i32", "pool_stride": "i32", "table_stride": "i32",
    "num_tokens": "i32", "num_requests": "i32", "out_ptr": "*i32", "seq_lens_ptr": "*i32", "width": "i32",
}  # fmt: skip
ROPE = {
    "q_ptr": "*bf16", "heads_ptr": "*bf16", "qk_norm_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
    "slot_ptr": "*i64", "token_stride": "i32:16", "eps": "fp32",
}  # fmt: skip
ROPE_SIZES = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HAS_NORM": True, "BLOCK_HEADS": 16}
ROWS = dict.fromkeys(("out_ptr", "x_ptr", "residual_ptr", "weight_ptr", "gate_up_ptr"), "*bf16")
# name: kernel, arguments, constants, warps, whether its loads are 128 bits wide
SMALL = {
    "rms_norm": (rms_norm_kernel, ROWS | {"eps": "fp32"}, {"SIZE": 1024, "NUM_WEIGHTS": 1, "BLOCK": 1024}, 4, True),
    "add_rms_norm": (add_rms_norm_kernel, ROWS | {"eps": "fp32"}, {"SIZE": 5120, "BLOCK": 8192}, 8, True),
    "silu_mul": (silu_mul_kernel, ROWS, {"SIZE": 3072, "BLOCK": 1024}, 4, True),
    "norm_rope_store": (
        norm_rope_store_kernel,
        ROPE | {"k_cache_ptr": "*bf16", "v_cache_ptr": "*bf16"},
        ROPE_SIZES | {"IS_FP8": False, "BLOCK_HALF": 64},
        4,
        True,
    ),
    "norm_rope_store to fp8": (
        norm_rope_store_kernel,
        ROPE | {"k_cache_ptr": "*u8", "v_cache_ptr": "*u8"},
        ROPE_SIZES | {"IS_FP8": True, "BLOCK_HALF": 64},
        4,
        True,
    ),
    "fold_splits": (
        fold_splits_kernel,
        PARTS | LENGTHS | {"out_ptr": "*bf16", "max_query_len": "i32", "num_slots": "i32"},
        {
            "NUM_HEADS": 16, "HEAD_DIM": 128, "BLOCK_DIM": 128, "WINDOW": 0, "SHORT_LIMIT": 16, "MIN_SPLIT": 512,
            "MAX_SPLITS": 16, "BLOCK_Q": 8, "BLOCK_N": 64,
        },
        1,
        True,
    ),
    "tile_max": (tile_max_kernel, DRAW, VOCAB, 4, True),
    "tile_noise": (tile_noise_kernel, DRAW, VOCAB | BLOCK_TILES | {"HAS_MIN_P": True}, 8, True),
    "tile_mass": (tile_mass_kernel, DRAW, VOCAB | BLOCK_TILES, 8, True),
    "draw_filtered": (draw_filtered_kernel, DRAW, VOCAB | BLOCK_TILES | {"BLOCK": 256, "NUM_PIVOTS": 8}, 4, False),
    "pick_winner": (pick_winner_kernel, DRAW, {"NUM_TILES": 75} | BLOCK_TILES, 1, False),
    "apply_bitmask": (
        apply_bitmask_kernel,
        {
            "logits_ptr": "*fp32", "bitmask_ptr": "*i32", "rows_ptr": "*i64", "row_stride": "i32:16",
            "mask_stride": "i32", "num_words": "i32",
        },
        {"VOCAB": 151936, "BLOCK": 2048},
        4,
        False,
    ),
    "lm_head_sample": (
        lm_head_sample_kernel,
        DRAW
        | {
            "hidden_ptr": "*bf16", "weight_ptr": "*bf16", "bitmask_ptr": "*i32", "mask_rows_ptr": "*i64",
            "num_rows": "i32", "num_words": "i32",
        },
        {
            "VOCAB": 151936, "WIDTH": 1024, "HAS_MASK": True, "NUM_TILES": 1187, "BLOCK_ROWS": 16, "BLOCK_VOCAB": 128,
            "BLOCK_WIDTH": 128,
        },
        4,
        False,
    ),
    "gather_tokens": (gather_tokens_kernel, STEP, {"BLOCK_SIZE": 16, "BLOCK": 128}, 4, False),
    "gather_tables": (gather_tables_kernel, STEP, {"BLOCK": 128}, 4, False),
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", SMALL)
def test_the_other_kernels_do_not_spill_and_load_wide(name: str, arch: int) -> None:
    kernel, arguments, constants, num_warps, is_wide = SMALL[name]
    own = {key: value for key, value in arguments.items() if key in kernel.arg_names}
    options = EXACT if arguments is DRAW else FUSED
    compiled = compile_for(arch, kernel, own, constants, num_warps=num_warps, **options)
    assert_fits(compiled, arch)
    assert compiled.count(r"LDG\S*\.128") or not is_wide


def test_noise_is_made_with_exact_logarithms_and_divisions() -> None:
    """The fast ones are off by more than two draws of equal seeds may differ."""
    compiled = compile_for(
        90, tile_noise_kernel, {key: DRAW[key] for key in DRAW if key in tile_noise_kernel.arg_names},
        VOCAB | BLOCK_TILES | {"HAS_MIN_P": False}, num_warps=8, **EXACT,
    )  # fmt: skip
    assert "lg2.approx" not in compiled.ptx
    assert "div.rn.f32" in compiled.ptx
