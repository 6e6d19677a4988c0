"""What a body may hold is bounded by its values, not by its texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.errors import ApiError
from app.api.messages import read_messages
from app.api.value_counter import MAX_JSON_VALUES, ValueCounter
from tests.app.api.harness import Server

texts = st.text(st.sampled_from(',[{"\\\n:é\0 a'), max_size=8)
values = st.recursive(
    texts | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
)


def count_signs(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(count_signs, inner))


@given(value=values, is_ascii=st.booleans(), size=st.integers(1, 40))
def test_the_count_is_that_of_the_value_however_the_text_is_cut(
    value: Any, is_ascii: bool, size: int
) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    counter = ValueCounter()
    for at in range(0, len(text), size):
        counter.feed(text[at : at + size])
    assert counter.num_values == count_signs(value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_a_character_that_holds_the_byte_of_a_quote_hides_nothing(encoding: str) -> None:
    text = json.dumps(["\u0122"] + [[]] * 9, ensure_ascii=False).encode(encoding)
    assert len(json.loads(text)) == 10
    counter = ValueCounter()
    for at in range(len(text)):
        counter.feed(text[at : at + 1])
    assert counter.num_values >= 19


async def test_commas_in_a_text_are_no_values(server: Server) -> None:
    text = '",[ ' * (MAX_JSON_VALUES // 2 + 1)
    assert (await server.chat(messages=[{"role": "user", "content": text}], max_tokens=1))[0] == 200


def test_the_arguments_of_all_calls_count_together() -> None:
    def read(num_values: int) -> object:
        function = {"name": "f", "arguments": json.dumps({"a": [0] * num_values})}
        call = {"id": "a", "type": "function", "function": function}
        return read_messages([{"role": "assistant", "tool_calls": [call] * 3}] * 2)

    assert read(1_000)
    with pytest.raises(ApiError, match="200000 commas and brackets") as caught:
        read(MAX_JSON_VALUES // 5)
    assert caught.value.status == 413
