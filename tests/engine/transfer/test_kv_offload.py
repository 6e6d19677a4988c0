"""KV blocks in host memory: they save prefill and change no text."""

from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, Engine, EngineConfig, SamplingParams

MakeConfig = Callable[..., EngineConfig]
# A family without states, and one of which some layers have them.
FAMILIES = pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.soak), "qwen3_5"])
# Eight conversations of which the cache holds two.
PROMPTS = [[5 + (number * 37 + at * (number + 3)) % 300 for at in range(100)] for number in range(8)]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=1)
SMALL: dict[str, Any] = {"num_blocks": 17, "max_num_seqs": 1, "max_model_len": 128, "kv_offload_gb": 0.01}


def run_turns(llm: LLM) -> list[Any]:
    """Two turns of every conversation, one after another; tokens and logprobs."""
    found = []
    for turn in range(2):
        for prompt in PROMPTS:
            (output,) = llm.generate([prompt + [7] * turn], PARAMS, use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    return found


def count_loaded(llm: LLM) -> int:
    return llm.stats().kv_offload_loads


@FAMILIES
def test_evicted_blocks_come_back_and_change_no_text(make_llm: Callable[..., LLM]) -> None:
    with make_llm(**SMALL | {"kv_offload_gb": 0.0}) as llm:
        expected = run_turns(llm)
        assert llm.stats().prefix_cache_hits == 0
    with make_llm(**SMALL) as llm:
        assert run_turns(llm) == expected
        assert count_loaded(llm) == llm.stats().prefix_cache_hits == 8 * 96


@FAMILIES
async def test_blocks_outlive_a_sleep(make_config: MakeConfig) -> None:
    async with Engine(make_config(**SMALL)) as engine:
        for level in (1, 2):
            found = [[o async for o in engine.generate(prompt, PARAMS)][-1] for prompt in PROMPTS]
            # The last conversations were in the KV cache only.
            assert {output.num_cached_tokens for output in found[:5]} == {0 if level == 1 else 96}
            await engine.sleep(level)
            await engine.wake_up()


@FAMILIES
async def test_dropped_blocks_do_not_come_back_with_the_next_core(make_config: MakeConfig) -> None:
    async with Engine(make_config(**SMALL)) as engine:
        for prompt in PROMPTS:
            assert [output async for output in engine.generate(prompt, PARAMS)]
        assert await engine.reset_prefix_cache()
        for level in (0, 1):
            if level:
                await engine.sleep(level)
                await engine.wake_up()
            for prompt in PROMPTS[:2]:  # the second step empties the slots
                last = [output async for output in engine.generate(prompt, PARAMS)][-1]
                assert last.num_cached_tokens == 0
