"""The terminal's verbs against a running server."""

from __future__ import annotations

from typing import Any

import pytest

from app.cli import complete
from app.cli.failure import Failure
from app.cli.talk import open_talker
from engine import EngineDead
from tests.app.api.harness import Start
from tests.fakes import FakeEngine


async def test_complete_streams_from_a_server(start: Start, capsys: Any) -> None:
    server = await start(api_key=("right",))
    await complete.complete("hello", {"url": server.url + "/v1/", "api_key": "right", "max_tokens": 99})
    assert capsys.readouterr().out == "You said hello\n"


async def test_chat_keeps_to_the_servers_model(start: Start) -> None:
    server = await start()
    async with open_talker({"url": server.url, "temperature": 0.5}) as talker:
        pieces = [piece async for piece in talker.chat([{"role": "user", "content": "hi"}])]
    assert "".join(pieces) == "You said <user>hi"
    assert server.engine.requests[-1].params.temperature == 0.5


async def test_what_the_server_says_against_it_is_shown(start: Start) -> None:
    server = await start(api_key=("right",))
    with pytest.raises(Failure, match="answered 401: an API key is needed"):
        await complete.complete("hello", {"url": server.url})


async def test_an_error_in_mid_stream_is_shown(start: Start) -> None:
    server = await start(FakeEngine(fail_after=(3, EngineDead("crash"))))
    with pytest.raises(Failure, match="the engine stopped"):
        await complete.complete("hello", {"url": server.url})
