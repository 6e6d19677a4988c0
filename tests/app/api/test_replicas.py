"""Replicas as the operator sees them: routes, health, metrics."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, needs_model, run_server
from tests.waiting import wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_model]
ADMIN = {"Authorization": "Bearer boss"}
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "temperature": 0.8}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    engine = Engine(EngineConfig(num_blocks=256, data_parallel_size=2))
    async with engine, run_server(engine, AppConfig(admin_key="boss")) as running:
        yield running


async def list_states(server: Server) -> list[str]:
    _, body = await server.get("/replicas", headers=ADMIN)
    return [each["state"] for each in body["replicas"]]


async def test_replicas_are_drained_and_restarted_by_admin_routes(server: Server) -> None:
    assert await list_states(server) == ["ready", "ready"]
    status, body = await server.post("/replicas/0/drain", None, headers=ADMIN)
    assert (status, body["replicas"][0]["state"]) == (200, "draining")
    _, before = await server.post("/v1/completions", ASKED)
    status, body = await server.post("/replicas/1/drain", None, headers=ADMIN)
    assert status == 400
    assert "no other replica is ready" in body["error"]["message"]
    await server.post("/replicas/0/undrain", None, headers=ADMIN)
    status, _ = await server.post("/replicas/1/restart", None, headers=ADMIN)
    assert (status, await list_states(server)) == (200, ["ready", "ready"])
    _, after = await server.post("/v1/completions", ASKED)
    assert before["choices"] == after["choices"]
    assert (await server.post("/replicas/2/drain", None, headers=ADMIN))[0] == 400


async def test_the_server_stays_healthy_while_one_replica_is_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = server.engine.replicas[0]
    connect, may_connect = replica.connector.connect, asyncio.Event()

    async def connect_when_allowed() -> Any:
        await may_connect.wait()
        return await connect()

    monkeypatch.setattr(replica.connector, "connect", connect_when_allowed)
    os.kill(replica.connection.process.pid, signal.SIGKILL)
    await wait_until(lambda: replica.state == "starting")
    assert (await server.get("/health"))[0] == 200
    assert (await server.post("/v1/completions", ASKED))[0] == 200
    _, metrics = await server.get("/metrics")
    assert 'troupe:replica_ready{engine="0",model_name="demo_model"} 0.0' in metrics
    assert 'troupe:replica_ready{engine="1",model_name="demo_model"} 1.0' in metrics
    may_connect.set()
    await wait_until(lambda: replica.state == "ready")


async def test_replicas_sleep_and_wake_up_together(server: Server) -> None:
    _, before = await server.post("/v1/completions", ASKED)
    assert await server.post("/sleep?level=2", None, headers=ADMIN) == (200, {"is_sleeping": True})
    assert await list_states(server) == ["asleep", "asleep"]
    assert (await server.post("/v1/completions", ASKED))[0] == 503
    assert await server.post("/wake_up", None, headers=ADMIN) == (200, {"is_sleeping": False})
    _, after = await server.post("/v1/completions", ASKED)
    assert before["choices"] == after["choices"]
