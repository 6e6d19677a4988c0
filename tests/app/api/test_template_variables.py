"""What of a request reaches the chat template beside roles and contents: names, and the effort of reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.app.api.harness import CHAT, Start
from tests.fakes import FakeEngine, FakeTokenizer


@dataclass
class ListeningTokenizer(FakeTokenizer):
    """Remembers what the template was last given."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        self.messages, self.variables = [dict(message) for message in messages], kwargs
        return super().apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize(
    ("fields", "effort", "is_on"),
    [
        ({}, None, None),
        ({"reasoning_effort": None}, None, None),
        ({"reasoning_effort": "high"}, "high", None),
        ({"reasoning_effort": "none"}, "none", False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none", True),
    ],
)
async def test_the_effort_of_reasoning_reaches_the_template(
    start: Start, fields: dict[str, Any], effort: str | None, is_on: bool | None
) -> None:
    tokenizer = ListeningTokenizer()
    server = await start(FakeEngine(tokenizer=tokenizer))
    asked = {"effort": fields["reasoning_effort"]} if "reasoning_effort" in fields else None
    rest = {name: value for name, value in fields.items() if name != "reasoning_effort"}
    for path, body in (
        ("/v1/chat/completions", CHAT | fields),
        ("/v1/responses", {"input": "x", "reasoning": asked} | rest),
        ("/tokenize", CHAT | fields),
    ):
        await server.post(path, body)  # after which nothing is tried out with the template
        status, reply = await server.post(path, body)
        assert status == 200, reply
        heard = tokenizer.variables
        assert (heard.get("reasoning_effort"), heard.get("enable_thinking")) == (effort, is_on), path


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("name", ["self", "messages", "tools", "tokenize", "padding", "max_length"])
async def test_a_variable_that_is_an_argument_is_refused(start: Start, path: str, name: str) -> None:
    server = await start(FakeEngine())
    body = {"chat_template_kwargs": {name: 1}} | ({"input": "x"} if path == "/v1/responses" else CHAT)
    status, reply = await server.post(path, body | ({"max_tokens": 5} if path == "/v1/messages" else {}))
    assert status == 400
    assert f"chat_template_kwargs must not set {name!r}" in reply["error"]["message"]


async def test_an_effort_that_is_none_of_those_is_refused(start: Start) -> None:
    server = await start(FakeEngine())
    status, reply = await server.chat(reasoning_effort="much")
    assert (status, reply["error"]["param"]) == (400, "reasoning_effort")
    assert "'none', 'minimal'" in reply["error"]["message"]


async def test_the_name_of_who_speaks_reaches_the_template(start: Start) -> None:
    tokenizer = ListeningTokenizer()
    server = await start(FakeEngine(tokenizer=tokenizer))
    asked = [{"role": "user", "content": "x", "name": "Ada"}, {"role": "user", "content": "y", "name": None}]
    await server.chat(messages=asked)
    status, reply = await server.chat(messages=asked)
    assert status == 200, reply
    assert [message.get("name") for message in tokenizer.messages] == ["Ada", None]


@pytest.mark.parametrize("name", [5, "", "x" * 257, ["a"]])
async def test_a_name_that_is_none_is_refused(start: Start, name: Any) -> None:
    server = await start(FakeEngine())
    status, reply = await server.chat(messages=[{"role": "user", "content": "x", "name": name}])
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert reply["error"]["message"] == "messages[0].name must be a text of 1 to 256 characters"
    assert server.engine.requests == []
