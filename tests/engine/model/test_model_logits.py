"""Logits of every family against transformers: prefill, chunks over shuffled pages, decode, mixed batches.

Tolerances on models of random weights, worst token of every batch: float32 1e-4 absolute; bfloat16 a cosine of 0.995;
int8, alone or with bfloat16, 0.985.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model import DecoderModel, ModelConfig, load_model
from engine.model.attn_metadata import AttnMetadata
from kernels import Ops
from kernels import torch as torch_ops
from kernels.cpu import make_native_ops
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.kernels.cpu.conftest import require_library

WINDOW = {"use_sliding_window": True, "sliding_window": 33}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-derived": ("llama", {"head_dim": None}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-last-layers": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased-one-kv-head": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-layer-types": (
        "qwen3",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
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


@pytest.mark.parametrize(
    "chunks",
    [[1], [2], [16], [63], [600], [100] * 3, [1, 16, 15, 200, 17, 51], [290, *[1] * 10]],
    ids=lambda chunks: "+".join(map(str, chunks)),
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_at_once_and_in_chunks_then_decode(variant: str, chunks: list[int]) -> None:
    expected, model = load_pair(variant)
    prompt = make_prompt(sum(chunks))
    driver = Driver(model)
    parts = [driver.step({"a": part.tolist()})["a"] for part in torch.tensor(prompt).split(chunks)]
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


PROMPTS = {name: make_prompt(n, n) for name, n in {"decode": 90, "chunk": 200, "fresh": 33, "one": 1}.items()}
FLOAT, BRAIN = torch.float32, torch.bfloat16
Kind = tuple[torch.dtype, Literal["int8"] | None]
MIN_COSINE: dict[Kind, float] = {(BRAIN, None): 0.995, (FLOAT, "int8"): 0.985, (BRAIN, "int8"): 0.985}


def run_mixed(driver: Driver) -> dict[str, Tensor]:
    """A decode step, the second chunk of a prompt, a whole prompt and a single token, all in one step."""
    driver.step({"decode": PROMPTS["decode"][:89], "chunk": PROMPTS["chunk"][:100]})
    rest = {"decode": PROMPTS["decode"][89:], "chunk": PROMPTS["chunk"][100:]}
    return driver.step(rest | {"fresh": PROMPTS["fresh"], "one": PROMPTS["one"]})


def run_preempted(driver: Driver) -> dict[str, Tensor]:
    """A request loses its blocks after 120 tokens and is computed again beside others."""
    driver.step({"chunk": PROMPTS["chunk"][:120], "decode": PROMPTS["decode"][:50]})
    driver.free_blocks += driver.block_tables.pop("chunk")
    del driver.num_computed["chunk"]
    driver.step({"decode": PROMPTS["decode"][50:89], "fresh": PROMPTS["fresh"]})
    return driver.step({"chunk": PROMPTS["chunk"], "decode": PROMPTS["decode"][89:]})


@pytest.mark.parametrize(
    "kind", [(FLOAT, None), *MIN_COSINE], ids=lambda kind: f"{str(kind[0])[6:]}-{kind[1]}"
)
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_of_every_precision_and_implementation_stay_near_those_of_transformers(
    tmp_path: Path, family: str, is_native: bool, kind: Kind
) -> None:
    reference = make_transformers_model(family)
    ops: Ops = make_native_ops(require_library(), 2) if is_native else torch_ops.make_ops()
    model = load_model(save(reference, tmp_path), dtype=kind[0], ops=ops, quantization=kind[1])
    for run in (run_mixed, run_preempted):
        for name, logits in run(Driver(model)).items():
            expected = compute_expected(reference, PROMPTS[name])[-len(logits) :]
            assert logits.dtype == torch.float32
            if kind in MIN_COSINE:
                cosine = torch.cosine_similarity(logits, expected, dim=-1).min()
                assert cosine > MIN_COSINE[kind], (run.__name__, name)
                assert kind[1] is None or (logits - expected).abs().max() > 0.01, "int8 rounds"
            else:
                assert_logits_equal(logits, expected)


def test_forward_reads_no_value_back_from_the_device() -> None:
    """Meta tensors have no values: a forward over them that finishes never waited for one."""
    meta = torch.device("meta")
    config = ModelConfig.from_dict(make_transformers_model("qwen3").config.to_dict())
    model = DecoderModel(config, torch.float32, meta)
    query_lens, seq_lens = [1, 1, 4, 300], [20, 700, 9, 400]
    cache = torch.empty((200, 16, 2, 16), device=meta)
    slots, tables, starts, lens = (
        torch.empty(shape, dtype=dtype, device=meta)
        for shape, dtype in (
            ((1, 306), torch.int64),
            ((1, 4, 44), torch.int32),
            (5, torch.int32),
            (4, torch.int32),
        )
    )
    metadata = AttnMetadata(slots, tables, starts, lens, query_lens, seq_lens)
    ids = torch.empty(306, dtype=torch.int64, device=meta)
    hidden = model(ids, ids, [(cache, cache)] * 3, metadata)
    assert model.compute_logits(hidden).shape == (306, config.vocab_size)
