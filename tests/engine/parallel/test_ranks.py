"""Ranks in processes: the same texts as one rank, and a rank that ends."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from engine import LLM, Engine, EngineConfig, SamplingParams
from engine.config_fields import DEMO_MODEL
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
EAGLE = {"method": ["ngram", "eagle"], "model": f"{DEMO_MODEL}/eagle", "num_speculative_tokens": 3}


def find_processes(module: str, parent: int) -> list[int]:
    """The children of a process that run a module."""
    listings = Path(f"/proc/{parent}/task").glob("*/children")
    children = [int(child) for listing in listings for child in listing.read_text().split()]
    return [child for child in children if module.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]


def signal_rank(parent: int, number: signal.Signals) -> None:
    (rank,) = find_processes("engine.parallel.rank_process", parent)
    os.kill(rank, number)


async def generate(engine: Engine, params: SamplingParams) -> list[int]:
    return [output async for output in engine.generate("Once", params)][-1].outputs[0].token_ids


def test_drafts_change_no_text_of_ranks() -> None:
    """Drafters run on rank 0, with its copy of the embedding and the divided head."""
    prompts, texts = ["Hello! Who are you?", "What can you do?"], []
    chats = [[{"role": "user", "content": each}] for each in prompts]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=40) for t in (0.0, 1.0)]
    for changes in (
        {"batch_invariant_tp": True},
        {"tensor_parallel_size": 2, "speculative_config": EAGLE},
        {"batch_invariant_tp": True, "pipeline_parallel_size": 2, "speculative_config": EAGLE},
    ):
        with LLM(core="local", num_blocks=200, attention_backend="native", **changes) as llm:
            outputs = llm.chat(chats, params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1] == texts[2]


async def test_requests_go_on_when_a_rank_is_killed(make_config: MakeConfig) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    async with Engine(make_config(core="process", tensor_parallel_size=2)) as engine:
        expected = await generate(engine, params)
        (core,) = find_processes("engine.cluster.core_process", os.getpid())
        signal_rank(core, signal.SIGSTOP)  # so that the next step does not end
        reading = asyncio.ensure_future(generate(engine, params))
        await wait_until(lambda: engine.stats().num_running == 1)
        signal_rank(core, signal.SIGKILL)
        assert await reading == expected
        assert engine.stats().num_resumed == 1


async def test_a_core_of_this_process_loads_new_ranks_after_one_is_killed(make_config: MakeConfig) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    async with Engine(make_config(core="local", tensor_parallel_size=2)) as engine:
        expected = await generate(engine, params)
        signal_rank(os.getpid(), signal.SIGKILL)
        assert await generate(engine, params) == expected
        assert engine.stats().num_restarts == 1
