"""Replicas that connect by TCP: authentication, equal texts, lost connections."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine import ConfigError, Engine, EngineConfig
from engine.cluster.remote import RemoteListener, serve_replica
from engine.wire.frames import Link
from engine.wire.handshake import make_proof
from engine.wire.link_messages import PROTOCOL_VERSION, Greeting
from tests.engine.mixed_requests import ROOMY, Completion, make_mixed_requests, run_mixed
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]
KEY = "a key of the cluster"


@asynccontextmanager
async def serve_remotely(config: EngineConfig, num_replicas: int, key: str = KEY) -> AsyncIterator[Engine]:
    """An engine of which every replica connects by TCP; the replicas run in this process, too."""
    front = replace(
        config,
        data_parallel_size=num_replicas,
        data_parallel_size_local=0,
        data_parallel_rpc_port=0,
        data_parallel_key=KEY,
    )
    engine = Engine(front)
    starting = asyncio.ensure_future(engine.start())
    await wait_until(lambda: starting.done() or (engine.listener is not None and engine.listener.port != 0))
    assert engine.listener is not None
    port = engine.listener.port
    headless = [
        asyncio.ensure_future(
            serve_replica(replace(front, data_parallel_rank=rank, data_parallel_rpc_port=port, data_parallel_key=key))
        )
        for rank in range(num_replicas)
    ]
    try:
        await asyncio.wait([starting, *headless], return_when=asyncio.FIRST_COMPLETED)
        for task in headless:
            if task.done():
                task.result()
        yield engine
    finally:
        for task in (starting, *headless):
            task.cancel()
        await asyncio.wait([starting, *headless])
        await engine.close()


async def test_a_cut_connection_changes_no_text(
    make_config: MakeConfig, mixed_answers: list[list[Completion]]
) -> None:
    requests = make_mixed_requests()
    async with serve_remotely(make_config(**ROOMY), 2) as engine:
        answers = asyncio.ensure_future(run_mixed(engine, requests))
        for num_tokens in (100, 300, 500):
            await wait_until(lambda n=num_tokens: answers.done() or engine.stats().generation_tokens > n)
            engine.replicas[num_tokens % 2].restart()
        assert await answers == mixed_answers
        assert engine.stats().num_resumed > 0


async def test_a_replica_with_another_key_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="data_parallel_key differs"):
        async with serve_remotely(make_config(), 1, key="another key entirely"):
            pass


@pytest.mark.parametrize(
    ("version", "rank", "problem"),
    [
        (
            PROTOCOL_VERSION + 1, 0,
            f"speaks version {PROTOCOL_VERSION + 1} of the protocol, and the server {PROTOCOL_VERSION}",
        ),
        (PROTOCOL_VERSION, 7, r"data_parallel_rank=7 must be one of \[0\]"),
    ],
)
async def test_a_greeting_that_does_not_fit_is_answered_with_the_reason(
    version: int, rank: int, problem: str
) -> None:
    async with open_link() as link:
        challenge = await link.receive()
        nonce = b"n" * 32
        link.send(Greeting(version, rank, nonce, make_proof(KEY, f"replica {rank}", challenge.nonce, nonce)))
        assert re.search(problem, (await link.receive()).error)


async def test_bytes_that_are_no_greeting_end_the_connection() -> None:
    async with open_link() as link:
        await link.receive()
        link._writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await link.receive()


@asynccontextmanager
async def open_link() -> AsyncIterator[Link]:
    """A connection to a listener for rank 0."""
    listener = RemoteListener("127.0.0.1", 0, KEY, publishes_kv_events=False, heartbeat_timeout_s=20.0)
    listener.make_connector(0)
    await listener.start()
    link = Link(*await asyncio.open_connection("127.0.0.1", listener.port))
    try:
        yield link
    finally:
        link.abort()
        listener.close()
        for _ in range(3):  # both ends are notified in the loop's next iterations
            await asyncio.sleep(0)
