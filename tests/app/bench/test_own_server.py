"""Waiting for a server: who is told what, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.bench import own_server
from app.bench.own_server import run_server, wait_until_ready
from app.cli.main import main
from app.config import UsageError

Serve = Callable[[int, str], Awaitable[TestServer]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers = []

    async def begin(status: int, text: str) -> TestServer:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=answers[0], text=text)

        answers = [status]
        application = web.Application()
        application.router.add_get("/health", answer)
        server = TestServer(application)
        server.answers = answers  # type: ignore[attr-defined]
        servers.append(server)
        await server.start_server()
        return server

    yield begin
    for server in servers:
        await server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(own_server, "START_TIMEOUT_S", 600.0)


def test_an_address_where_nobody_listens_is_told_at_once_and_given_up_soon(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = "http://127.0.0.1:1"
    assert main(["bench", "serve", "--base-url", url, "--num-prompts", "2"]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert lines == [f"waiting for {url} ...", f"waiting for {url}: Connection refused"]
    assert last.startswith(f"troupe: {url} did not become ready within ")
    assert last.endswith("the last attempt: Connection refused")


async def test_a_server_that_loads_is_told_from_nobody_and_waited_for_longer(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await serve(503, '{"state": "loading"}')
    url = str(server.make_url("")).rstrip("/")
    waiting = asyncio.create_task(wait_until_ready(url))
    await asyncio.sleep(0.8)
    assert not waiting.done()
    assert f'waiting for {url}: /health answers 503 {{"state": "loading"}}' in capsys.readouterr().err
    server.answers[0] = 200  # type: ignore[attr-defined]
    await waiting


async def test_a_server_that_loads_for_ever_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_server, "START_TIMEOUT_S", 0.8)
    server = await serve(503, "loading")
    with pytest.raises(UsageError, match=r"within \d s; the last attempt: /health answers 503 loading"):
        await wait_until_ready(str(server.make_url("")).rstrip("/"))


async def test_another_kind_of_server_is_given_up_soon(serve: Serve) -> None:
    server = await serve(404, "Not\nFound")
    with pytest.raises(UsageError, match=r"the last attempt: /health answers 404 Not Found$"):
        await wait_until_ready(str(server.make_url("")).rstrip("/"))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(60.0, "ended with exit code 2: troupe: max_num_seqs=0"), (0.0, "not ready within 0 s")],
)
async def test_a_server_of_ours_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, seconds: float, said: str
) -> None:
    monkeypatch.setattr(own_server, "START_TIMEOUT_S", seconds)
    with pytest.raises(UsageError, match=said):
        async with run_server(["--max-num-seqs", "0"]):
            pass


async def test_a_process_that_ends_is_not_waited_for() -> None:
    process = cast(asyncio.subprocess.Process, SimpleNamespace(returncode=3))
    with pytest.raises(UsageError, match="ended with exit code 3 instead of becoming ready"):
        await wait_until_ready("http://127.0.0.1:1", process)


async def test_a_server_that_does_not_speak_http_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UsageError, match="did not become ready within"):
            await wait_until_ready(f"http://127.0.0.1:{port}")
    assert "waiting for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--base-url", "127.0.0.1:7860"], "'127.0.0.1:7860' needs http:// or https://"),
        (["--base-url", "http://[nonsense"], "is no address of a server"),
        (["--base-url", "http://127.0.0.1:1", "--api-key", "a\nb"], "--api-key must be printable ASCII"),
    ],
)
def test_an_address_or_key_that_cannot_work_is_a_usage_error(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--num-prompts", "2", *flags]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
