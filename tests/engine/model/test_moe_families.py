"""Mixtures of experts: logits of every family against transformers, however the prompt is cut and batched."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import ConfigError
from engine.model import DecoderModel, ModelConfig, load_model
from engine.model.weight_memory import count_parameters
from kernels.cpu import make_native_ops
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.kernels.cpu.conftest import require_library

MAX_LEN = 120
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e3}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-dense-layers": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 40}),
    "olmoe": ("olmoe", {"norm_topk_prob": True}),
    "granitemoe": ("granitemoe", GRANITE | {"attention_multiplier": 0.1}),
    "minimax_m2": ("minimax_m2", {}),
    "glm4_moe": ("glm4_moe", {"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 40, "rope_parameters": YARN}),
    "glm4_moe-groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
}
FLOAT, BRAIN = torch.float32, torch.bfloat16


def require_native(name: str) -> Any:
    return make_native_ops(require_library(), 2) if name == "native" else None


@functools.cache
def load_pair(variant: str, ops: str) -> tuple[PreTrainedModel, DecoderModel, Tensor]:
    """Return transformers' model, ours, and the expected logits of one prompt of MAX_LEN tokens."""
    family, overrides = VARIANTS[variant]
    expected = make_transformers_model(family, **overrides)
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(save(expected, Path(folder)), ops=require_native(ops))
    assert isinstance(model, DecoderModel)
    return expected, model, compute_expected(expected, make_prompt(MAX_LEN))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5 * max(1.0, float(expected.abs().max())), rtol=0)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_chunks_decode_and_prefix_hit(variant: str, ops: str) -> None:
    _, model, expected = load_pair(variant, ops)
    prompt = make_prompt(MAX_LEN)
    driver = Driver(model)
    assert_near(driver.step({"a": prompt})["a"], expected)
    parts = [
        driver.step({"b": part})["b"] for part in (prompt[:50], prompt[50:67], *([x] for x in prompt[67:75]))
    ]
    assert_near(torch.cat(parts), expected[:75])
    driver.block_tables["hit"], driver.num_computed["hit"] = (
        driver.block_tables["a"][: 4 * driver.num_groups],
        64,
    )
    assert_near(driver.step({"hit": prompt[64:], "other": make_prompt(9, 1)})["hit"], expected[64:])


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize(("dtype", "quantization"), [(BRAIN, None), (FLOAT, "int8"), (BRAIN, "int8")])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_rounded_logits_stay_near_those_of_transformers(
    family: str, dtype: torch.dtype, quantization: Any, ops: str, tmp_path: Path
) -> None:
    """Rounding may choose another expert for a token, so a few tokens may differ more than the rest."""
    expected, _, _ = load_pair(family, "torch")
    model = load_model(save(expected, tmp_path), dtype, ops=require_native(ops), quantization=quantization)
    prompt = make_prompt(MAX_LEN)
    logits = Driver(model).step({"a": prompt})["a"]
    similarity = torch.cosine_similarity(logits, compute_expected(expected, prompt), dim=-1)
    assert similarity.median() > 0.99 and similarity.quantile(0.1) > 0.95


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen2_moe", "glm4_moe-groups", "granitemoe"])
@pytest.mark.parametrize(("dtype", "quantization"), [(FLOAT, None), (BRAIN, None), (BRAIN, "int8")])
def test_native_logits_are_the_same_bits_in_any_batch(
    variant: str, dtype: torch.dtype, quantization: Any, tmp_path: Path
) -> None:
    expected, _, _ = load_pair(variant, "torch")
    path = save(expected, tmp_path)
    model = load_model(path, dtype, ops=require_native("native"), quantization=quantization)
    prompts = {str(seed): make_prompt(20 + 7 * seed, seed) for seed in range(8)}
    driver = Driver(model)
    together = driver.step(prompts)
    token = driver.step({name: [5] for name in prompts})
    for name, prompt in prompts.items():
        alone = Driver(model)
        parts = [alone.step({name: part})[name] for part in (prompt[:9], prompt[9:], [5])]
        assert torch.equal(torch.cat(parts[:2]), together[name])
        assert torch.equal(parts[2], token[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_parameters_counted_are_those_of_the_model(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    path = save(make_transformers_model(family, **overrides), tmp_path)
    config = ModelConfig.from_pretrained(path)
    model = DecoderModel(config, FLOAT, torch.device("cpu"))
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_repacking_keeps_every_logit_near(tmp_path: Path) -> None:
    """As when the native ops are built while the model runs on torch's."""
    expected, _, _ = load_pair("glm4_moe", "torch")
    model = load_model(save(expected, tmp_path))
    for _ in model.repack(require_native("native")):
        pass
    prompt = make_prompt(MAX_LEN)
    assert_near(Driver(model).step({"a": prompt})["a"], compute_expected(expected, prompt))


def test_layers_that_predict_several_tokens_are_not_loaded(tmp_path: Path) -> None:
    expected, _, logits = load_pair("glm4_moe", "torch")
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


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_mxfp4_experts_equal_the_decoded_ones(ops: str, tmp_path: Path) -> None:
    expected = make_transformers_model("gpt_oss", hidden_size=64, intermediate_size=96)
    save_mxfp4(expected, tmp_path)
    prompt = make_prompt(MAX_LEN)
    logits = Driver(load_model(tmp_path, ops=require_native(ops))).step({"a": prompt})["a"]
    assert_near(logits, compute_expected(expected, prompt))


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be at most 8"),
        ("qwen3_moe", {"num_experts": 4}, "num_local_experts=8 contradicts num_experts=4"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, r"mlp_only_layers=\['a'\] must be a list of layer numbers"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 8},
            "use_sliding_window=True is not supported",
        ),
        ("olmoe", {"clip_qkv": 8.0}, r"does not support: clip_qkv=8\.0"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 must divide 8 experts into groups of at least 2"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, "topk_group=1 must leave 3 experts"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "supported: quant_method mxfp4"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2 is not supported; supported: 3"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "hidden_size=48 must be a multiple of 32",
        ),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ],
)
def test_keys_that_contradict_each_other_are_named(family: str, keys: dict[str, Any], message: str) -> None:
    data = make_transformers_model(family).config.to_dict() | keys
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(data)
