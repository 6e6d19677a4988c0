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


@pytest.mark.parametrize("sent", [b"", HEAD[:30], HEAD, HEAD + BODY[:10]])
async def test_whoever_sends_nothing_more_is_hung_up_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 0.1)
    reader, writer = await connect(server)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_slow_body_and_a_pause_after_the_answer_are_no_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 1.4)
    reader, writer = await connect(server)
    writer.write(HEAD)
    for at in range(0, len(BODY), 4):
        writer.write(BODY[at : at + 4])
        await asyncio.sleep(0.2)
    assert b"200 OK" in await reader.readline()
    await asyncio.sleep(1.6)
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


@pytest.mark.parametrize(
    "header",
    [
        "Content-Type: text/plain",
        "Content-Length: 37",
        "Host: other",
        "Origin: a://",
        "Authorization: a",
        "x-api-key: a",
    ],
)
async def test_a_header_that_must_be_single_is_refused_when_it_comes_twice(
    server: Server, header: str
) -> None:
    reader, writer = await connect(server)
    name = header.split(":")[0]
    more = b"" if name.encode() in HEAD else header.encode() + b"\r\n"
    writer.write(HEAD[:-2] + header.encode() + b"\r\n" + more + b"\r\n" + BODY)
    assert b" 400 " in await reader.readline()
    writer.close()
    assert server.engine.requests == []


async def test_two_content_types_do_not_lift_the_bound_on_values(server: Server) -> None:
    """Starlette reads the first of them, and would parse what the bound took for a text."""
    headers = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    body = b'{"prompt": "a", "user": [' + b"1," * 300_000 + b"1]}"
    async with server.client.post(server.url + "/v1/completions", data=body, headers=headers) as response:
        reply = await response.json()
    assert (response.status, reply["error"]["code"]) == (400, "invalid_header")
    assert reply["error"]["message"] == "the request has more than one content-type header"


async def test_endless_headers_are_cut_off(server: Server) -> None:
    reader, writer = await connect(server)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000)
    assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))
