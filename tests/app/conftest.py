"""Servers as fixtures, with a FakeEngine behind them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from fastapi.routing import _IncludedRouter
from starlette.routing import BaseRoute

from app.api import application
from app.cli import extract, run_batch, talk
from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, Start, run_server
from tests.fakes import FakeEngine


@pytest.fixture(scope="session", autouse=True)
def routes_derived_once() -> Iterator[None]:
    """Share what FastAPI derives from our routes at the first request of each app, which takes 0.1 s.

    It depends on the routes and on options that are the same for all apps.
    """
    derived: dict[int, Any] = {}
    routers = [module.router for module in vars(application).values() if hasattr(module, "router")]
    own = {id(route) for router in routers for route in router.routes}
    derive = _IncludedRouter._build_effective_context

    def derive_once(included: _IncludedRouter, route: BaseRoute) -> Any:
        if id(route) not in own:
            return derive(included, route)
        if id(route) not in derived:
            derived[id(route)] = derive(included, route)
        return derived[id(route)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_IncludedRouter, "_build_effective_context", derive_once)
        yield


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
