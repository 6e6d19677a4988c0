"""POST /v1/completions against a FakeEngine."""

from __future__ import annotations

import pytest

from tests.app.api.harness import Server, Start, events
from tests.fakes import FakeEngine


async def complete_chunks(server: Server, **fields: object) -> list[dict]:
    return events(await server.stream("/v1/completions", {"model": "fake", "prompt": "hello"} | fields))


async def test_a_completion_has_the_openai_shape_and_sixteen_tokens(start: Start) -> None:
    server = await start(FakeEngine(reply=lambda prompt: "x" * 99))
    status, reply = await server.complete()
    assert (status, reply["object"]) == (200, "text_completion")
    assert reply["id"].startswith("cmpl-")
    assert reply["choices"][0] == {
        "index": 0,
        "text": "x" * 16,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }


@pytest.mark.parametrize("prompt", ["hello", [104, 105], ["a", "b"], [[104], [105]], ["a", [105]]])
async def test_a_prompt_is_text_or_ids_or_a_list_of_them(server: Server, prompt: object) -> None:
    status, reply = await server.complete(prompt=prompt)
    assert status == 200
    is_many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(reply["choices"]) == (len(prompt) if is_many else 1)


async def test_choices_are_numbered_through_all_prompts(server: Server) -> None:
    _, reply = await server.complete(prompt=["a", "b"], n=2, max_tokens=99)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][-1] for choice in reply["choices"]] == ["a", "a", "b", "b"]
    assert reply["usage"]["prompt_tokens"] == 2


async def test_a_stream_of_several_prompts_keeps_their_texts_apart(server: Server) -> None:
    chunks = await complete_chunks(server, prompt=["a", "b"], max_tokens=99)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "You said a", 1: "You said b"}


async def test_a_failing_prompt_ends_the_stream_of_all_with_one_error(start: Start) -> None:
    server = await start(FakeEngine(fail_after=(2, RuntimeError("boom"))))
    chunks = await complete_chunks(server, prompt=["a", "b"])
    assert [chunk for chunk in chunks if "error" in chunk] == chunks[-1:]
    assert chunks[-1]["error"]["code"] == "internal_error"


async def test_echo_puts_the_prompt_first(server: Server) -> None:
    _, reply = await server.complete(echo=True, max_tokens=99)
    assert reply["choices"][0]["text"] == "helloYou said hello"
    chunks = await complete_chunks(server, echo=True, max_tokens=99)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "helloYou said hello"


async def test_echo_with_no_tokens_scores_the_prompt(server: Server) -> None:
    _, reply = await server.complete(echo=True, max_tokens=0, logprobs=1)
    choice = reply["choices"][0]
    assert choice["text"] == "hello"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["tokens"] == list("hello")
    assert reply["usage"]["completion_tokens"] == 0


async def test_logprobs_come_as_four_lists(server: Server) -> None:
    _, reply = await server.complete(logprobs=2, max_tokens=2, echo=True)
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("helloYo")
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["top_logprobs"][-1] == {"o": -0.25, "~": -9999.0}


async def test_streamed_logprobs_have_running_offsets(server: Server) -> None:
    chunks = await complete_chunks(server, logprobs=1, max_tokens=3)
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks if c["choices"][0]["logprobs"]]
    assert offsets == [[0], [1], [2]]


async def test_prompt_logprobs_are_maps_from_token_id(server: Server) -> None:
    _, reply = await server.complete(prompt_logprobs=1)
    entries = reply["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["101"] == {"logprob": -0.25, "rank": 1, "decoded_token": "e"}


async def test_tokens_can_be_shown_as_ids(server: Server) -> None:
    _, reply = await server.complete(logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)
    assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:89"]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["", "a"], [-1], [True], [1.5], {"a": 1}, None, 7, [["a"]], ["a"] * 129]
)
async def test_a_bad_prompt_is_a_400_naming_the_field(server: Server, prompt: object) -> None:
    status, reply = await server.complete(prompt=prompt)
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert server.engine.requests == []
