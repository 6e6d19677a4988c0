"""What JSON's syntax lets through and is no value is refused at every route, before anything is done with it."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.errors import ApiError
from app.api.json_body import MAX_LOOKED_AT, check_json
from tests.app.api.harness import Server

TORN = r'"\ud800"'
HEAD = '"model": "fake", "messages": [{"role": "user", "content": "x"}]'
TOOL = '{"type": "function", "name": "f", "description": TORN}'
WRONG = [
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": TORN}]}', "messages[0].content"),
    ("/v1/chat/completions", "{HEAD, TORN: 1}", "the body"),
    ("/v1/chat/completions", '{HEAD, "metadata": {"a": [1, NaN]}}', "metadata.a[1]=nan"),
    ("/v1/completions", '{"prompt": ["a", TORN]}', "prompt[1]"),
    ("/v1/responses", '{"input": "x", "reasoning": {"x": TORN}}', "reasoning.x"),
    ("/v1/responses", '{"input": "x", "reasoning": {"x": NaN}}', "reasoning.x=nan"),
    ("/v1/responses", '{"input": "x", "reasoning": {"x": 1e999}}', "reasoning.x=inf"),
    ("/v1/responses", f'{{"input": "x", "tool_choice": "none", "tools": [{TOOL}]}}', "tools[0].description"),
    ("/v1/messages", '{HEAD, "max_tokens": 5, "system": TORN}', "system"),
    ("/v1/messages/count_tokens", '{HEAD, "system": TORN}', "system"),
    ("/tokenize", '{"prompt": TORN}', "prompt"),
    ("/detokenize", '{"tokens": [-Infinity]}', "tokens[0]=-inf"),
]


@pytest.mark.parametrize(("path", "body", "place"), WRONG)
async def test_a_value_that_is_none_is_a_400_naming_its_place(
    server: Server, path: str, body: str, place: str
) -> None:
    data = body.replace("HEAD", HEAD).replace("TORN", TORN)
    status, reply = await server.post_text(path, data)
    assert status == 400, reply
    message = reply["error"]["message"]
    assert message.startswith(place + " "), message
    assert "half of a surrogate pair" in message or "finite number" in message
    assert server.engine.requests == []


@pytest.mark.parametrize("kind", ["Application/JSON", "application/vnd.api+JSON; charset=utf-8"])
@pytest.mark.parametrize(
    "extra", ['"metadata": {"a": NaN}', '"user": "a", "user": "b"', '"x": [' + "0," * 200_001 + "0]"]
)
async def test_the_case_of_the_media_type_opens_no_way_around(server: Server, kind: str, extra: str) -> None:
    status, _ = await server.post_text("/v1/chat/completions", f"{{{HEAD}, {extra}}}", kind)
    assert status == (413 if len(extra) > 1000 else 400)
    assert server.engine.requests == []


@pytest.mark.parametrize("path", sorted({path for path, _, _ in WRONG}))
async def test_a_name_twice_is_a_400_naming_it(server: Server, path: str) -> None:
    schema = '{"properties": {"a": {"type": "string"}, "a": {"type": "integer"}}}'
    data = f'{{{HEAD}, "prompt": "x", "input": "x", "tokens": [1], "max_tokens": 5, "metadata": {schema}}}'
    status, reply = await server.post_text(path, data)
    assert status == 400, reply
    assert reply["error"]["message"] == "an object has the name 'a' twice"
    assert server.engine.requests == []


async def test_whole_pairs_and_large_numbers_pass(server: Server) -> None:
    content = [{"role": "user", "content": "\U0001f600 \x00 日本"}]
    status, reply = await server.chat(messages=content, metadata={"a": "b"}, some_number=1e308, other=10**400)
    assert status == 200, reply


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"a": {"b": [float("nan")]}}, "a"),
        ([float("inf")], None),
        (float("nan"), None),
        ({"\ud800": 1}, None),
    ],
)
def test_the_field_to_blame_is_the_first_step(body: Any, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        check_json(body)
    assert caught.value.param == param


def test_one_wrong_value_among_very_many_is_found_or_told_without_its_place() -> None:
    for num_values, place in ((MAX_LOOKED_AT // 4, "a["), (MAX_LOOKED_AT * 2, "the body")):
        with pytest.raises(ApiError, match="finite") as caught:
            check_json({"a": [[]] * num_values + [float("nan")]})
        assert str(caught.value).startswith(place)
