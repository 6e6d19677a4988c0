"""Clients that come in crowds, leave in crowds, or read too slowly: what was admitted never notices."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, run_server
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not (Path(EngineConfig().model) / "model.safetensors").exists(), reason="the demo model is not here"
)

BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "temperature": 0}


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[Server]:
    config = EngineConfig(num_blocks=256, max_model_len=512, **settings)
    async with Engine(config) as engine, run_server(engine, AppConfig()) as server:
        yield server


async def is_empty(server: Server) -> None:
    """Wait until no request is left, and check that every block is free."""

    def is_idle() -> bool:
        stats = server.engine.stats()
        return not (stats.num_running or stats.num_waiting)

    await wait_until(is_idle, within_s=60)
    stats = server.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


async def test_beyond_its_capacity_a_server_finishes_what_it_took_and_refuses_the_rest_at_once() -> None:
    async with serve(max_num_seqs=2, max_num_waiting=4) as server:
        replies: list[tuple[int, dict[str, str]]] = []

        async def ask() -> None:
            async with server.client.post(server.url + "/v1/completions", json=BODY) as response:
                body = await response.json()
                replies.append((response.status, dict(response.headers)))
                if response.status == 200:
                    assert body["usage"]["completion_tokens"] == 16
                else:
                    assert body["error"]["code"] == "engine_overloaded"

        await asyncio.gather(*[ask() for _ in range(40)])
        statuses = [status for status, _ in replies]
        assert set(statuses) == {200, 503} and statuses.count(200) >= 4
        assert all("Retry-After" in headers for status, headers in replies if status == 503)
        # nobody who was refused waited for one who was served
        assert statuses.index(200) >= statuses.count(503) // 2
        await is_empty(server)


async def test_a_storm_of_aborts_leaves_every_block_free_and_the_next_answer_the_same() -> None:
    async with serve(max_num_seqs=16, max_num_waiting=600) as server:
        _, before = await server.complete(**BODY, model="demo_model")

        async def leave(number: int) -> None:
            body = BODY | {"stream": True, "max_tokens": 400, "prompt": f"Request {number}"}
            timeout = aiohttp.ClientTimeout(total=0.02 + number % 7 * 0.03)
            with suppress(asyncio.TimeoutError, aiohttp.ClientError):
                async with server.client.post(
                    server.url + "/v1/completions", json=body, timeout=timeout
                ) as r:
                    await r.read()

        await asyncio.gather(*[leave(number) for number in range(150)])
        await is_empty(server)
        _, after = await server.complete(**BODY, model="demo_model")
        assert after["choices"][0]["text"] == before["choices"][0]["text"]


async def test_a_reader_that_hardly_reads_holds_up_nobody() -> None:
    async with serve(max_num_seqs=8) as server:
        host, port = server.url.removeprefix("http://").split(":")
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, (host, int(port)))
        body = json.dumps(BODY | {"stream": True, "max_tokens": 450, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        await loop.sock_sendall(slow, f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert await loop.sock_recv(slow, 1) == b"H"
        for _ in range(3):
            status, reply = await server.complete(**BODY, model="demo_model")
            assert (status, reply["usage"]["completion_tokens"]) == (200, 16)
        # the engine wrote the whole answer although nobody took it
        await is_empty(server)
        slow.close()
