"""Requests that do not come to their own end: what their client is told, and what stands in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.app.api.harness import CHAT, Server, Start, events
from tests.fakes import FakeEngine
from tests.waiting import wait_until

PROMPT_TOKENS = len("<user>hello\n<assistant>")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the API logs."""
    caplog.set_level(logging.INFO, "troupe.requests")
    caplog.set_level(logging.INFO, "troupe.api")
    return caplog


@asynccontextmanager
async def begin_stream(start: Start) -> AsyncIterator[tuple[Server, aiohttp.ClientResponse, bytes]]:
    """A server, the reply of a long stream, and its first event."""
    server = await start(FakeEngine(reply=lambda prompt: "x" * 10_000, step_s=0.01))
    url = server.url + "/v1/chat/completions"
    async with server.client.post(url, json=CHAT | {"stream": True}) as response:
        yield server, response, await response.content.readuntil(b"\n\n")


async def test_the_log_of_a_stream_whose_reader_left_has_its_tokens(
    start: Start, log: pytest.LogCaptureFixture
) -> None:
    async with begin_stream(start) as (_, response, _first):
        response.close()
    await wait_until(lambda: bool(log.records))
    line = log.messages[0]
    assert f"prompt_tokens={PROMPT_TOKENS} cached_tokens=3 output_tokens=" in line
    assert " finish=abort ttft_ms=1000.0 " in line


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_log_of_a_request_that_had_no_output_yet_has_its_prompt(
    start: Start, log: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    server = await start(FakeEngine(hold=asyncio.Event()))
    task = asyncio.create_task(server.post("/v1/chat/completions", CHAT | {"stream": is_stream}))
    await wait_until(lambda: len(server.engine.requests) == 1)
    task.cancel()
    await wait_until(lambda: bool(log.records))
    line = log.messages[0]
    assert f"prompt_tokens={PROMPT_TOKENS} cached_tokens=0 output_tokens=0 finish=abort total_ms=" in line


async def test_a_stream_that_an_intended_close_cuts_off_is_no_error(
    start: Start, log: pytest.LogCaptureFixture
) -> None:
    async with begin_stream(start) as (server, response, first):
        await server.engine.close()
        error = events(first + await response.read())[-1]["error"]
    assert (error["code"], error["type"]) == ("server_closing", "service_unavailable")
    await wait_until(lambda: len(log.records) == 2)
    told, visited = log.records
    assert (told.levelname, told.name) == ("INFO", "troupe.api") and "closing" in told.getMessage()
    assert " finish=abort ttft_ms=" in visited.getMessage()


async def test_a_reply_in_one_piece_that_a_close_cuts_off_is_a_503(start: Start) -> None:
    hold = asyncio.Event()
    server = await start(FakeEngine(hold=hold))
    reply = asyncio.create_task(server.chat())
    await wait_until(lambda: len(server.engine.requests) == 1)
    await server.engine.close()
    hold.set()
    status, body = await reply
    assert (status, body["error"]["code"]) == (503, "server_closing")


async def test_a_prompt_that_is_only_scored_has_no_output_in_the_log(
    start: Start, log: pytest.LogCaptureFixture
) -> None:
    server = await start()
    _, reply = await server.complete(max_tokens=0, echo=True, logprobs=1)
    assert reply["usage"]["completion_tokens"] == 0
    await wait_until(lambda: bool(log.records))
    assert " output_tokens=0 finish=length " in log.messages[0]
