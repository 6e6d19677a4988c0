"""Messages as programs write them: parts become one text, and what no template could read is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest

from engine.chat_messages import read_messages
from engine.errors import InvalidRequest


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "content",
    [
        "one two",
        [{"type": "text", "text": "one two"}],
        [{"type": "text", "text": "one"}, {"type": "input_text", "text": " two"}],
        ({"type": "output_text", "text": "one "}, {"type": "refusal", "refusal": "two"}),
    ],
)
def test_parts_are_joined_into_one_text(content: object) -> None:
    assert read_messages(user(content)) == [{"role": "user", "content": "one two"}]


def test_other_keys_stay_and_the_callers_messages_too() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call], "name": "x"}]
    assert read_messages(messages) == [
        {"role": "assistant", "content": "", "tool_calls": [call], "name": "x"}
    ]
    assert messages[0]["content"] is None
    assert read_messages([{"role": "assistant", "tool_calls": [call]}])[0]["content"] == ""


TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hello", "messages must be a list of {'role': ..., 'content': ...}, not str"),
        (None, "messages must be a list of {'role': ..., 'content': ...}, not NoneType"),
        ({"role": "user", "content": "x"}, "messages must be a list of"),
        (["x"], "messages[0] must be a mapping with role and content, not str"),
        ([{"content": "x"}], "messages[0].role must be a text, not NoneType"),
        ([*user("x"), {"role": "user"}], "messages[1].content is missing: it must be a text or"),
        ([{"role": "assistant", "content": None}], "messages[0].content is missing"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content is missing"),
        (user(5), "messages[0].content must be a text or a list of text parts, not int"),
        (user(b"x"), "messages[0].content must be a text or a list of text parts, not bytes"),
        (user(TEXT), "messages[0].content must be a text or a list of text parts, not dict"),
        (user([TEXT, IMAGE]), "messages[0].content[1]: only text parts are supported, not 'image_url'"),
        (user(["x"]), "messages[0].content[0]: only text parts are supported, not 'str'"),
        (user([{"text": "x"}]), "messages[0].content[0]: only text parts are supported, not 'None'"),
        (user([{"type": ["text"], "text": "x"}]), "messages[0].content[0]: only text parts are supported"),
        (user([{"type": "text"}]), "messages[0].content[0].text must be a text, not NoneType"),
        (user([{"type": "refusal", "text": "x"}]), "messages[0].content[0].refusal must be a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_its_place(messages: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(messages)
    assert str(caught.value).startswith(told)
    assert caught.value.param == "messages"
