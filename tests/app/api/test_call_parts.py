"""A chunk of a stream carries one part of each call."""

from __future__ import annotations

import json

from app.api.tools.styled_calls import join_parts, more_arguments, open_call
from tests.app.api.harness import Start
from tests.app.api.test_tools import TOOLS
from tests.fakes import FakeEngine


async def test_a_chunk_has_one_part_of_a_call(start: Start) -> None:
    """Clients exist that read only the first part of a chunk."""
    server = await start(FakeEngine(record='{"name": "weather", "arguments": {"city": "Rome"}}'))
    named = {"type": "function", "function": {"name": "weather"}}
    chunks = await server.chat_chunks(tools=TOOLS, tool_choice=named)
    parts = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in chunks if chunk["choices"]]
    assert max(map(len, parts)) == 1
    text = "".join(part[0]["function"]["arguments"] for part in parts if part)
    assert json.loads(text) == {"city": "Rome"}


def test_parts_of_one_call_are_joined_and_others_are_not() -> None:
    parts = [
        open_call(0, "f", ""),
        more_arguments(0, '{"a"'),
        more_arguments(0, ": 1}"),
        open_call(1, "g", ""),
    ]
    joined = join_parts({"content": "x", "tool_calls": parts})
    assert joined["content"] == "x"
    assert [(p["index"], p["function"]["arguments"]) for p in joined["tool_calls"]] == [
        (0, '{"a": 1}'),
        (1, ""),
    ]
    assert parts[0]["function"]["arguments"] == ""
