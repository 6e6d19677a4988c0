"""Matrices of quantized safetensors against the libraries of their formats, alone and in whole checkpoints."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.device.weight_moves import list_tensors
from engine.errors import ConfigError
from engine.model import DecoderModel, load_model
from engine.model.formats.encoded import EncodedTensor
from engine.model.formats.mxfp4 import Mxfp4Tensor, Nvfp4Tensor
from engine.model.formats.packed_int import read_awq, read_compressed, read_gptq
from kernels.cpu.weights import WeightKind
from kernels.scaled import ScaledTensor
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.engine.model.formats.gguf_files import load_reference
from tests.engine.model.mixed_batch import find_ops

OUT, IN, GROUP = 64, 128, 32
Tensors = dict[str, Tensor]


def draw(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def draw_scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype)


def pack_words(fields: Tensor, num_bits: int) -> Tensor:
    """Fields [..., n] into int32 words, one after another."""
    per_word = 32 // num_bits
    words = torch.zeros(*fields.shape[:-1], fields.shape[-1] // per_word, dtype=torch.int64)
    for at in range(per_word):
        words |= fields[..., at::per_word].long() << (num_bits * at)
    return words.where(words < 2**31, words - 2**32).int()


def make_gptq(out: int, size: int, num_bits: int = 4, has_order: bool = False) -> Tensors:
    groups = size // GROUP
    order = torch.arange(size) // GROUP
    return {
        "qweight": pack_words(draw(0, 2**num_bits, out, size), num_bits).t().contiguous(),
        "qzeros": pack_words(draw(0, 2**num_bits - 1, groups, out, seed=1), num_bits),
        "scales": draw_scales(groups, out),
        "g_idx": (order[torch.randperm(size)] if has_order else order).int(),
    }


def decode_gptq_slowly(tensors: Tensors, num_bits: int) -> Tensor:
    """Number by number, in float16 as the products of GPTQ's libraries have it."""
    size, out = len(tensors["g_idx"]), tensors["scales"].shape[1]
    per_word, mask = 32 // num_bits, 2**num_bits - 1
    weight = torch.empty(out, size, dtype=torch.float16)
    for column in range(size):
        group = int(tensors["g_idx"][column])
        for row in range(out):
            word = int(tensors["qweight"][column // per_word, row])
            code = word >> num_bits * (column % per_word) & mask
            zero = int(tensors["qzeros"][group, row // per_word]) >> num_bits * (row % per_word) & mask
            weight[row, column] = torch.tensor(code - zero - 1).half() * tensors["scales"][group, row]
    return weight


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("has_order", [False, True])
def test_gptq_equals_its_definition(num_bits: int, has_order: bool) -> None:
    tensors = make_gptq(16, IN, num_bits, has_order)
    matrix = read_gptq(*tensors.values(), 1)
    assert torch.equal(matrix.dequantize(), decode_gptq_slowly(tensors, num_bits))
    # An order of groups that the products do not have is rounded to groups of their own.
    grouped = matrix.to_grouped()
    assert (grouped.bits, grouped.group_size) == ((8, 32) if has_order else (num_bits, GROUP))
    values = grouped.read(slice(None)).dequantize()
    torch.testing.assert_close(values, matrix.dequantize().float(), atol=0.02, rtol=2**-8)


def make_awq(out: int, size: int) -> Tensors:
    """Any words are a matrix."""
    limits = (-(2**31), 2**31)
    return {
        "qweight": draw(*limits, size, out // 8).int(),
        "qzeros": draw(*limits, size // GROUP, out // 8, seed=1).int(), "scales": draw_scales(size // GROUP, out),
    }


def test_awq_equals_the_conversion_of_compressed_tensors() -> None:
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters", reason=REASON)
    awq = make_awq(OUT, IN)
    converter = converters.AutoAWQConverter(group_size=GROUP, ignore=[], targets=["re:.*"])
    converted = converter.process({f"m.{name}": tensor for name, tensor in awq.items()})
    compressed = {name.removeprefix("m."): tensor for name, tensor in converted.items()}
    expected = decompress(compressed, "pack-quantized", num_bits=4, symmetric=False, group_size=GROUP)
    assert torch.equal(read_awq(*awq.values()).dequantize(), expected)


REASON = "the optional package compressed-tensors is not installed"


def decompress(tensors: Tensors, layout: str, **weights: Any) -> Tensor:
    """Decode with compressed-tensors itself."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason=REASON)
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=REASON)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**{"strategy": "group"} | weights)
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    result: Tensor = compressor.decompress(dict(tensors), scheme)["weight"]
    return result


def make_compressed(num_bits: int, symmetric: bool, groups: int, dtype: torch.dtype, inputs: int = IN) -> Tensors:
    tensors = {
        "weight_packed": pack_words(draw(0, 2**num_bits, OUT, inputs), num_bits),
        "weight_scale": draw_scales(OUT, groups, dtype=dtype),
        "weight_shape": torch.tensor([OUT, inputs]),
    }
    if not symmetric:
        zeros = draw(0, 2**num_bits, groups, OUT, seed=1)
        tensors["weight_zero_point"] = pack_words(zeros, num_bits).t().contiguous()
    return tensors


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_integers_equal_compressed_tensors(
    num_bits: int, symmetric: bool, strategy: str, dtype: torch.dtype
) -> None:
    groups = IN // GROUP if strategy == "group" else 1
    tensors = make_compressed(num_bits, symmetric, groups, dtype)
    weights = {"num_bits": num_bits, "symmetric": symmetric, "strategy": strategy}
    weights |= {"group_size": GROUP} if strategy == "group" else {}
    expected = decompress(tensors, "pack-quantized", **weights)
    matrix = read_compressed(
        *(tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")),
        *(None, tensors["weight_shape"]),
    )
    assert matrix.dequantize().dtype == expected.dtype
    assert torch.equal(matrix.dequantize(), expected)
    grouped = matrix.to_grouped().read(slice(None))
    torch.testing.assert_close(grouped.dequantize(), expected.float(), atol=1e-2, rtol=2**-8)


@pytest.mark.parametrize(
    ("kind", "strategy"), [*itertools.product(["int", "float"], ["tensor", "channel"]), ("float", "block")]
)
def test_unpacked_numbers_equal_compressed_tensors(kind: str, strategy: str) -> None:
    values = draw(-127, 128, OUT, IN).to(torch.int8)
    if kind == "float":
        values = values.float().to(torch.float8_e4m3fn)
    shapes = {"tensor": (1,), "channel": (OUT, 1), "block": (OUT // 32, IN // 32)}
    scales = draw_scales(*shapes[strategy], dtype=torch.bfloat16)
    weights: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": strategy}
    weights |= {"block_structure": [32, 32]} if strategy == "block" else {}
    expected = decompress({"weight": values, "weight_scale": scales}, f"{kind}-quantized", **weights)
    assert torch.equal(ScaledTensor(values, scales).dequantize(), expected)


@pytest.mark.parametrize("method", ["nvfp4", "mxfp4"])
def test_4_bit_floats_equal_compressed_tensors(method: str) -> None:
    settings, encode = OTHERS[method]
    tensors, matrix = encode(torch.Size((OUT, IN)))
    weights = _FLOAT4 | ({"strategy": "group", "group_size": 32} if method == "mxfp4" else {})
    expected = decompress(tensors, settings["format"], **weights)  # which rounds to bfloat16
    torch.testing.assert_close(matrix.dequantize().float(), expected.float(), atol=0, rtol=2**-7)
    grouped = matrix.to_grouped().read(slice(None)).dequantize()
    torch.testing.assert_close(grouped, expected.float(), atol=2**-8 * float(expected.abs().max()), rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_float8_blocks_equal_transformers(dtype: torch.dtype) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values = draw(-100, 100, 256, 384).float().to(torch.float8_e4m3fn)
    scales = (2.0 ** draw(-6, 3, 2, 3)).to(dtype)
    expected = module.Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(ScaledTensor(values, scales, (128, 128)).dequantize(), expected)


def test_float8_blocks_may_end_before_the_matrix_does() -> None:
    values = torch.ones(130, 200).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    decoded = ScaledTensor(values, scales, (128, 128)).dequantize()
    assert decoded[[0, 0, 129, 129], [0, 199, 127, 128]].tolist() == [1.0, 2.0, 3.0, 4.0]


# ---- whole checkpoints ---------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def encode_gptq(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    tensors = make_gptq(shape[0], shape[1])
    return tensors, read_gptq(*tensors.values(), 1)


def encode_awq(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    tensors = make_awq(shape[0], shape[1])
    return tensors, read_awq(*tensors.values())


def encode_fp8(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    values = draw(-100, 100, *shape).float().to(torch.float8_e4m3fn)
    scales = draw_scales(-(-shape[0] // 128), -(-shape[1] // 128), dtype=torch.float32) * 0.1
    return {"weight": values, "weight_scale_inv": scales}, ScaledTensor(values, scales, (128, 128))


def encode_packed(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    rows, columns = shape
    packed, scales = pack_words(draw(0, 16, rows, columns), 4), draw_scales(rows, columns // GROUP)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    return tensors, read_compressed(packed, scales, None, None, tensors["weight_shape"])


def encode_nvfp4(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    pairs, factor = draw(0, 256, shape[0], shape[1] // 2).to(torch.uint8), torch.tensor([2000.0])
    scales = draw(1, 300, shape[0], shape[1] // 16).float().to(torch.float8_e4m3fn)
    tensors = {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": factor}
    return tensors | {"input_global_scale": factor * 2}, Nvfp4Tensor(pairs, scales, 1 / factor)


def encode_modelopt(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    tensors, matrix = encode_nvfp4(shape)
    names = {"weight": "weight_packed", "weight_scale": "weight_scale", "input_scale": "input_global_scale"}
    renamed = {name: tensors[other] for name, other in names.items()}
    return renamed | {"weight_scale_2": 1 / tensors["weight_global_scale"]}, matrix


def encode_mxfp4(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    pairs = draw(0, 256, shape[0], shape[1] // 2).to(torch.uint8)
    scales = draw(119, 123, shape[0], shape[1] // 32).to(torch.uint8)
    tensors = {"weight_packed": pairs, "weight_scale": scales}
    return tensors, Mxfp4Tensor(pairs.unflatten(1, (-1, 16)), scales)


def encode_mixed(shape: torch.Size) -> tuple[Tensors, EncodedTensor]:
    """The MLP in 4 bits of integers, the rest in blocks of floats."""
    return (encode_packed if SIZES["intermediate_size"] in shape else encode_mxfp4)(shape)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": PACKED}}, "ignore": ["lm_head"],
}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Size], tuple[Tensors, EncodedTensor]]]] = {
    "gptq": (GPTQ, encode_gptq), "awq": (AWQ, encode_awq), "fp8": (FP8, encode_fp8),
    "compressed-tensors": (COMPRESSED, encode_packed),
}

_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4 = COMPRESSED | {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": _FLOAT4}}}
MXFP4 = COMPRESSED | {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": {"weights": _FLOAT4}}}
GROUPS = {"group_0": {"weights": PACKED, "format": "pack-quantized"}, "group_1": {"weights": _FLOAT4}}
MIXED = COMPRESSED | {"format": "mixed-precision", "config_groups": GROUPS, "kv_cache_scheme": {"num_bits": 8}}
OTHERS = {
    "nvfp4": (NVFP4, encode_nvfp4), "mxfp4": (MXFP4, encode_mxfp4), "mixed": (MIXED, encode_mixed),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, encode_modelopt),
}

INT4 = frozenset((WeightKind.GROUPED4, WeightKind.CENTRED4))
CODES = dict.fromkeys(FORMATS, INT4) | {"fp8": frozenset((WeightKind.CENTRED8,))}


def write_checkpoint(folder: Path, method: str, family: str = "qwen3", **sizes: int) -> tuple[Any, Tensors]:
    """Write a tiny model whose layers' matrices are in the format; returns it and its decoded weights."""
    settings, encode = (FORMATS | OTHERS)[method]
    source = make_transformers_model(family, **SIZES | sizes)
    save(source, folder)
    stored, decoded = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "proj" not in name:
            stored[name] = decoded[name] = tensor
            continue
        parts, matrix = encode(tensor.shape)
        stem = name.removesuffix("weight")
        stored |= {f"{stem}{part}": each.contiguous() for part, each in parts.items()}
        decoded[name] = matrix.dequantize().float()
    save_file(stored, folder / "model.safetensors")
    set_format(folder, settings)
    return source, decoded


def set_format(folder: Path, settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize(
    ("method", "family"), [*((method, "qwen3") for method in FORMATS | OTHERS), ("fp8", "deepseek_v3")]
)
def test_a_checkpoint_gives_the_logits_of_transformers_with_the_decoded_weights(
    tmp_path: Path, method: str, family: str
) -> None:
    dense = {"qk_rope_head_dim": 32, "kv_lora_rank": 150, "first_k_dense_replace": 3}
    source, decoded = write_checkpoint(tmp_path, method, family, **dense if family == "deepseek_v3" else {})
    actual = Driver(load_model(tmp_path)).step({"a": make_prompt(30)})["a"]
    expected = compute_expected(load_reference(source, decoded), make_prompt(30))
    torch.testing.assert_close(actual, expected, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_native_ops_multiply_with_the_codes_of_a_checkpoint(tmp_path: Path, method: str) -> None:
    source, decoded = write_checkpoint(tmp_path, method)
    model = load_model(tmp_path, ops=find_ops())
    packed = model.layers[0].mlp.gate_up_proj.packed
    assert (packed.kind in (WeightKind.GROUPED4, WeightKind.CENTRED4), packed.struct.group_size) == (True, GROUP)
    gate = model.ops.unpack_linear(packed)[:256]
    torch.testing.assert_close(gate, decoded["model.layers.0.mlp.gate_proj.weight"], atol=1e-3, rtol=0)
    logits = Driver(model).step({"a": make_prompt(30)})["a"]
    expected = compute_expected(load_reference(source, decoded), make_prompt(30))
    assert torch.cosine_similarity(logits, expected, dim=-1).median() > 0.97


@pytest.mark.parametrize("method", FORMATS)
def test_native_ops_keep_the_codes_of_experts(tmp_path: Path, method: str) -> None:
    _, decoded = write_checkpoint(tmp_path, method, "qwen3_moe", moe_intermediate_size=64)
    model = load_model(tmp_path, ops=find_ops())
    name = next(name for name in decoded if name.endswith("experts.1.down_proj.weight"))
    (packed,) = model.layers[int(name.split(".")[2])].mlp.experts.list_packed()
    assert {each.kind for each in (*packed.gate, *packed.up, *packed.down)} <= CODES[method]
    down = model.ops.unpack_experts(packed).down[1]
    torch.testing.assert_close(down, decoded[name], atol=0.02 if method == "fp8" else 1e-3, rtol=0)
    logits = [Driver(each).step({"a": make_prompt(30)})["a"] for each in (model, load_model(tmp_path))]
    assert torch.cosine_similarity(*logits, dim=-1).median() > 0.97


@pytest.mark.parametrize("method", FORMATS)
def test_triton_ops_keep_the_codes_of_all_matrices(tmp_path: Path, method: str) -> None:
    """They are packed without a launch, here on the CPU."""
    triton_ops = pytest.importorskip("kernels.triton", reason="needs triton")
    _, decoded = write_checkpoint(tmp_path, method, "qwen3_moe", moe_intermediate_size=64)
    model = load_model(tmp_path, ops=triton_ops.make_ops(torch.device("cpu"), torch.float32))
    layer, tolerance = model.layers[0], 0.02 if method == "fp8" else 1e-3
    (experts,) = layer.mlp.experts.list_packed()
    packed = [layer.attention.o_proj.packed, experts.gate_up, experts.down]
    assert {each.bits for each in packed} == {8 if method == "fp8" else 4}
    moved = {id(each) for each in list_tensors(model)}
    assert {id(each) for each in (experts.down.codes, experts.down.lines, model.embedding)} <= moved, "they can sleep"
    found = {"self_attn.o_proj": model.ops.unpack_linear(packed[0])}
    found |= {"mlp.experts.1.down_proj": model.ops.unpack_experts(experts).down[1]}
    for name, matrix in found.items():
        torch.testing.assert_close(matrix, decoded[f"model.layers.0.{name}.weight"], atol=tolerance, rtol=0)


def test_matrices_in_codes_take_no_memory_of_a_device_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters cannot be moved to this device; on CUDA they are when all is packed."""
    triton_ops, meta = pytest.importorskip("kernels.triton", reason="needs triton"), torch.device("meta")
    moved: list[torch.device] = []
    monkeypatch.setattr(DecoderModel, "move", lambda _, device: moved.append(device))
    write_checkpoint(tmp_path, "gptq", "qwen3_moe", moe_intermediate_size=64)
    model = load_model(tmp_path, torch.bfloat16, meta, ops=triton_ops.make_ops(meta, torch.bfloat16))
    assert moved == [meta]
    parameters = {id(each) for each in model.parameters()}
    assert all(each.is_meta != (id(each) in parameters) for each in list_tensors(model))


def test_triton_ops_read_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    triton_ops = pytest.importorskip("kernels.triton", reason="needs triton")
    _, decoded = write_checkpoint(tmp_path, "awq", tie_word_embeddings=True)
    model = load_model(tmp_path, ops=triton_ops.make_ops(torch.device("cpu"), torch.float32))
    table = decoded["model.embed_tokens.weight"]
    assert torch.equal(model.lm_head.packed, table)
    assert torch.equal(model.ops.unpack_rows(model.embedding, torch.tensor([3, 1])), table[[3, 1]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported; supported: awq, gptq"),
        (GPTQ | {"bits": 3}, "bits=3 is not supported; supported: 4, 8"),
        (AWQ | {"version": "gemv"}, "version='gemv' is not supported"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two positive integers"),
        (COMPRESSED | {"format": "marlin-24"}, "format='marlin-24' is not supported"),
    ],
)
def test_what_a_format_holds_that_is_not_understood_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    set_format(save(make_transformers_model("qwen3"), tmp_path), settings)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_a_part_that_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "gptq")
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != f"{name}.scales"}, path)
    with pytest.raises(ConfigError, match=rf"missing: {name}.weight; unexpected: {name}.g_idx, {name}.qweight"):
        load_model(tmp_path)
    save_file(tensors | {f"{name}.qzeros": tensors[f"{name}.qzeros"][:1]}, path)
    with pytest.raises(ConfigError, match=rf"{name}.qweight is not a matrix in gptq"):
        load_model(tmp_path)
