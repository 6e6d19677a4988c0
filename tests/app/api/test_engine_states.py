"""The API while the engine sleeps, falls asleep and wakes up."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.worker.worker import Worker
from tests.app.api.harness import Server, Start, needs_model, run_server

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
