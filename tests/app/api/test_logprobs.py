"""Places, names and bytes of tokens that are no whole characters, or that nobody sees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.api.replies import chat_logprobs, completion_logprobs
from app.api.text_offsets import TextOffsets, find_prompt_offsets
from engine import CompletionOutput, Logprob, SamplingParams, Tokenizer, TokenLogprobs
from tests.engine.tokenizer_folders import make_byte_level_folder

SMILE = "🙂".encode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_byte_level_folder(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer(folder)


def make_call(tokenizer: Tokenizer) -> Any:
    body = SimpleNamespace(return_tokens_as_token_ids=None)
    engine = SimpleNamespace(tokenizer=tokenizer)
    context = SimpleNamespace(engine=engine)
    return SimpleNamespace(body=body, context=context, sampling=SamplingParams(logprobs=2))


def split(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte, but special ones whole."""
    table = tokenizer.token_bytes(tokenizer.vocab_size)
    ids = []
    for part in text.replace("</s>", "|</s>|").split("|"):
        ids += tokenizer.encode(part) if part == "</s>" else [table.index(bytes([b])) for b in part.encode()]
    return ids


def part_of(token_id: int, part: bytes, logprob: float = -1.0) -> Logprob:
    return Logprob(token_id, logprob, 1, "\ufffd", part=part)


@pytest.mark.parametrize(
    ("skips_special", "expected"), [(True, [0, 1, 1, 1, 1, 2, 2, 3]), (False, [0, 1, 1, 1, 1, 2, 6, 7])]
)
def test_offsets_are_places_in_what_is_seen(
    tokenizer: Tokenizer, skips_special: bool, expected: list[int]
) -> None:
    ids = split(tokenizer, "a🙂</s>bc")
    offsets = TextOffsets(tokenizer, [], skips_special, 10)
    assert [*offsets.take(ids[:3]), *offsets.take(ids[3:])] == [10 + place for place in expected]


def test_offsets_go_on_where_the_prompt_ends(tokenizer: Tokenizer) -> None:
    first, *rest = split(tokenizer, "🙂b")
    assert TextOffsets(tokenizer, [first], True).take(rest) == [0, 0, 0, 1]


@pytest.mark.parametrize(("echo", "expected"), [("éa</s>b", [0, 0, 1, 2, 6]), ("éab", [0, 0, 1, 2, 2])])
def test_special_tokens_of_a_prompt_count_where_they_are_written(
    tokenizer: Tokenizer, echo: str, expected: list[int]
) -> None:
    assert find_prompt_offsets(tokenizer, echo, split(tokenizer, "éa</s>b")) == expected


def test_the_bytes_in_chat_are_the_tokens_own(tokenizer: Tokenizer) -> None:
    positions = [TokenLogprobs(part_of(i, SMILE[i : i + 1])) for i in range(4)]
    choice = CompletionOutput(0, "🙂", [0, 1, 2, 3], positions)
    found = chat_logprobs(make_call(tokenizer), choice)
    assert found is not None
    assert bytes(byte for entry in found["content"] for byte in entry["bytes"]) == SMILE


def test_no_rival_hides_another(tokenizer: Tokenizer) -> None:
    rivals = (
        part_of(7, b"\xf0\x9f"),
        part_of(8, b"\xf0"),
        Logprob(9, -2.0, 3, "a"),
        Logprob(10, -3.0, 4, "a"),
    )
    call, position = make_call(tokenizer), TokenLogprobs(rivals[0], rivals)
    found = completion_logprobs(call, [None, position], [split(tokenizer, "🙂")[0], 7], [0, 0])
    assert found["tokens"] == ["bytes:\\xf0", "bytes:\\xf0\\x9f"]
    expected = {"bytes:\\xf0\\x9f": -1.0, "bytes:\\xf0": -1.0, "a": -2.0, "token_id:10": -3.0}
    assert found["top_logprobs"] == [None, expected]
