"""What a client sees when the real engine crashes, and when one request of several is at fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.company import Company
from engine.worker.model_runner import ModelRunner
from tests.app.api.harness import Server, events, needs_model, run_server
from tests.waiting import wait_until

pytestmark = needs_model

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello! Who are you?"}],
    "max_tokens": 1500,
    "ignore_eos": True,
}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Engine(EngineConfig(num_blocks=512)) as engine, run_server(engine, AppConfig()) as running:
        yield running


@pytest.fixture
def may_restart(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until it is set, a crashed engine stays in "restarting"."""
    event = asyncio.Event()
    start = Company.start

    async def start_when_allowed(
        self: Company, tasks: asyncio.TaskGroup, watch: asyncio.TaskGroup, is_restart: bool
    ) -> None:
        if is_restart:
            await event.wait()
        await start(self, tasks, watch, is_restart)

    monkeypatch.setattr(Company, "start", start_when_allowed)
    return event


def _explode(*_: object) -> None:
    raise RuntimeError("the device in /opt/devices/one is on fire")


async def health(server: Server) -> tuple[int, Any]:
    async with server.client.get(server.url + "/health") as response:
        return response.status, await response.json()


async def open_stream(server: Server) -> aiohttp.ClientResponse:
    """A long stream whose first event has been read."""
    response = await server.client.post(server.url + "/v1/chat/completions", json=LONG | {"stream": True})
    await response.content.readuntil(b"\n\n")
    return response


async def crash(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "execute", _explode)
        # the state goes by too fast to be seen; the cause stays
        await wait_until(lambda: server.engine.error is not None)


async def test_a_crash_is_an_event_in_every_open_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [await open_stream(server) for _ in range(3)]
    await crash(server, monkeypatch)
    for stream in streams:
        error = events(await stream.read())[-1]["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")


async def test_a_crash_is_a_500_for_a_reply_in_one_piece(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = asyncio.create_task(server.post("/v1/chat/completions", LONG))
    await wait_until(lambda: server.engine.stats().num_running == 1)
    await crash(server, monkeypatch)
    status, body = await reply
    assert (status, body["error"]["code"]) == (500, "engine_dead")


async def test_health_is_a_503_with_the_cause_until_the_engine_is_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, may_restart: asyncio.Event
) -> None:
    stream = await open_stream(server)
    await crash(server, monkeypatch)
    # the cause, without the path that it names
    cause = "RuntimeError: the device in ... is on fire"
    assert await health(server) == (503, {"status": "restarting", "state": "restarting", "error": cause})
    status, reply = await server.post("/v1/chat/completions", LONG | {"max_tokens": 4})
    assert (status, reply["error"]["code"]) == (503, "engine_not_ready")
    stream.close()
    may_restart.set()
    await wait_until(lambda: server.engine.state == "ready")
    assert await health(server) == (200, {"status": "ok", "state": "ready"})
    assert (await server.post("/v1/chat/completions", LONG | {"max_tokens": 4}))[0] == 200
    stats = server.engine.stats()
    assert (stats.num_restarts, stats.num_free_blocks) == (1, stats.num_blocks)


async def test_an_engine_that_stays_down_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(num_blocks=512, max_restarts=0)
    async with Engine(config) as engine, run_server(engine, AppConfig()) as server:
        monkeypatch.setattr(ModelRunner, "execute", _explode)
        assert (await server.post("/v1/chat/completions", LONG))[0] == 500
        await wait_until(lambda: engine.state == "dead")
        status, body = await health(server)
        assert (status, body["state"]) == (503, "dead")
        assert body["error"].startswith("RuntimeError: the device in ...")


async def test_the_official_client_retries_over_a_restart(
    server: Server, monkeypatch: pytest.MonkeyPatch, may_restart: asyncio.Event
) -> None:
    stream = await open_stream(server)
    await crash(server, monkeypatch)
    stream.close()
    asyncio.get_running_loop().call_later(0.2, may_restart.set)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=2) as client:
        reply = await client.chat.completions.create(
            model="demo_model", messages=LONG["messages"], max_tokens=4
        )
    assert reply.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "bad",
    [
        {"structured_outputs": {"regex": "(((("}},
        {"structured_outputs": {"grammar": "root ::="}},
        {"structured_outputs": {"json": {"$ref": "#/nowhere"}}},
        {"messages": [{"role": "user", "content": "word " * 5000}]},
    ],
    ids=["regex", "grammar", "schema", "prompt"],
)
async def test_a_bad_request_is_a_400_and_another_stream_goes_on(server: Server, bad: dict[str, Any]) -> None:
    stream = await open_stream(server)
    status, reply = await server.post("/v1/chat/completions", LONG | bad)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert "structured_outputs" in bad or "2048" in reply["error"]["message"]
    assert server.engine.stats().num_running == 1
    more = [json.loads((await stream.content.readuntil(b"\n\n")).removeprefix(b"data: ")) for _ in range(20)]
    assert all(event["choices"][0]["finish_reason"] is None for event in more)
    stream.close()
