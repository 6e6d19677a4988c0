"""Steps from tapes equal those of single ops bit for bit; logits equal those of transformers within tolerances."""

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model import DecoderModel, load_model
from kernels.cpu import tape
from kernels.ops import Quantization
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.engine.model.mixed_batch import LENGTHS, compute_all, find_ops, load_pair, run_mixed
from tests.kernels.cpu.conftest import ARCHITECTURES


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
    expected = hidden.double() @ model.unpack_embedding().double().T
    torch.testing.assert_close(logits.double(), expected, atol=3e-5, rtol=3e-5)


FAMILIES = (
    *("llama", "qwen3", "gemma2", "gemma3", "olmo2", "olmo3", "cohere2", "granite", "phi3", "starcoder2"),
    *("olmoe", "gpt_oss", "qwen2_moe", "glm4_moe", "ministral3", "qwen3_next", "granite4h_moe", "lfm2"),
)


def run_steps(model: DecoderModel, kv_dtype: torch.dtype | None) -> list[Tensor]:
    """Steps of few tokens whose requests, lengths and blocks change, after a long prompt."""
    driver, prompt, found = Driver(model, kv_dtype=kv_dtype), make_prompt(120), []
    driver.step({"b": prompt[:90]})
    batches = [{"a": 4}, {"a": 1, "b": 1}, {"b": 1, "a": 1}, {"b": 2}, {"c": 2}, {"a": 3, "c": 1}, {"b": 4}]
    for batch in batches * 2:
        logits = driver.step({name: prompt[:count] for name, count in batch.items()})
        found += [logits[name] for name in batch]
    return found


KINDS = (
    (torch.float32, None, None), (torch.bfloat16, None, None), (torch.bfloat16, "int8", torch.int8),
    (torch.float32, "int4", torch.int8),
)
PAIRS = [(family, *KINDS[at % 4]) for at, family in enumerate(FAMILIES)]
PAIRS += [(family, *kind) for family in ("qwen3", "olmoe") for kind in KINDS if (family, *kind) not in PAIRS]


@pytest.mark.parametrize(("family", "dtype", "quantization", "kv_dtype"), PAIRS)
def test_a_tape_gives_the_bits_of_the_single_ops(
    family: str,
    dtype: torch.dtype,
    quantization: Quantization | None,
    kv_dtype: torch.dtype | None,
    tmp_path: Path,
) -> None:
    path = save(make_transformers_model(family), tmp_path)
    model = load_model(path, dtype, ops=find_ops(), quantization=quantization)
    assert isinstance(model, DecoderModel)
    taped = run_steps(model, kv_dtype)
    model.ops = dataclasses.replace(model.ops, make_tape=None)
    single = run_steps(model, kv_dtype)
    assert all(torch.equal(*pair) for pair in zip(taped, single, strict=True))


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "quantization"),
    [
        (None, torch.float32, None), (None, torch.bfloat16, None), (torch.int8, torch.float32, None),
        (torch.int8, torch.bfloat16, "int8"), (None, torch.float32, "int8"), (torch.int8, torch.float32, "int4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ARCHITECTURES)
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


def test_a_first_step_does_not_import_the_compiler_of_torch() -> None:
    """torch._dynamo takes 1.6 s; torch wraps methods of its modes in a call that imports it."""
    assert not hasattr(tape._Watcher.__torch_dispatch__, "__wrapped__")


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


def test_wrong_operands_are_refused() -> None:
    _, model = load_pair("qwen3")
    driver = Driver(model)
    driver.kv_caches = [(k.double(), v) for k, v in driver.kv_caches]
    with pytest.raises(AssertionError, match="a cache must be"):
        driver.step({"a": make_prompt(5)})
