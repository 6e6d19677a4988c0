"""Mixtures of experts: rounded and packed ones, and keys that contradict each other. Logits: `test_families.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import ConfigError
from engine.model import ModelConfig, load_model
from kernels.cpu import make_native_ops
from kernels.cpu.weights import WeightKind
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.kernels.cpu.conftest import require_library

MAX_LEN = 120
FLOAT, BRAIN = torch.float32, torch.bfloat16


def require_native(name: str) -> Any:
    return make_native_ops(require_library(), 2) if name == "native" else None


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5 * max(1.0, float(expected.abs().max())), rtol=0)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize(("dtype", "quantization"), [(BRAIN, None), (FLOAT, "int8"), (BRAIN, "int8")])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_rounded_logits_stay_near_those_of_transformers(
    family: str, dtype: torch.dtype, quantization: Any, ops: str, tmp_path: Path
) -> None:
    """Rounding may choose another expert for a token, so a few tokens may differ more than the rest."""
    expected = make_transformers_model(family)
    model = load_model(save(expected, tmp_path), dtype, ops=require_native(ops), quantization=quantization)
    prompt = make_prompt(MAX_LEN)
    logits = Driver(model).step({"a": prompt})["a"]
    similarity = torch.cosine_similarity(logits, compute_expected(expected, prompt), dim=-1)
    assert similarity.median() > 0.99 and similarity.quantile(0.1) > 0.95


def test_layers_that_predict_several_tokens_are_not_loaded(tmp_path: Path) -> None:
    expected = make_transformers_model("glm4_moe")
    logits = compute_expected(expected, make_prompt(MAX_LEN))
    file = save(expected, tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, file)
    assert_near(Driver(load_model(tmp_path)).step({"a": make_prompt(MAX_LEN)})["a"], logits)
    save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.4"):
        load_model(tmp_path)


def save_mxfp4(expected: PreTrainedModel, folder: Path) -> Path:
    """Save a model with random experts in 4-bit blocks; it gets what transformers' own decoder makes of them."""
    file = save(expected, folder) / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=FLOAT)
        expected.get_parameter(name).data.copy_(decoded)
    save_file(tensors, file)
    config = folder / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    return folder


def test_mxfp4_experts_equal_the_decoded_ones(tmp_path: Path) -> None:
    expected = make_transformers_model("gpt_oss", hidden_size=64, intermediate_size=96)
    save_mxfp4(expected, tmp_path)
    prompt, model = make_prompt(MAX_LEN), load_model(tmp_path)
    logits = compute_expected(expected, prompt)
    assert_near(Driver(model).step({"a": prompt})["a"], logits)
    native = load_model(tmp_path, ops=require_native("native"))
    for plain, coded in zip(model.layers, native.layers, strict=True):
        (packed,) = coded.mlp.experts.list_packed()
        assert {each.kind for each in (*packed.gate, *packed.up, *packed.down)} == {WeightKind.CENTRED6}
        found = native.ops.unpack_experts(packed)
        wanted = model.ops.unpack_experts(plain.mlp.experts.list_packed()[0])
        assert torch.equal(found.gate_up, wanted.gate_up) and torch.equal(found.down, wanted.down)
    similarity = torch.cosine_similarity(Driver(native).step({"a": prompt})["a"], logits, dim=-1)
    assert similarity.median() > 0.99


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most 8"),
        ("qwen3_moe", {"num_experts": 4}, "num_local_experts=8 contradicts num_experts=4"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, r"mlp_only_layers=\['a'\] must be a list of layer numbers"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True is not supported"),
        ("olmoe", {"clip_qkv": 8.0}, r"does not support: clip_qkv=8\.0"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 must divide 8 experts into groups of at least 2"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, "topk_group=1 must leave 3 experts"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "supported: quant_method mxfp4"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2 is not supported; supported: 3"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "hidden_size=48 must be a multiple of 32"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ],
)
def test_keys_that_contradict_each_other_are_named(family: str, keys: dict[str, Any], message: str) -> None:
    data = make_transformers_model(family).config.to_dict() | keys
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(data)
