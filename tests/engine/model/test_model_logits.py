"""Logits of every family against transformers: prefill, chunks over shuffled pages, decode, mixed batches."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.model import DecoderModel, ModelConfig, load_model
from engine.worker.attn_metadata import AttnMetadata
from tests.engine.model.drive import (
    Driver,
    compute_expected,
    make_prompt,
    make_transformers_model,
    save,
)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-derived": ("llama", {"head_dim": None}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-last-layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased-one-kv-head": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
FAMILIES = ["llama", "mistral-window", "qwen2", "qwen3"]


@functools.cache
def load_pair(variant: str) -> tuple[PreTrainedModel, DecoderModel]:
    family, overrides = VARIANTS[variant]
    expected = make_transformers_model(family, **overrides)
    with tempfile.TemporaryDirectory() as folder:
        return expected, load_model(save(expected, Path(folder)))


def assert_logits_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 16, 63, 600])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_at_once(variant: str, length: int) -> None:
    expected, model = load_pair(variant)
    prompt = make_prompt(length)
    logits = Driver(model).step({"a": prompt})["a"]
    assert logits.dtype == torch.float32
    assert_logits_equal(logits, compute_expected(expected, prompt))


@pytest.mark.parametrize("chunks", [[100] * 3, [1, 16, 15, 200, 17, 51], [290, *[1] * 10]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_chunks_then_decode(variant: str, chunks: list[int]) -> None:
    expected, model = load_pair(variant)
    prompt = make_prompt(300)
    driver = Driver(model)
    parts = []
    for length in chunks:
        start = sum(map(len, parts))
        parts.append(driver.step({"a": prompt[start : start + length]})["a"])
    assert_logits_equal(torch.cat(parts), compute_expected(expected, prompt))


@pytest.mark.parametrize("variant", FAMILIES)
def test_mixed_batch_of_decode_chunks_and_prefill(variant: str) -> None:
    expected, model = load_pair(variant)
    lengths = {"decode": 90, "short": 3, "chunk": 200, "fresh": 120, "draft": 40, "long": 400}
    prompts = {name: make_prompt(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    driver = Driver(model)
    first = {"decode": 89, "short": 2, "chunk": 100, "draft": 35, "long": 399}
    driver.step({name: prompts[name][:count] for name, count in first.items()})
    logits = driver.step({name: prompts[name][first.get(name, 0) :] for name in prompts})
    for name, prompt in prompts.items():
        assert_logits_equal(logits[name], compute_expected(expected, prompt)[first.get(name, 0) :])


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_equal(variant: str) -> None:
    expected, model = load_pair(variant)
    texts = {name: make_prompt(length, length) for name, length in (("a", 5), ("b", 70), ("c", 33))}
    driver = Driver(model)
    logits = driver.step(texts)
    for _ in range(25):
        new = {name: [int(rows[-1].argmax())] for name, rows in logits.items()}
        for name, text in texts.items():
            assert new[name] == [int(compute_expected(expected, text)[-1].argmax())]
            text.extend(new[name])
        logits = driver.step(new)


def test_request_reads_a_block_that_another_fills_in_the_same_step() -> None:
    expected, model = load_pair("llama")
    prompt = make_prompt(20)
    driver = Driver(model)
    shared = driver.free_blocks.pop()
    driver.block_tables = {"reader": [shared], "writer": [shared]}
    driver.num_computed = {"reader": 16, "writer": 0}
    logits = driver.step({"reader": prompt[16:], "writer": prompt[:16]})
    assert_logits_equal(logits["reader"], compute_expected(expected, prompt)[16:])


def test_block_size_does_not_matter() -> None:
    expected, model = load_pair("qwen3")
    prompt = make_prompt(50)
    for block_size in (1, 5, 64):
        driver = Driver(model, block_size=block_size)
        driver.step({"a": prompt[:20]})
        assert_logits_equal(driver.step({"a": prompt[20:]})["a"], compute_expected(expected, prompt)[20:])


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    expected, _ = load_pair("qwen3")
    model = load_model(save(expected, tmp_path), dtype=torch.bfloat16)
    prompt = make_prompt(100)
    driver = Driver(model)
    parts = [driver.step({"a": prompt[:60]})["a"], driver.step({"a": prompt[60:]})["a"]]
    logits = torch.cat(parts)
    assert logits.dtype == torch.float32
    similarity = torch.cosine_similarity(logits, compute_expected(expected, prompt), dim=-1)
    assert similarity.min() > 0.995


def test_forward_reads_no_value_back_from_the_device() -> None:
    """Meta tensors have no values: a forward over them that finishes never waited for one."""
    meta = torch.device("meta")
    config = ModelConfig.from_dict(make_transformers_model("qwen3").config.to_dict())
    model = DecoderModel(config, torch.float32, meta)
    query_lens, seq_lens = [1, 1, 4, 300], [20, 700, 9, 400]
    cache = torch.empty((200, 16, 2, 16), device=meta)
    metadata = AttnMetadata(
        slot_mapping=torch.empty(306, dtype=torch.int64, device=meta),
        block_tables=torch.empty(4, 44, dtype=torch.int32, device=meta),
        query_start_loc=torch.empty(5, dtype=torch.int32, device=meta),
        seq_lens=torch.empty(4, dtype=torch.int32, device=meta),
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
    )
    ids = torch.empty(306, dtype=torch.int64, device=meta)
    hidden = model(ids, ids, [(cache, cache)] * 3, metadata)
    assert model.compute_logits(hidden).shape == (306, config.vocab_size)
