"""The kernels compiled for GPUs that are not here: no spills, wide loads, asynchronous copies, tensor cores.

What is compiled is what `choose_tiles` chooses, so that no tile is too large for a GPU.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton.language as tl

from kernels.triton.add_rms_norm import add_rms_norm_kernel
from kernels.triton.attention_long import long_attention_kernel
from kernels.triton.attention_short import fold_splits_kernel, short_attention_kernel
from kernels.triton.draw_filtered import draw_filtered_kernel
from kernels.triton.draw_tiles import pick_winner_kernel, tile_max_kernel, tile_noise_kernel, tile_sums_kernel
from kernels.triton.experts import combine_experts_kernel
from kernels.triton.gather_inputs import gather_tables_kernel, gather_tokens_kernel
from kernels.triton.launch import EXACT, FUSED, next_power_of_2
from kernels.triton.lora import lora_add_kernel, lora_low_kernel
from kernels.triton.norm_rope_store import norm_rope_store_kernel
from kernels.triton.products import BLOCK_BYTES, BLOCK_FLOATS, NUM_STAGES, product_kernel
from kernels.triton.rms_norm import rms_norm_kernel
from kernels.triton.round_rows import round_rows_kernel
from kernels.triton.routing import choose_experts_kernel, group_pairs_kernel
from kernels.triton.silu_mul import silu_mul_kernel
from kernels.triton.states import relate_chunk_kernel, run_conv_kernel, scan_chunks_kernel, scan_states_kernel
from kernels.triton.tiles import Kind, Tile, choose_tiles, limit_short_rows
from kernels.triton.token_bitmask import apply_bitmask_kernel
from tests.kernels.triton.ahead import Compiled, compile_for
from tests.kernels.triton.conftest import IS_INTERPRETED

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets does not compile"),
    pytest.mark.timeout(600),
]

# One compilation takes a second: `make soak` covers the generations between, and more variants.
SOAK = pytest.mark.soak
ARCHITECTURES = [80, pytest.param(89, marks=SOAK), 90]
NEWEST = [pytest.param(80, marks=SOAK), 90]
# Shared memory that one program may have.
SHARED_BYTES = {75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MAX_REGISTERS = 255  # that a thread may have
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "u8": 1}


@pytest.fixture(scope="module", autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compile what no earlier run did, and leave nothing in the home folder. Triton's keys hold source and options."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("triton") if cache else tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield folder


KERNELS = {"short": short_attention_kernel, "long": long_attention_kernel}


@cache
def compile_attention(
    arch: int,
    kind: Kind,
    dtype: str = "bf16",
    cache_dtype: str | None = None,
    head_dim: int = 128,
    is_folded: bool = True,
    window: int = 0,
    is_draft: bool = False,
    has_sinks: bool = False,
    num_kv_heads: int = 8,
) -> tuple[Compiled, Tile]:
    """Compile the tile of such a layer for an architecture, for 16 heads, by default in groups of two."""
    cache_dtype = cache_dtype or dtype
    tiles = choose_tiles(ITEMSIZE[cache_dtype], head_dim)
    tile = tiles.long if kind == "long" else tiles.short
    arguments = dict.fromkeys(("out_ptr", "q_ptr"), f"*{dtype}")
    arguments |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache_dtype}")
    arguments |= dict.fromkeys(("tables_ptr", "query_start_ptr", "seq_lens_ptr"), "*i32")
    arguments |= {"q_stride": "i32:16", "table_stride": "i32", "scale": "fp32", "soft_cap": "fp32"}
    constants: dict[str, object] = {
        "NUM_HEADS": 16, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "BLOCK_DIM": next_power_of_2(head_dim),
        "BLOCK_SIZE": 16,
        "HAS_SOFT_CAP": False, "HAS_SINKS": has_sinks, "IS_FP8": cache_dtype == "u8",
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    }  # fmt: skip
    arguments |= {"sinks_ptr": "*fp32" if has_sinks else "*i32"}
    if kind == "short":
        arguments |= {"parts_ptr": "*fp32", "stats_ptr": "*fp32"}
        arguments |= dict.fromkeys(("query_tiles", "first_draft", "num_slots"), "i32")
        constants |= {
            "MIN_SPLIT": tiles.min_split, "MAX_SPLITS": 16, "IS_FOLDED": is_folded, "WINDOW": window,
            "MIN_QUERY": 2 if is_draft else 1, "MAX_QUERY": 16 if is_draft else 1,
        }  # fmt: skip
        constants["BLOCK_M"] = max(tile.block_m, limit_short_rows(head_dim) if is_draft else 1)
    else:
        arguments |= {"num_requests": "i32"}
        constants |= {"SHORT_LIMIT": 16, "WINDOW": window}
    kernel = KERNELS[kind]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(arch, kernel, arguments, constants, **options, **FUSED), tile


def assert_fits(compiled: Compiled, arch: int) -> None:
    """No register spills because there are too few.

    Below that limit some versions of the assembler move up to eight aside, so that more programs fit side by side.
    """
    is_full = compiled.num_registers >= MAX_REGISTERS
    assert compiled.stack_bytes <= (0 if is_full else 32), "registers spill"
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("short", {"cache_dtype": "u8"}),
        ("long", {"dtype": "fp32", "head_dim": 64, "window": 4096}),
        ("short", {"head_dim": 576, "num_kv_heads": 1}),
        pytest.param("long", {"head_dim": 576, "num_kv_heads": 1}, marks=SOAK),
        pytest.param("short", {"head_dim": 576, "num_kv_heads": 1, "is_draft": True, "is_folded": False}, marks=SOAK),
        ("short", {"is_folded": False, "is_draft": True, "has_sinks": True}),
        pytest.param("long", {"head_dim": 256}, marks=SOAK),
        pytest.param("long", {"cache_dtype": "u8"}, marks=SOAK),
        pytest.param("short", {"dtype": "fp32", "head_dim": 64, "window": 4096}, marks=SOAK),
        pytest.param("short", {"head_dim": 256}, marks=SOAK),
        pytest.param("short", {"is_draft": True, "has_sinks": True}, marks=SOAK),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", NEWEST)
def test_other_attention_variants_fit(arch: int, kind: Kind, options: dict[str, Any]) -> None:
    assert_fits(compile_attention(arch, kind, **options)[0], arch)


@pytest.mark.parametrize("head_dim", [160, 512])
def test_sizes_between_powers_of_two_fit_the_smallest_memory(head_dim: int) -> None:
    """Tiles go by the padded size. `python -m tests.measure.head_sizes` compiles all sizes."""
    assert_fits(compile_attention(89, "long", head_dim=head_dim)[0], 89)


@SOAK
@pytest.mark.parametrize(("arch", "head_dim"), [(86, 256), (89, 128)])
def test_drafts_in_float32_fit_small_gpus(arch: int, head_dim: int) -> None:
    """Their memory holds them; a few registers spill, in a dtype that is there for comparisons."""
    compiled, _ = compile_attention(arch, "short", "fp32", head_dim=head_dim, is_draft=True)
    assert compiled.shared_bytes <= SHARED_BYTES[arch]
    assert compiled.stack_bytes <= 128


@SOAK
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
    "count_ptr": "*i64", "mass_ptr": "*i64", "token_ptr": "*i64", "top_k_ptr": "*i64", "top_p_ptr": "*fp32",
}  # fmt: skip
STEP = {
    "input_ids_ptr": "*i64", "positions_ptr": "*i64", "slots_ptr": "*i64", "pool_ptr": "*i32", "tables_ptr": "*i32",
    "rows_ptr": "*i64", "starts_ptr": "*i64", "query_start_ptr": "*i32", "pool_stride": "i32", "table_stride": "i32",
    "group_stride": "i32", "slot_stride": "i32", "out_stride": "i32", "row_stride": "i32",
    "num_tokens": "i32", "num_requests": "i32", "out_ptr": "*i32", "seq_lens_ptr": "*i32", "width": "i32",
}  # fmt: skip
ROPE = {
    "q_ptr": "*bf16", "heads_ptr": "*bf16", "qk_norm_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
    "slot_ptr": "*i64", "token_stride": "i32:16", "eps": "fp32",
}  # fmt: skip
ROPE_SIZES = {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HAS_NORM": True, "BLOCK_HEADS": 16}
ROWS = dict.fromkeys(("out_ptr", "x_ptr", "residual_ptr", "weight_ptr", "gate_up_ptr"), "*bf16")
EXPERT_ROWS = {
    "results_ptr": "*fp32", "pairs_ptr": "*i64", "tile_experts_ptr": "*i32", "tile_starts_ptr": "*i32",
    "ends_ptr": "*i32", "alpha": "fp32", "limit": "fp32",
}  # fmt: skip
LORA = {
    "low_ptr": "*fp32", "rows_ptr": "*i64", "numbers_ptr": "*i64", "table_ptr": "*i64", "table_stride": "i32",
    "low_stride": "i32",
}  # fmt: skip
NUMBERS = {"BITS": 16, "ZERO": 0, "GROUP": 1, "IS_FLOAT": False}
CODES = {"BITS": 4, "ZERO": 0, "GROUP": 32, "IS_FLOAT": False}
BYTES = {"BITS": 8, "ZERO": 128, "GROUP": 32, "IS_FLOAT": False}
FLOATS = {"BITS": 8, "ZERO": 0, "GROUP": 128, "IS_FLOAT": True}
# name: width, outputs, experts and those of a token, whether products are gated
PRODUCTS = {
    "linear": (4096, 4096, 1, 0, False), "gated": (4096, 4096, 1, 0, True),
    "expert_gate_up": (2048, 768, 128, 8, True), "expert_down": (768, 2048, 128, 8, False),
}  # fmt: skip


def make_product(name: str, rows: int, outputs: int, dtype: str, form: dict[str, int]) -> tuple[Any, ...]:
    """The arguments and constants of a product, as `kernels.triton.products.multiply` gives them."""
    width, size, experts, top_k, is_gated = PRODUCTS[name]
    x = "u8" if form["IS_FLOAT"] else dtype
    block = BLOCK_FLOATS if form["IS_FLOAT"] else BLOCK_BYTES // ITEMSIZE[x]
    arguments = {
        "out_ptr": "*fp32" if name == "expert_down" else f"*{dtype}", "x_ptr": f"*{x}", "x_scales_ptr": "*fp32",
        "weight_ptr": f"*{dtype}" if form["BITS"] == 16 else "*u8",
        "lines_ptr": "*fp32" if form["IS_FLOAT"] else "*i32", "bias_ptr": f"*{dtype}", "num_rows": "i32",
    }  # fmt: skip
    constants = {
        "WIDTH": width, "HALF": width // (2 if form["BITS"] == 4 else 1), "SIZE": size, "TOP_K": top_k,
        "NUM_OUTPUTS": experts * size * (1 + is_gated), "HAS_BIAS": True, "HAS_LIMIT": name == "expert_gate_up",
        "IS_GATED": is_gated, "BLOCK_ROWS": rows, "BLOCK_OUT": outputs,
        "BLOCK_IN": min(block, form["GROUP"]) if form["BITS"] < 16 else block,
    }  # fmt: skip
    return product_kernel, EXPERT_ROWS | arguments, constants | form, outputs // 16, False


# name: kernel, arguments, constants, warps, whether its loads are 128 bits wide
SCAN = dict.fromkeys(
    ("out_ptr", "mixed_ptr", "dt_ptr", "beta_ptr", "a_log_ptr", "dt_bias_ptr", "states_ptr"), "*fp32"
)
SCAN |= {"step_stride": "i32", "skip_ptr": "*fp32", "segments_ptr": "*i64", "bounds_ptr": "*i64"}
SCAN |= dict.fromkeys(("scores_ptr", "solved_ptr"), "*fp32") | {"chunks_ptr": "*i64"}
SCAN_SIZES = {
    "NUM_HEADS": 32, "NUM_GROUPS": 16, "KEY_SIZE": 128, "VALUE_SIZE": 128, "QUERY_AT": 0, "KEY_AT": 2048,
    "VALUE_AT": 4096, "CHANNELS": 8192, "MAX_TOKENS": 32, "CHUNK": 32, "BLOCK_V": 32,
}  # fmt: skip
SMALL = {
    **{
        name: (
            rms_norm_kernel,
            ROWS | {"gate_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "gate_stride": "i32:16", "eps": "fp32"},
            {"SIZE": 1024, "NUM_ROWS": 8, "NUM_WEIGHTS": 1, "BLOCK": 1024}
            | {"HAS_GATE": name == "gated_norm", "IS_GATE_FIRST": False},
            4, True,
        )
        for name, dtype in (("rms_norm", "bf16"), ("gated_norm", "fp32"))
    },
    "add_rms_norm": (add_rms_norm_kernel, ROWS | {"eps": "fp32"}, {"SIZE": 5120, "BLOCK": 8192}, 8, True),
    "silu_mul": (silu_mul_kernel, ROWS, {"SIZE": 3072, "BLOCK": 1024}, 4, True),
    "norm_rope_store": (
        norm_rope_store_kernel, ROPE | {"k_cache_ptr": "*bf16", "v_cache_ptr": "*bf16"},
        ROPE_SIZES | {"IS_FP8": False, "BLOCK_HALF": 64}, 4, True,
    ),
    "norm_rope_store to fp8": (
        norm_rope_store_kernel, ROPE | {"k_cache_ptr": "*u8", "v_cache_ptr": "*u8"},
        ROPE_SIZES | {"IS_FP8": True, "BLOCK_HALF": 64}, 4, True,
    ),
    "lora_low": (
        lora_low_kernel, LORA | {"x_ptr": "*bf16"},
        {"SIZE": 1024, "WEIGHT": tl.bfloat16, "BLOCK_IN": 256, "BLOCK_RANK": 16}, 4, False,
    ),
    "lora_add": (
        lora_add_kernel, LORA | {"y_ptr": "*bf16"},
        {"SIZE": 4096, "WEIGHT": tl.bfloat16, "BLOCK_OUT": 64, "BLOCK_RANK": 16}, 4, False,
    ),
    "fold_splits": (
        fold_splits_kernel,
        PARTS
        | LENGTHS
        | dict.fromkeys(("max_query_len", "first_draft", "num_slots"), "i32")
        | {"out_ptr": "*bf16", "sinks_ptr": "*fp32"},
        {
            "NUM_HEADS": 16, "HEAD_DIM": 128, "BLOCK_DIM": 128, "HAS_SINKS": True, "WINDOW": 0,
            "MIN_QUERY": 1, "MAX_QUERY": 1, "MIN_SPLIT": 512, "MAX_SPLITS": 16, "BLOCK_Q": 8, "BLOCK_N": 64,
        },
        1,
        True,
    ),
    **{
        name: (
            kernel, SCAN,
            SCAN_SIZES | {"BLOCK_K": block_k, "IS_DELTA": is_delta, "HAS_SKIP": not is_delta}, 4, True,
        )
        for name, kernel, block_k, is_delta in (
            ("scan_states", scan_states_kernel, 128, True), ("relate_chunk", relate_chunk_kernel, 32, True),
            ("scan_chunks", scan_chunks_kernel, 32, True), ("scan_chunks of mamba", scan_chunks_kernel, 32, False),
        )
    },
    "run_conv": (
        run_conv_kernel,
        SCAN | dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr"), "*fp32") | {"x_stride": "i32:16"},
        {
            "CHANNELS": 8192, "KEPT": 3, "HAS_BIAS": True, "HAS_SILU": True, "BLOCK_T": 32, "BLOCK_C": 128,
        },
        4,
        True,
    ),
    "tile_max": (tile_max_kernel, DRAW, VOCAB, 4, True),
    "tile_noise": (tile_noise_kernel, DRAW, VOCAB | BLOCK_TILES | {"HAS_MIN_P": True}, 8, True),
    "tile_sums": (tile_sums_kernel, DRAW, VOCAB | BLOCK_TILES | {"NUM_PIVOTS": 8}, 8, True),
    "draw_filtered": (draw_filtered_kernel, DRAW, VOCAB | BLOCK_TILES | {"BLOCK": 1024, "NUM_PIVOTS": 8}, 8, False),
    "pick_winner": (pick_winner_kernel, DRAW, {"NUM_TILES": 75} | BLOCK_TILES, 1, False),
    "apply_bitmask": (
        apply_bitmask_kernel,
        {
            "logits_ptr": "*fp32", "bitmask_ptr": "*i32", "row_stride": "i32:16",
            "mask_stride": "i32", "num_words": "i32",
        },
        {"VOCAB": 151936, "BLOCK": 2048},
        4,
        False,
    ),
    **{
        f"{name} {rows}x{outputs} {dtype} {form['BITS']} bits in {form['GROUP']}":
            make_product(name, rows, outputs, dtype, form)
        for name, rows, outputs, dtype, form in (
            *((name, *size) for name in ("expert_gate_up", "expert_down") for size in (
                (16, 32, "bf16", NUMBERS), (64, 64, "bf16", NUMBERS), (16, 32, "fp32", NUMBERS),
                (16, 32, "bf16", CODES), (64, 64, "bf16", CODES),
            )),
            ("gated", 16, 16, "bf16", CODES), ("gated", 16, 64, "bf16", CODES | {"GROUP": 128}),
            ("linear", 64, 64, "bf16", CODES), ("gated", 16, 16, "bf16", NUMBERS), ("linear", 64, 64, "bf16", BYTES),
        )
    },
    **{
        f"round_rows to {values}": (
            round_rows_kernel,
            {"values_ptr": f"*{values}", "scales_ptr": "*fp32", "x_ptr": "*bf16", "greatest": "fp32", "tiny": "fp32"},
            {"SIZE": 5120, "IS_FP8": values == "u8"} | groups, 8, True,
        )
        for values, groups in (
            ("i8", {"NUM_GROUPS": 1, "BLOCK_GROUPS": 1, "GROUP": 8192}),
            ("u8", {"NUM_GROUPS": 40, "BLOCK_GROUPS": 64, "GROUP": 128}),
        )
    },
    "choose_experts": (
        choose_experts_kernel,
        {"ids_ptr": "*i64", "weights_ptr": "*fp32", "logits_ptr": "*fp32", "bias_ptr": "*fp32", "factor": "fp32"}
        | {"tiny": "fp32"},
        {
            "NUM_EXPERTS": 256, "TOP_K": 8, "SCORE": "sigmoid", "IS_NORMALIZED": True, "HAS_BIAS": True,
            "NUM_GROUPS": 8, "NUM_CHOSEN": 4, "GROUP_BEST": 2, "BLOCK": 256, "BLOCK_GROUPS": 8, "BLOCK_K": 8,
        },
        1, False,
    ),
    "group_pairs": (
        group_pairs_kernel, EXPERT_ROWS | {"ids_ptr": "*i64", "num_pairs": "i32", "num_tiles": "i32"},
        {"NUM_EXPERTS": 128, "BLOCK_EXPERTS": 128, "BLOCK_ROWS": 16, "BLOCK": 1024}, 4, False,
    ),
    "combine_experts": (
        combine_experts_kernel, {"out_ptr": "*bf16", "results_ptr": "*fp32", "ids_ptr": "*i64", "weights_ptr": "*fp32"},
        {"SIZE": 2048, "TOP_K": 8, "BLOCK": 1024}, 4, True,
    ),
    "gather_tokens": (gather_tokens_kernel, STEP, {"NUM_GROUPS": 2, "BLOCK_SIZE": 16, "BLOCK": 128}, 4, False),
    "gather_tables": (gather_tables_kernel, STEP, {"BLOCK": 128}, 4, False),
}  # fmt: skip


# Variants of a product whose other variants are compiled, and products in float32, which are there for comparisons.
LATER = {
    "expert_gate_up 64x64 bf16 4 bits in 32", "expert_down 64x64 bf16 16 bits in 1",
    "expert_down 16x32 bf16 4 bits in 32", "gated 16x16 bf16 16 bits in 1", "gated 16x64 bf16 4 bits in 128",
}  # fmt: skip
assert SMALL.keys() > LATER
NAMES = [pytest.param(name, marks=SOAK if " fp32" in name or name in LATER else ()) for name in SMALL]


@cache
def compile_small(name: str, arch: int) -> Compiled:
    kernel, arguments, constants, num_warps, _ = SMALL[name]
    own, constants = ({key: each[key] for key in each if key in kernel.arg_names} for each in (arguments, constants))
    options = EXACT if arguments is DRAW else FUSED
    if kernel in (product_kernel, scan_chunks_kernel, relate_chunk_kernel):
        options = options | {"num_stages": NUM_STAGES if kernel is product_kernel else 1}
    return compile_for(arch, kernel, own, constants, num_warps=num_warps, **options)


WIDE = re.compile(r"ld\.global\S*\.v(4\.b32|2\.b64)")


@pytest.mark.parametrize("arch", NEWEST)
@pytest.mark.parametrize("name", NAMES)
def test_the_other_kernels_do_not_spill_and_load_wide(name: str, arch: int) -> None:
    compiled, is_wide = compile_small(name, arch), SMALL[name][-1]
    assert_fits(compiled, arch)
    assert WIDE.search(compiled.ptx) or not is_wide


@pytest.mark.parametrize("arch", NEWEST)
@pytest.mark.parametrize("name", [
        "expert_gate_up 16x32 bf16 16 bits in 1", "expert_down 16x32 bf16 16 bits in 1",
        "expert_gate_up 64x64 bf16 16 bits in 1", "expert_gate_up 16x32 bf16 4 bits in 32",
        "gated 16x16 bf16 4 bits in 32", "linear 64x64 bf16 4 bits in 32",
    ])
def test_products_stream_their_weights_into_tensor_cores(name: str, arch: int) -> None:
    compiled = compile_small(name, arch)
    assert_fits(compiled, arch)
    assert compiled.count(r"\bH(G)?MMA\.") and compiled.count(r"LDGSTS\S*\.128")


@pytest.mark.parametrize(("name", "rows", "outputs", "arch"), [
        ("linear", 64, 64, 89), ("linear", 16, 16, 90), ("expert_gate_up", 64, 64, 90),
        *(pytest.param(*each, arch, marks=SOAK) for arch in (89, 90) for each in (
            ("gated", 16, 64), ("expert_down", 16, 32),
        )),
    ])  # fmt: skip
def test_float8_is_multiplied_by_tensor_cores(name: str, rows: int, outputs: int, arch: int) -> None:
    """On sm_90 those of float8 take 64 outputs; narrower tiles become float16, which is exact."""
    kernel, arguments, constants, num_warps, _ = make_product(name, rows, outputs, "bf16", FLOATS)
    own = {key: value for key, value in arguments.items() if key in kernel.arg_names}
    compiled = compile_for(arch, kernel, own, constants, num_warps=num_warps, num_stages=NUM_STAGES, **FUSED)
    assert_fits(compiled, arch)
    product = r"\bHMMA\." if arch == 90 and outputs < 64 else r"\bQG?MMA\."
    assert compiled.count(product) and compiled.count(r"LDGSTS\S*\.128")


@pytest.mark.parametrize("name", ["short", "long", *NAMES])
def test_narrow_floats_are_widened_before_any_arithmetic(name: str) -> None:
    """Only products of tiles take them as they are; the interpreter is wrong in bfloat16 without saying so."""
    line = re.compile(
        r"^.*(?:arith\.(?:add|sub|mul|div|neg|max\w*|min\w*)f|math\.\w+) .*[x ](?:bf16|f16|f8\w+)\b.*$", re.M
    )
    assert line.search("%a = arith.mulf %b, %c : tensor<16xbf16>") and line.search("math.exp2 %a : tensor<8xf16>")
    assert not line.findall(read_ttir(name))


@pytest.mark.parametrize("name", ["short", "long", *NAMES])
def test_strides_are_64_bits_wide_before_they_are_multiplied(name: str) -> None:
    lines = [line for line in read_ttir(name).split("\n") if "tt.func" not in line]
    uses = [line for line in lines if re.search(r"%\w*_stride\b(?! = )", line)]
    assert not [line for line in uses if not re.search(r"= arith\.extsi %\w*_stride : i32 to i64", line)]
    body = "\n".join(lines)
    used = [each for each in compile_names(name) if each.endswith("_stride") and f"%{each}" in body]
    assert bool(uses) == bool(used), "the pattern finds them"


def compile_names(name: str) -> list[str]:
    """The arguments that a kernel is compiled with."""
    kernel = KERNELS[name] if name in KERNELS else SMALL[name][0]
    return list(kernel.arg_names)


def read_ttir(name: str) -> str:
    """The kernel as Triton understood it, before it is fitted to a GPU."""
    return compile_attention(90, name)[0].ttir if name in KERNELS else compile_small(name, 90).ttir


def test_noise_is_made_with_exact_logarithms_and_divisions() -> None:
    """The fast ones are off by more than two draws of equal seeds may differ."""
    compiled = compile_for(
        90, tile_noise_kernel, {key: DRAW[key] for key in DRAW if key in tile_noise_kernel.arg_names},
        VOCAB | BLOCK_TILES | {"HAS_MIN_P": False}, num_warps=8, **EXACT,
    )  # fmt: skip
    assert "lg2.approx" not in compiled.ptx
    assert "div.rn.f32" in compiled.ptx
