"""Logits of the oldest families against transformers: prefill, chunks over shuffled pages, decode, mixed batches."""

from itertools import product

import pytest
import torch

from engine.model import DecoderModel, ModelConfig
from engine.model.attn_metadata import AttnMetadata
from kernels.ops import Quantization
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model
from tests.engine.model.mixed_batch import VARIANTS, compute_all, load_pair, run_mixed
from tests.kernels.cpu.conftest import ARCHITECTURES


def assert_logits_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


LONG_CHUNKS = ([1, 16, 15, 200, 17, 51], [290, *[1] * 10])
OTHER_CHUNKS = ([1], [2], [16], [63], [600], [100] * 3)


@pytest.mark.parametrize(
    ("variant", "chunks"),
    [*product(VARIANTS, LONG_CHUNKS), *product(("llama", "qwen3-layer-types"), OTHER_CHUNKS)],
    ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value)),
)
def test_prefill_at_once_and_in_chunks_then_decode(variant: str, chunks: list[int]) -> None:
    expected, model = load_pair(variant, "torch")
    prompt = make_prompt(sum(chunks))
    driver = Driver(model)
    parts = [driver.step({"a": part.tolist()})["a"] for part in torch.tensor(prompt).split(chunks)]
    assert_logits_equal(torch.cat(parts), compute_expected(expected, prompt))


MIXED = ("llama", "llama-tied-biased", "llama-no-groups", "mistral-window", "qwen2", "qwen3", "qwen3-layer-types")


@pytest.mark.parametrize("ops", ["torch", *ARCHITECTURES])
@pytest.mark.parametrize("variant", MIXED)
def test_logits_of_a_mixed_batch_equal_transformers(variant: str, ops: str) -> None:
    expected, model = load_pair(variant, ops)
    actual = run_mixed(model)
    for name, logits in compute_all(expected).items():
        assert_logits_equal(actual[name], logits)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "quantization", "least"),
    [(torch.bfloat16, None, 0.995), (torch.float32, "int8", 0.99), (torch.bfloat16, "int8", 0.985)],
)
def test_rounded_logits_point_where_transformers_do(
    variant: str, ops: str, dtype: torch.dtype, quantization: Quantization | None, least: float
) -> None:
    """Cosine similarity of each row of logits; the weights are wide and random, real ones lie closer."""
    expected, model = load_pair(variant, ops, dtype, quantization)
    actual = run_mixed(model)
    for name, logits in compute_all(expected).items():
        assert actual[name].dtype == torch.float32
        assert torch.cosine_similarity(actual[name], logits, dim=-1).min() > least
        assert quantization is None or (actual[name] - logits).abs().max() > 0.01, "int8 rounds"


def test_request_reads_a_block_that_another_fills_in_the_same_step() -> None:
    expected, model = load_pair("llama", "torch")
    prompt = make_prompt(20)
    driver = Driver(model)
    shared = driver.free_blocks.pop()
    driver.block_tables = {"reader": [shared], "writer": [shared]}
    driver.num_computed = {"reader": 16, "writer": 0}
    logits = driver.step({"reader": prompt[16:], "writer": prompt[:16]})
    assert_logits_equal(logits["reader"], compute_expected(expected, prompt)[16:])


def test_forward_reads_no_value_back_from_the_device() -> None:
    """Meta tensors have no values: a forward over them that finishes never waited for one."""
    meta = torch.device("meta")
    config = ModelConfig.from_dict(make_transformers_model("qwen3").config.to_dict())
    model = DecoderModel(config, torch.float32, meta)
    query_lens, seq_lens = [1, 1, 4, 300], [20, 700, 9, 400]
    cache = torch.empty((200, 16, 2, 16), device=meta)
    slots, tables, starts, lens = (
        torch.empty(shape, dtype=dtype, device=meta)
        for shape, dtype in (((1, 306), torch.int64), ((1, 4, 44), torch.int32), (5, torch.int32), (4, torch.int32))
    )
    metadata = AttnMetadata(slots, tables, starts, lens, query_lens, seq_lens)
    ids = torch.empty(306, dtype=torch.int64, device=meta)
    hidden = model(ids, ids, [(cache, cache)] * 3, metadata)
    assert model.compute_logits(hidden).shape == (306, config.vocab_size)
