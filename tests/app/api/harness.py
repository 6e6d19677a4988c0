"""A real uvicorn on a free port in the test's own loop, and a client for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import pytest
import uvicorn

from app.api.application import make_api
from app.api.context import ApiContext
from app.api.http_limits import BoundedHttp
from app.config import AppConfig
from app.store import Connection, Store
from engine import EngineConfig

HAS_MODEL = (Path(EngineConfig().model) / "model.safetensors").exists()
needs_model = pytest.mark.skipif(not HAS_MODEL, reason="the demo model is not here")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Server:
    """A running server and a client for it."""

    engine: Any
    url: str
    client: aiohttp.ClientSession
    context: Any = field(default=None, kw_only=True)
    pool: Any = field(default=None, kw_only=True)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        status, _, reply = await self.ask(path, "POST", json=body, **options)
        return status, reply

    async def ask(self, path: str, method: str = "GET", **options: Any) -> tuple[int, Any, Any]:
        """Status, headers, and the body, parsed where it is JSON."""
        async with self.client.request(method, self.url + path, **options) as response:
            is_json = response.content_type == "application/json"
            return response.status, response.headers, await (response.json() if is_json else response.text())

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        status, _, body = await self.ask(path, **options)
        return status, body

    async def post_text(self, path: str, text: Any, content_type: str = "application/json") -> tuple[int, Any]:
        """Send a body as it is."""
        status, _, body = await self.ask(path, "POST", data=text, headers={"content-type": content_type})
        return status, body

    async def post_form(self, path: str, form: Any) -> tuple[int, Any]:
        status, _, body = await self.ask(path, "POST", data=form)
        return status, body

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", CHAT | fields)

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": "fake", "prompt": "hello"} | fields)

    async def stream(self, path: str, body: Any) -> bytes:
        async with self.client.post(self.url + path, json=body | {"stream": True}) as response:
            return await response.read()

    async def chat_chunks(self, **fields: Any) -> list[Any]:
        return events(await self.stream("/v1/chat/completions", CHAT | fields))


def list_cases(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Every field with each of its values."""
    return [(field, value) for field, found in values.items() for value in found]


def events(raw: bytes) -> list[Any]:
    """The JSON of every event but the [DONE] at the end, which must be there."""
    parts = raw.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2] if part.startswith(b"data: ")]


@asynccontextmanager
async def run_server(
    engine: Any, config: AppConfig, store: Store | None = None, roles: Any = MappingProxyType({})
) -> AsyncIterator[Server]:
    app = make_api(context := ApiContext(engine, config, store=store or Store()), roles)
    settings = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none", http=BoundedHttp)
    # on a slow machine the usual seconds pass between two tests, and a pooled connection would be closed as it is taken
    settings.timeout_keep_alive = 600
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    # without uvicorn's own loop, whose ticks would make every test wait for a tenth of a second
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    async with aiohttp.ClientSession() as client:
        try:
            yield Server(engine, f"http://127.0.0.1:{port}", client, context=context, pool=app.state.pool)
        finally:
            await app.state.pool.close()
    for listener in server.servers:
        listener.close()
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Start = Callable[..., Awaitable[Server]]


def limit_pages(db: Connection, count: int) -> None:
    """Let the database grow no further than this, or than it is."""
    db.execute(f"PRAGMA max_page_count = {count}")
