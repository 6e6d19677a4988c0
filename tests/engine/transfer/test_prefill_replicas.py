"""Prefill and decode in different replicas: the same texts as one core, whatever happens to the producer."""

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.cluster.fault_run import send_signal
from tests.engine.mixed_requests import ROOMY, Completion, make_mixed_requests, run_mixed
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
REQUESTS = make_mixed_requests()


def make_pair(make_config: MakeConfig, kind: str, tmp_path: Path, **more: Any) -> EngineConfig:
    extra: dict[str, Any] = {"prefill_replicas": 1, "min_prefill_tokens": 32}
    if kind == "FileConnector":
        extra["shared_storage_path"] = str(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": kind, "kv_buffer_size": 2**24, "kv_port": port, "kv_connector_extra_config": extra,
    }  # fmt: skip
    settings = ROOMY | {
        "max_num_batched_tokens": 32, "data_parallel_size": 2, "data_parallel_key": "a secret of the replicas",
        "kv_offload_gb": 0.02,
    }
    return make_config(**settings | more, kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("SharedMemoryConnector", "qwen3_5"),  # a family with states
        pytest.param("FileConnector", "qwen3", marks=pytest.mark.soak),
        pytest.param("TcpConnector", "qwen3", marks=pytest.mark.soak),
    ],
)
async def test_texts_are_those_of_one_core(
    make_config: MakeConfig, tmp_path: Path, kind: str, mixed_answers: list[list[Completion]]
) -> None:
    async with Engine(make_pair(make_config, kind, tmp_path)) as engine:
        assert await run_mixed(engine, REQUESTS) == mixed_answers
        stats = engine.stats()
        assert stats.num_prefills > 5
        assert stats.kv_received_tokens > 500
        # The decode replica computes little of the prompts, and the prefill replica no answer.
        prefill, decode = engine.replicas
        assert prefill.stats.kv_saved_tokens > 500
        assert decode.stats.kv_saved_tokens == 0


async def test_a_dead_or_silent_producer_is_not_waited_for(
    make_config: MakeConfig, tmp_path: Path, mixed_answers: list[list[Completion]]
) -> None:
    config = make_pair(make_config, "SharedMemoryConnector", tmp_path, heartbeat_timeout_s=3.0)
    async with Engine(config) as engine:
        for sent in (signal.SIGKILL, signal.SIGSTOP):
            answers = asyncio.ensure_future(run_mixed(engine, REQUESTS))
            num_before = engine.stats().num_prefills
            await wait_until(lambda n=num_before: engine.stats().num_prefills > n + 2)
            assert not answers.done()
            send_signal(engine, 0, sent)
            assert await answers == mixed_answers
            await wait_until(lambda: engine.replicas[0].state == "ready")
            await engine.reset_prefix_cache()
        assert not engine._client._prefills
