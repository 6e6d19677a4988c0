"""Servers as fixtures, with a FakeEngine behind them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from app.cli import extract, run_batch, talk
from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, Start, run_server
from tests.fakes import FakeEngine


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """A function that starts a server: `server = await start(engine, api_key=...)`."""
    async with AsyncExitStack() as stack:

        async def start_one(engine: Any = None, **settings: Any) -> Server:
            config = AppConfig(**settings)
            return await stack.enter_async_context(run_server(engine or FakeEngine(), config))

        yield start_one


@pytest.fixture
def fake_local(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that the verbs find in this process; it starts when one asks for it."""
    fake = FakeEngine(state="new")

    @asynccontextmanager
    async def local_engine(given: dict[str, Any]) -> AsyncIterator[FakeEngine]:
        await fake.start()
        with talk.plain_errors():
            yield fake

    for module in (extract, run_batch, talk):
        monkeypatch.setattr(module, "local_engine", local_engine)
    return fake


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def real() -> AsyncIterator[Server]:
    """The real engine with the demo model behind the API, for tests that leave it as it was."""
    async with Engine(EngineConfig(num_blocks=512)) as engine, run_server(engine, AppConfig()) as running:
        yield running


@pytest.fixture
async def server(start: Start) -> Server:
    return await start()
