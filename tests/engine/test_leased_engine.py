"""LeasedEngine with a core in a thread of this process in place of another one; tests/app/zero_gpu has processes."""

import asyncio

import pytest

from engine import ConfigError, EngineConfig, LeasedEngine, LeaseRefused, SamplingParams, run_core
from tests.waiting import wait_until

CONFIG = EngineConfig(device="cpu", enable_native_ops=False, num_blocks=256)


async def write(engine: LeasedEngine, seed: int) -> list[int]:
    params = SamplingParams(seed=seed, max_tokens=70, ignore_eos=True)
    tokens: list[int] = []
    async for output in engine.generate([5, 6, 7], params):
        tokens = output.outputs[0].token_ids
    return tokens


async def test_a_request_continues_in_the_next_lease_with_the_same_tokens() -> None:
    async with LeasedEngine(CONFIG, run_core, 600.0) as engine:
        alone = await write(engine, 1)
        writing = asyncio.ensure_future(write(engine, 1))
        for num_tokens in (len(alone) + 15, len(alone) + 40):
            await wait_until(lambda n=num_tokens: engine.stats().generation_tokens > n)
            connection = engine.replicas[0].connection
            assert connection is not None
            connection.abort()
        assert await writing == alone
        assert engine.stats().num_resumed > 0 and engine.state == "ready"


async def test_leases_that_are_of_no_use_end_the_request_that_opens_them() -> None:
    leases: list[float] = []
    async with LeasedEngine(CONFIG, lambda config, seconds: leases.append(seconds), 5.0) as engine:
        with pytest.raises(LeaseRefused, match="3 leases of 5 s ended before they were of use"):
            await write(engine, 1)
        assert leases == [5.0] * 3 and engine.state == "ready"


def test_a_setting_that_needs_a_core_all_the_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_lora=True does not work on a device that is lent"):
        LeasedEngine(EngineConfig(enable_lora=True), run_core, 5.0)
