"""A whole step in one native call: equal to the single ops bit for bit, and to transformers within tolerances."""

import dataclasses
import functools
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model import DecoderModel, load_model
from kernels import Ops
from kernels.cpu import make_native_ops
from kernels.ops import Quantization
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.kernels.cpu.conftest import ARCHITECTURES, require_library

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
LENGTHS = {"decode": 90, "short": 3, "chunk": 200, "fresh": 120, "draft": 40, "long": 300}
FIRST = {"decode": 89, "short": 2, "chunk": 100, "draft": 35, "long": 299}


@functools.cache
def make_ops(architecture: str = "native", num_threads: int = 2) -> Ops:
    return make_native_ops(require_library(architecture), num_threads)


@functools.cache
def load_pair(
    variant: str,
    architecture: str = "native",
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
) -> tuple[PreTrainedModel, DecoderModel]:
    family, overrides = VARIANTS[variant]
    expected = make_transformers_model(family, **overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = save(expected, Path(folder))
        model = load_model(path, dtype, ops=make_ops(architecture), quantization=quantization)
    return expected, model


def run_mixed(model: DecoderModel, kv_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Prefill in part, then one step of decode, a chunk, a fresh prompt and drafts; all logits of each request."""
    prompts = {name: make_prompt(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}
    driver = Driver(model, kv_dtype=kv_dtype)
    first = driver.step({name: prompts[name][:count] for name, count in FIRST.items()})
    second = driver.step({name: prompts[name][FIRST.get(name, 0) :] for name in prompts})
    return {name: torch.cat([*([first[name]] if name in first else []), second[name]]) for name in prompts}


def compute_all(expected: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: compute_expected(expected, make_prompt(length, seed))
        for seed, (name, length) in enumerate(LENGTHS.items())
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_of_a_mixed_batch_equal_transformers(variant: str, architecture: str) -> None:
    expected, model = load_pair(variant, architecture)
    actual = run_mixed(model)
    for name, logits in compute_all(expected).items():
        torch.testing.assert_close(actual[name], logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "quantization", "least"),
    [(torch.bfloat16, None, 0.995), (torch.float32, "int8", 0.99), (torch.bfloat16, "int8", 0.985)],
)
def test_rounded_logits_point_where_transformers_do(
    variant: str, dtype: torch.dtype, quantization: Quantization | None, least: float
) -> None:
    """Cosine similarity of each row of logits; the weights are wide and random, real ones lie closer."""
    expected, model = load_pair(variant, "native", dtype, quantization)
    actual = run_mixed(model)
    for name, logits in compute_all(expected).items():
        similarity = torch.cosine_similarity(actual[name], logits, dim=-1)
        assert similarity.min() > least


def test_int4_logits_are_those_of_torchs_slow_form(tmp_path: Path) -> None:
    """A sum that differs in its last bit may round the next activation to another byte."""
    source, model = load_pair("qwen3", quantization="int4")
    slow = load_model(save(source, tmp_path), quantization="int4")
    actual, expected = run_mixed(model), run_mixed(slow)
    for name, logits in expected.items():
        assert torch.cosine_similarity(actual[name], logits, dim=-1).min() > 0.998


def test_logits_of_a_bfloat16_model_are_not_rounded_to_it() -> None:
    _, model = load_pair("qwen3", dtype=torch.bfloat16)
    hidden = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = model.compute_logits(hidden)
    assert logits.dtype == torch.float32
    expected = hidden.double() @ model.embed_tokens.double().T
    torch.testing.assert_close(logits.double(), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["llama-biased", "qwen3-layer-types"])
def test_one_call_gives_the_bits_of_the_single_ops(
    variant: str, dtype: torch.dtype, quantization: Quantization | None, kv_dtype: torch.dtype | None
) -> None:
    _, model = load_pair(variant, "native", dtype, quantization)
    fused = run_mixed(model, kv_dtype)
    try:
        model.ops = dataclasses.replace(model.ops, run_layers=None)
        single = run_mixed(model, kv_dtype)
    finally:
        model.ops = make_ops()
    assert all(torch.equal(fused[name], single[name]) for name in fused)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_logits_are_the_same_bits_alone_and_in_a_batch_chunked_or_not(
    kv_dtype: torch.dtype | None, architecture: str, dtype: torch.dtype, quantization: Quantization | None
) -> None:
    _, model = load_pair("qwen3", architecture, dtype, quantization)
    together = run_mixed(model, kv_dtype)
    for seed, (name, length) in enumerate(LENGTHS.items()):
        prompt = make_prompt(length, seed)
        alone = Driver(model, kv_dtype=kv_dtype).step({"alone": prompt})["alone"]
        assert torch.equal(alone, together[name])


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3"])
def test_logits_over_an_int8_cache_point_where_transformers_do(variant: str) -> None:
    expected, model = load_pair(variant)
    actual = run_mixed(model, torch.int8)
    for name, logits in compute_all(expected).items():
        assert torch.cosine_similarity(actual[name], logits, dim=-1).min() > 0.998


def test_a_new_cache_or_new_weights_are_noticed() -> None:
    expected, model = load_pair("qwen3")
    prompt = make_prompt(50)
    for block_size in (1, 5, 64):
        driver = Driver(model, block_size=block_size)
        driver.step({"a": prompt[:20]})
        logits = driver.step({"a": prompt[20:]})["a"]
        torch.testing.assert_close(logits, compute_expected(expected, prompt)[20:], atol=2e-4, rtol=0)


def test_caches_die_with_their_owner() -> None:
    """They are most of the memory, and an engine that sleeps gives it back."""
    _, model = load_pair("qwen3")
    driver = Driver(model)
    driver.step({"a": make_prompt(5)})
    caches = [weakref.ref(cache) for pair in driver.kv_caches for cache in pair]
    assert all(cache() is not None for cache in caches)
    del driver
    assert all(cache() is None for cache in caches)


def test_a_model_moves_from_torch_to_native_ops_between_two_steps(tmp_path: Path) -> None:
    expected = make_transformers_model("qwen3")
    model = load_model(save(expected, tmp_path))
    prompt = make_prompt(100)
    driver = Driver(model)
    first = driver.step({"a": prompt[:60]})["a"]
    with torch.inference_mode():
        assert all(step is None for step in model.repack(make_ops()))
    second = driver.step({"a": prompt[60:]})["a"]
    assert model.ops.name == "native"
    torch.testing.assert_close(
        torch.cat([first, second]), compute_expected(expected, prompt), atol=2e-4, rtol=0
    )


def test_wrong_operands_are_refused() -> None:
    _, model = load_pair("qwen3")
    driver = Driver(model)
    driver.kv_caches = [(k.double(), v) for k, v in driver.kv_caches]
    with pytest.raises(AssertionError, match="a cache must be"):
        driver.step({"a": make_prompt(5)})
