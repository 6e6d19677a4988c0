"""The prompt's log-probabilities come to the stream in parts and are told as a whole."""

from __future__ import annotations

import pytest

from engine import Logprob, RequestOutput, TokenLogprobs
from engine.core.detokenizer import TextDelta
from engine.messages import RequestTokens
from engine.output_stream import OutputStream
from tests.engine.test_output_stream import is_silent, make_stream, put


def put_prompt(stream: OutputStream, *token_ids: int | None) -> None:
    """A part of the prompt's log-probabilities."""
    part = [None if i is None else TokenLogprobs(Logprob(i, -1.0, 1)) for i in token_ids]
    stream.put(0, RequestTokens("r", [], None, part), TextDelta("r", "", [], None, part), 11.0)


def read_prompt(output: RequestOutput) -> list[int | None] | None:
    found = output.prompt_logprobs
    return None if found is None else [None if each is None else each.token.token_id for each in found]


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
async def test_prompt_logprobs_come_in_parts_and_are_told_as_a_whole(kind: str) -> None:
    stream = make_stream(kind, prompt_logprobs=0)
    put_prompt(stream, None)
    assert await is_silent(stream)
    put_prompt(stream, 2)
    assert await is_silent(stream)
    put(stream, "a", 5, finish="length")
    assert read_prompt(await stream.get()) == [None, 2]


async def test_prompt_logprobs_that_begin_anew_replace_those_of_before() -> None:
    stream = make_stream(prompt_logprobs=0)
    put_prompt(stream, None)
    put_prompt(stream, None, 2)
    put(stream, "a", 5)
    assert read_prompt(await stream.get()) == [None, 2]


async def test_prompt_logprobs_of_half_a_prompt_are_not_told() -> None:
    stream = make_stream(prompt_logprobs=0)
    put_prompt(stream, None)
    put(stream, "", finish="abort")
    assert read_prompt(await stream.get()) is None
