"""The API while the engine sleeps, crashes, or gets one bad request."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.engine_core import EngineCore
from engine.worker.executor import Loaded
from engine.worker.worker import Worker
from tests.app.api.harness import Server, Start, needs_model, run_server
from tests.engine.failing_step import fail_next_step
from tests.waiting import wait_until

pytestmark = needs_model

ADMIN = {"Authorization": "Bearer boss"}
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "temperature": 0.8}
LONG = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True, "stream": True}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    config = AppConfig(admin_key="boss")
    async with Engine(EngineConfig(num_blocks=256)) as engine, run_server(engine, config) as running:
        yield running


async def admin(server: Server, path: str) -> tuple[int, Any]:
    return await server.post(path, None, headers=ADMIN)


async def complete(server: Server) -> tuple[int, Any]:
    return await server.post("/v1/completions", ASKED)


@pytest.mark.parametrize(("path", "name"), [("/sleep", "weights_offloaded"), ("/sleep?level=2", "discard_all")])
async def test_a_sleeping_server_reports_it_on_every_route_and_wakes_up_unchanged(
    server: Server, path: str, name: str
) -> None:
    _, before = await complete(server)
    assert await admin(server, path) == (200, {"is_sleeping": True})
    assert await server.get("/is_sleeping", headers=ADMIN) == (200, {"is_sleeping": True})
    assert await server.get("/health") == (200, {"status": "ok", "state": "sleeping"})
    assert await server.get("/readyz") == (503, {"status": "sleeping", "state": "sleeping"})
    _, metrics = await server.get("/metrics")
    assert f'model_name="demo_model",sleep_state="{name}"}} 1.0' in metrics
    status, headers, reply = await server.ask("/v1/completions", "POST", json=ASKED)
    assert (status, headers["Retry-After"], reply["error"]["code"]) == (503, "2", "engine_sleeping")
    assert reply["error"]["message"] == "the engine is sleeping; its administrator can wake it up"
    assert (await server.get("/v1/models"))[0] == 200
    status, info = await server.get("/server_info", headers=ADMIN)
    assert (status, info["state"], info["runtime"]["ops"]) == (200, "sleeping", "asleep")
    assert await admin(server, "/wake_up") == (200, {"is_sleeping": False})
    assert await server.get("/health") == (200, {"status": "ok", "state": "ready"})
    _, after = await complete(server)
    assert after["choices"] == before["choices"]


async def test_an_open_stream_ends_as_it_would_have_before_the_server_sleeps(server: Server) -> None:
    async with server.client.post(server.url + "/v1/completions", json=LONG) as stream:
        await stream.content.readuntil(b"\n\n")
        falling = asyncio.create_task(admin(server, "/sleep"))
        await wait_until(lambda: server.engine.state == "falling_asleep")
        status, reply = await complete(server)
        assert (status, reply["error"]["code"]) == (503, "engine_sleeping")
        assert "finishes the requests it has and takes no new ones" in reply["error"]["message"]
        assert await server.get("/is_sleeping", headers=ADMIN) == (200, {"is_sleeping": False})
        raw = await stream.read()
    assert raw.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in raw.replace(b": ", b":")
    assert await falling == (200, {"is_sleeping": True})


SLOW: dict[str, Any] = {"stream": True, "structured_outputs": {"regex": "[ab ]{1500}"}}
MESSAGE = {"model": "demo_model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1500}


@pytest.mark.parametrize(
    ("path", "asked", "ended", "last"),
    [
        ("completions", LONG, '"finish_reason":"abort"', "data: [DONE]"),
        ("responses", SLOW | {"input": "hello"}, '"status":"cancelled"', "event: response.incomplete"),
        ("messages", SLOW | MESSAGE, '"stop_reason":"abort"', "event: message_stop"),
    ],
)
async def test_mode_abort_ends_open_streams_at_once(
    server: Server, path: str, asked: dict[str, Any], ended: str, last: str
) -> None:
    async with server.client.post(f"{server.url}/v1/{path}", json=asked) as stream:
        await stream.content.readuntil(b"\n\n")
        assert await admin(server, "/sleep?mode=abort") == (200, {"is_sleeping": True})
        raw = (await stream.read()).decode()
    assert raw.endswith("\n\n") and raw.split("\n\n")[-2].startswith(last), raw[-600:]
    told = raw.replace(": ", ":")
    assert ended in told and '"reason":"max_output_tokens"' not in told and "end_turn" not in told


@pytest.mark.parametrize(
    ("path", "told"),
    [
        *((f"/sleep?level={level}", "level=") for level in (0, 3, 2**63, "NaN")),
        ("/sleep?mode=keep", "mode="),
        ("/wake_up?tags=weights", "tags is not supported"),
        ("/sleep?levle=2", "levle is not a known query parameter; known are level, mode"),
        ("/reset_prefix_cache?level=1", "level is not a known query parameter; this route has none"),
    ],
)
async def test_a_wrong_parameter_is_a_400_naming_it(start: Start, path: str, told: str) -> None:
    server = await start(admin_key="boss")
    status, reply = await admin(server, path)
    assert (status, reply["error"]["param"]) == (400, told.split()[0].rstrip("=")), reply
    assert reply["error"]["message"].startswith(told)


async def test_a_failed_wake_up_is_a_500_with_the_cause(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(_: Worker) -> None:
        raise RuntimeError("no memory left on /dev/gpu/one")

    await admin(server, "/sleep?level=2")
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_make_caches", explode)
        status, reply = await admin(server, "/wake_up")
    assert (status, reply["error"]["code"]) == (500, "wake_up_failed")
    assert reply["error"]["message"].endswith("still asleep: RuntimeError: no memory left on ...")
    status, health = await server.get("/readyz")
    assert (status, health["state"], "no memory left" in health["error"]) == (503, "sleeping", True)
    assert (await admin(server, "/wake_up"))[0] == 200


USER = {"role": "user", "content": "Hello! Who are you?"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture
def may_restart(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Until it is set, a crashed engine stays in "restarting"."""
    event = asyncio.Event()
    start = EngineCore.start

    async def start_when_allowed(self: EngineCore, tasks: asyncio.TaskGroup, loaded: Loaded | None) -> Loaded:
        if loaded is not None:
            await event.wait()
        return await start(self, tasks, loaded)

    monkeypatch.setattr(EngineCore, "start", start_when_allowed)
    return event


async def open_stream(server: Server) -> aiohttp.ClientResponse:
    """A long stream whose first event has been read."""
    response = await server.client.post(server.url + "/v1/chat/completions", json=CHAT | {"stream": True})
    await response.content.readuntil(b"\n\n")
    return response


async def crash(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_next_step(monkeypatch, "the device in /opt/devices/one is on fire")
    # the state goes by too fast to be seen; the cause stays
    await wait_until(lambda: server.engine.error is not None)


async def test_health_is_a_503_with_the_cause_until_the_engine_is_back(
    server: Server, monkeypatch: pytest.MonkeyPatch, may_restart: asyncio.Event
) -> None:
    stream = await open_stream(server)
    await crash(server, monkeypatch)
    # the cause, without the path that it names
    cause = "RuntimeError: the device in ... is on fire"
    assert await server.get("/health") == (503, {"status": "restarting", "state": "restarting", "error": cause})
    status, reply = await server.post("/v1/chat/completions", CHAT | {"max_tokens": 4})
    assert (status, reply["error"]["code"]) == (503, "engine_not_ready")
    stream.close()
    may_restart.set()
    await wait_until(lambda: server.engine.state == "ready")
    assert await server.get("/health") == (200, {"status": "ok", "state": "ready"})
    assert (await server.post("/v1/chat/completions", CHAT | {"max_tokens": 4}))[0] == 200
    stats = server.engine.stats()
    assert (stats.num_restarts, stats.num_free_blocks) == (1, stats.num_blocks)
