"""Models whose layers have sliding windows, all or three of four: transformers' tokens, in few blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from engine import LLM, ConfigError, Engine, EngineConfig, SamplingParams
from tests.engine.model.drive import make_prompt, make_transformers_model, save

WINDOW, BLOCK, NUM_TOKENS = 64, 16, 150
SHARED = make_prompt(150, seed=1)


# Number of layers: those of OLMo 3 are three with a window and one without, in four groups of one layer.
FAMILIES = {"mistral": 2, "olmo3": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> PreTrainedModel:
    sizes = {"num_hidden_layers": FAMILIES[family], "max_position_embeddings": 4096}
    return make_transformers_model(family, sliding_window=WINDOW, eos_token_id=None, **sizes)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("windows"))


def generate_greedily(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    greedy = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    found = model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :]
    return [int(token_id) for token_id in found]


async def test_a_long_answer_takes_the_blocks_of_one_window(
    family: str, model: PreTrainedModel, folder: Path
) -> None:
    prompt, most, token_ids = make_prompt(200), 0, []
    num_windows, num_full = {"mistral": (1, 0), "olmo3": (3, 1)}[family]
    config = EngineConfig(str(folder), skip_tokenizer_init=True, num_blocks=600, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind="delta")
    async with Engine(config) as engine:
        async for output in engine.generate(prompt, params):
            token_ids += output.outputs[0].token_ids
            stats = engine.stats()
            if len(token_ids) > BLOCK:
                used = stats.num_blocks - stats.num_free_blocks
                most = max(most, used - num_full * -(-(len(prompt) + len(token_ids)) // BLOCK))
    # A window may begin in the middle of a block, and a block is taken before the tokens in flight have come back.
    assert most <= num_windows * (WINDOW // BLOCK + 2) + num_full
    assert token_ids == generate_greedily(model, prompt, NUM_TOKENS)


def test_a_prompt_needs_blocks_for_its_chunks_only(family: str, model: PreTrainedModel, folder: Path) -> None:
    """All layers would need 63 blocks in each group; the window's groups have 8 at most."""
    prompt, num_blocks = make_prompt(1000), {"mistral": 10, "olmo3": 1 + 64 + 3 * 9}[family]
    settings = {"max_num_batched_tokens": 64, "max_model_len": 1024, "num_blocks": num_blocks}
    with LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **settings) as llm:
        outputs = llm.generate([prompt] * 2, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    expected = generate_greedily(model, prompt, 20)
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 2


def run(folder: Path, **settings: Any) -> tuple[list[list[int]], int]:
    """Tokens of some requests that share prefixes, and the number of preemptions. Twice, so that the cache has hits."""
    long = [SHARED + make_prompt(length, length) for length in (10, 40, 90)]
    prompts = long + [make_prompt(length, length) for length in range(20, 26)]
    params = [
        SamplingParams(temperature=number % 2, seed=number, max_tokens=50, ignore_eos=True)
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


@pytest.fixture(scope="module")
def plain_tokens(folder: Path) -> list[list[int]]:
    plain = {"enable_chunked_prefill": False, "enable_overlap": False, "enable_native_ops": False}
    return run(folder, num_blocks=400, enable_prefix_caching=False, **plain)[0]


def test_hits_chunks_and_preemption_change_no_token(
    family: str, folder: Path, plain_tokens: list[list[int]]
) -> None:
    tokens, num_preemptions = run(
        folder,
        num_blocks={"mistral": 24, "olmo3": 60}[family],
        enable_prefix_caching=True,
        max_num_batched_tokens=40,
        max_num_seqs=8,
    )
    assert tokens == plain_tokens
    assert num_preemptions > 0


def test_a_draft_model_changes_no_token_and_needs_a_layer_without_a_window(
    family: str, folder: Path, plain_tokens: list[list[int]]
) -> None:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    settings: dict[str, Any] = {"num_blocks": 90, "enable_prefix_caching": True, "max_num_seqs": 8}
    if family == "mistral":
        with pytest.raises(ConfigError, match="needs a target with layers that attend to all tokens"):
            run(folder, speculative_config=config, **settings)
        return
    assert run(folder, speculative_config=config, **settings)[0] == plain_tokens
