"""Cores that exchange KV blocks: texts stay the same, whatever comes, is damaged, late or missing.

The family qwen3 has no states, qwen3_5 has.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
KEY = "a secret of the replicas"
PROMPTS = [[5 + (number * 37 + at * (number + 3)) % 300 for at in range(100)] for number in range(4)]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=1)
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 48, "kv_offload_gb": 0.01}


def describe(connector: str, role: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": role, "kv_buffer_size": 2**24, **more}


async def run(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """Tokens, logprobs, and cached tokens of each prompt, all at once."""

    async def run_one(prompt: list[int]) -> Any:
        outputs = [output async for output in engine.generate({"prompt_token_ids": prompt}, PARAMS)]
        return outputs[-1]

    return list(await asyncio.gather(*map(run_one, prompts)))


def list_texts(outputs: list[Any]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


async def run_alone(make_config: MakeConfig, **more: Any) -> list[Any]:
    async with Engine(make_config(**SMALL | more)) as engine:
        return list_texts(await run(engine))


@pytest.mark.parametrize(("kind", "family"), [("FileConnector", "qwen3_5"), ("TcpConnector", "qwen3")])
async def test_a_second_engine_finds_the_blocks_of_the_first(
    make_config: MakeConfig, tmp_path: Path, kind: str
) -> None:
    expected = await run_alone(make_config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        more: dict[str, Any] = {"kv_port": free.getsockname()[1]}
    if kind == "FileConnector":
        more["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    async with AsyncExitStack() as stack:
        settings = SMALL | {"data_parallel_key": KEY}
        config = make_config(**settings, kv_transfer_config=describe(kind, "kv_producer", **more))
        first = await stack.enter_async_context(Engine(config))
        assert list_texts(await run(first)) == expected
        await wait_until(lambda: first.stats().kv_saved_tokens == 4 * 96)
        config = make_config(**settings, kv_transfer_config=describe(kind, "kv_consumer", **more))
        second = await stack.enter_async_context(Engine(config))
        outputs = await run(second)
        assert list_texts(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [96] * 4
        assert second.stats().kv_received_tokens == 4 * 96
        assert second.stats().kv_saved_tokens == 0


@pytest.mark.parametrize(
    ("first_size", "second_size", "family"),
    [pytest.param(16, 32, "qwen3", marks=pytest.mark.soak), (32, 16, "qwen3"), (16, 32, "qwen3_5")],
)
async def test_blocks_of_other_sizes_are_exchanged(
    make_config: MakeConfig, tmp_path: Path, first_size: int, second_size: int
) -> None:
    expected = await run_alone(make_config)
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    config = SMALL | {"kv_transfer_config": describe("FileConnector", "kv_both", **extra)}
    async with Engine(make_config(**config, block_size=first_size)) as engine:
        assert list_texts(await run(engine)) == expected
    async with Engine(make_config(**config, block_size=second_size)) as engine:
        outputs = await run(engine)
        assert list_texts(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [96] * 4


@pytest.mark.parametrize(("kind", "family"), [("DictConnector", "qwen3_5"), ("LateConnector", "qwen3")])
async def test_a_connector_of_somebody_else_may_fail(make_config: MakeConfig, kind: str) -> None:
    expected = await run_alone(make_config)
    more = {"kv_connector_module_path": "tests.engine.transfer.other_connectors"}
    config = make_config(**SMALL, num_blocks=20, max_num_seqs=1, kv_transfer_config=describe(kind, "kv_both", **more))
    async with Engine(config) as engine:
        for _ in range(2):
            assert list_texts(await run(engine)) == expected
        assert (engine.stats().kv_saved_tokens > 0) == (kind == "DictConnector")
        assert engine.stats().kv_received_tokens == 0  # evicted blocks are in the tier


def damage(folder: Path) -> None:
    """Flip bytes in the second half of the only file."""
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content), 2000):
        content[at] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.soak), "qwen3_5"])
async def test_damaged_blocks_are_computed(make_config: MakeConfig, tmp_path: Path) -> None:
    expected = await run_alone(make_config)
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    config = make_config(**SMALL, kv_transfer_config=describe("FileConnector", "kv_both", **extra))
    async with Engine(config) as engine:
        await run(engine)
        await wait_until(lambda: engine.stats().kv_saved_tokens == 4 * 96)
    damage(tmp_path)
    async with Engine(config) as engine:
        outputs = await run(engine)
        assert list_texts(outputs) == expected
        assert engine.stats().kv_received_tokens < 4 * 96
        await wait_until(lambda: engine.stats().kv_saved_tokens > 0)


async def test_ranks_exchange_their_heads(make_config: MakeConfig, tmp_path: Path) -> None:
    """Four ranks hold two KV heads, each of them twice."""
    settings = SMALL | {"batch_invariant_tp": True}
    expected = await run_alone(make_config, batch_invariant_tp=True)
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    settings |= {"kv_transfer_config": describe("FileConnector", "kv_both", **extra)}
    for size, num_cached in ((2, 0), (4, 96), (1, 96)):
        async with Engine(make_config(**settings, tensor_parallel_size=size)) as engine:
            outputs = await run(engine)
            assert list_texts(outputs) == expected
            assert [output.num_cached_tokens for output in outputs] == [num_cached] * 4


async def test_blocks_of_other_arithmetic_are_not_found(make_config: MakeConfig, tmp_path: Path) -> None:
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    settings = SMALL | {"kv_transfer_config": describe("FileConnector", "kv_both", **extra)}
    for is_sliced in (True, False):
        async with Engine(make_config(**settings, batch_invariant_tp=is_sliced)) as engine:
            assert [output.num_cached_tokens for output in await run(engine)] == [0] * 4
