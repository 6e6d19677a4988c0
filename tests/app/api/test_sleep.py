"""The admin routes around sleep, on the real engine, as an operator and as a client see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.worker.worker import Worker
from tests.app.api.harness import Server, needs_model, run_server
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


async def get(server: Server, path: str, **options: Any) -> tuple[int, Any]:
    async with server.client.get(server.url + path, **options) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def admin(server: Server, path: str) -> tuple[int, Any]:
    return await server.post(path, None, headers=ADMIN)


async def complete(server: Server) -> tuple[int, Any]:
    return await server.post("/v1/completions", ASKED)


@pytest.mark.parametrize(
    ("path", "name"), [("/sleep", "weights_offloaded"), ("/sleep?level=2", "discard_all")]
)
async def test_a_sleeping_server_says_so_everywhere_and_wakes_up_the_same(
    server: Server, path: str, name: str
) -> None:
    _, before = await complete(server)
    assert await admin(server, path) == (200, {"is_sleeping": True})
    assert await get(server, "/is_sleeping", headers=ADMIN) == (200, {"is_sleeping": True})
    assert await get(server, "/health") == (200, {"status": "ok", "state": "sleeping"})
    assert await get(server, "/readyz") == (503, {"status": "sleeping", "state": "sleeping"})
    _, metrics = await get(server, "/metrics")
    assert f'model_name="demo_model",sleep_state="{name}"}} 1.0' in metrics
    async with server.client.post(server.url + "/v1/completions", json=ASKED) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "2")
        error = (await response.json())["error"]
    assert error["code"] == "engine_sleeping"
    assert error["message"] == "the engine is sleeping; whoever runs this server can wake it up"
    assert (await get(server, "/v1/models"))[0] == 200
    status, info = await get(server, "/server_info", headers=ADMIN)
    assert (status, info["state"], info["runtime"]["ops"]) == (200, "sleeping", "asleep")
    assert await admin(server, "/wake_up") == (200, {"is_sleeping": False})
    assert await get(server, "/health") == (200, {"status": "ok", "state": "ready"})
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
        assert await get(server, "/is_sleeping", headers=ADMIN) == (200, {"is_sleeping": False})
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
    ("path", "param"),
    [
        ("/sleep?level=0", "level"),
        ("/sleep?level=3", "level"),
        ("/sleep?level=9223372036854775808", "level"),
        ("/sleep?level=NaN", "level"),
        ("/sleep?mode=keep", "mode"),
        ("/wake_up?tags=weights", "tags"),
        ("/sleep?levle=2", "levle"),
        ("/reset_prefix_cache?level=1", "level"),
    ],
)
async def test_a_wrong_parameter_is_a_400_naming_it(server: Server, path: str, param: str) -> None:
    status, reply = await admin(server, path)
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert server.engine.state == "ready"


async def test_an_unknown_parameter_is_told_the_known_ones(server: Server) -> None:
    _, reply = await admin(server, "/sleep?levle=2")
    assert reply["error"]["message"] == "levle is not a known query parameter; known are level, mode"
    _, reply = await get(server, "/is_sleeping?x", headers=ADMIN)
    assert reply["error"]["message"] == "x is not a known query parameter; this route has none"


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_nobody_else_may_put_it_to_sleep(server: Server, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert (await server.post(path, None, headers=headers))[0] == 401
    assert (await get(server, "/is_sleeping"))[0] == 401
    assert server.engine.state == "ready"


async def test_a_failed_wake_up_is_a_500_with_the_cause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_: Worker) -> None:
        raise RuntimeError("no memory left on /dev/gpu/one")

    await admin(server, "/sleep?level=2")
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_make_caches", explode)
        status, reply = await admin(server, "/wake_up")
    assert (status, reply["error"]["code"]) == (500, "wake_up_failed")
    assert reply["error"]["message"].endswith("still sleeps: RuntimeError: no memory left on ...")
    status, health = await get(server, "/readyz")
    assert (status, health["state"], "no memory left" in health["error"]) == (503, "sleeping", True)
    assert (await admin(server, "/wake_up"))[0] == 200
