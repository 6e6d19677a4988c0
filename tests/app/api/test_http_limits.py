"""Clients that stop in mid-request are hung up on; those that move on, or wait for an answer, are not."""

from __future__ import annotations

import asyncio

import pytest

from app.api import http_limits
from tests.app.api.harness import Server, Start
from tests.fakes import FakeEngine

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 37\r\n\r\n"
)
BODY = b'{"model": "fake", "prompt": "hello"} '


@pytest.fixture
async def bounded(start: Start, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 2.0)
    return await start()


@pytest.mark.parametrize("sent", [b"", HEAD[:30], HEAD, HEAD + BODY[:10]])
async def test_whoever_sends_nothing_more_is_hung_up_on(bounded: Server, sent: bytes) -> None:
    reader, writer = await connect(bounded)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_slow_body_and_a_pause_after_the_answer_are_no_reason(bounded: Server) -> None:
    reader, writer = await connect(bounded)
    writer.write(HEAD)
    for at in range(0, len(BODY), 4):
        writer.write(BODY[at : at + 4])
        await asyncio.sleep(0.3)
    assert b"200 OK" in await reader.readline()
    await asyncio.sleep(3.0)
    writer.write(HEAD + BODY)
    answered = await asyncio.wait_for(reader.readuntil(b"200 OK"), 20)
    assert answered
    writer.close()


@pytest.mark.parametrize("more", [b"\r\n", HEAD[:30]])
async def test_the_beginning_of_the_next_request_cuts_no_answer_short(
    start: Start, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 0.2)
    engine = FakeEngine(hold=asyncio.Event())
    reader, writer = await connect(await start(engine))
    writer.write(HEAD + BODY)
    while not engine.requests:
        await asyncio.sleep(0.01)
    writer.write(more)
    await asyncio.sleep(0.6)  # several times what one may stop for
    engine.hold.set()
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
    assert b"You said hello" in await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))
