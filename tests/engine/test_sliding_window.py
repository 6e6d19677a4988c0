"""A model whose layers all have a sliding window: the tokens of transformers, in as many blocks as the window needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine import LLM, Engine, EngineConfig, SamplingParams
from tests.engine.model.drive import make_prompt, make_transformers_model, save

WINDOW, BLOCK = 64, 16
SHARED = make_prompt(150, seed=1)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_transformers_model(
        "mistral", sliding_window=WINDOW, max_position_embeddings=4096, eos_token_id=None
    )


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("mistral"))


async def test_two_thousand_tokens_take_the_blocks_of_one_window(
    model: PreTrainedModel, folder: Path
) -> None:
    prompt, most, token_ids = make_prompt(200), 0, []
    config = EngineConfig(str(folder), skip_tokenizer_init=True, num_blocks=300, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, output_kind="delta")
    async with Engine(config) as engine:
        async for output in engine.generate(prompt, params):
            token_ids += output.outputs[0].token_ids
            stats = engine.stats()
            if len(token_ids) > BLOCK:
                most = max(most, stats.num_blocks - stats.num_free_blocks)
    # A window may begin in the middle of a block, and a block is taken before the tokens in flight have come back.
    assert most <= WINDOW // BLOCK + 2
    greedy = GenerationConfig(max_new_tokens=400, do_sample=False, pad_token_id=0)
    expected = model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :]
    assert token_ids[:400] == expected.tolist()
    assert len(token_ids) == 2000


def run(folder: Path, **settings: Any) -> tuple[list[list[int]], int]:
    """Tokens of some requests that share prefixes, and the number of preemptions. Twice, so that the cache has hits."""
    long = [SHARED + make_prompt(length, length) for length in (10, 40, 90)]
    prompts = long + [make_prompt(length, length) for length in range(20, 30)]
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=70, ignore_eos=True)
        for number in range(len(prompts))
    ]
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, max_model_len=352, **settings) as llm:
        first, second = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
        stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.prefix_cache_hits > 0) == settings["enable_prefix_caching"]
    tokens = [output.outputs[0].token_ids for output in second]
    assert tokens == [output.outputs[0].token_ids for output in first]
    return tokens, stats.num_preemptions


def test_hits_chunks_and_preemption_change_no_token(folder: Path) -> None:
    plain = {"enable_chunked_prefill": False, "enable_overlap": False, "enable_native_ops": False}
    expected, _ = run(folder, num_blocks=400, enable_prefix_caching=False, **plain)
    tokens, num_preemptions = run(
        folder, num_blocks=24, enable_prefix_caching=True, max_num_batched_tokens=40, max_num_seqs=8
    )
    assert tokens == expected
    assert num_preemptions > 0
