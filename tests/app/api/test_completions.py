"""POST /v1/completions against a FakeEngine."""

from __future__ import annotations

import pytest

from app.api.replies import join_times
from engine import RequestMetrics
from tests.app.api.harness import Server, Start, events
from tests.fakes import EOS, FakeEngine


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


async def test_what_the_unseen_token_of_a_score_was_is_not_told(start: Start) -> None:
    server = await start(FakeEngine(reply=lambda _: ""))
    _, reply = await server.complete(echo=True, max_tokens=0)
    *_, last = await complete_chunks(server, echo=True, max_tokens=0)
    for choice in (reply["choices"][0], last["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


async def test_a_score_has_the_ids_of_its_prompt_alone(server: Server) -> None:
    _, reply = await server.complete(echo=True, max_tokens=0, return_token_ids=True)
    choice = reply["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [ord(char) for char in "hello"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_completion_tokens", 5),
        ("chat_template_kwargs", {"a": 1}),
        ("max_output_tokens", 5),
        ("input", "x"),
    ],
)
async def test_a_field_of_another_route_is_refused(server: Server, field: str, value: object) -> None:
    status, reply = await server.complete(**{field: value})
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, field, "unknown_field")
    assert (await server.complete(**{field: None}))[0] == 200


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


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["said"]}, {"stop": ["zz"], "n": 2}])
async def test_a_stream_tells_the_offsets_of_the_whole_reply(server: Server, fields: dict) -> None:
    fields |= {"logprobs": 0, "max_tokens": 99}
    _, reply = await server.complete(**fields)
    streamed: dict[int, list[int]] = {}
    for chunk in await complete_chunks(server, **fields):
        choice = chunk["choices"][0]
        streamed.setdefault(choice["index"], []).extend(
            (choice["logprobs"] or {"text_offset": []})["text_offset"]
        )
    assert [choice["logprobs"]["text_offset"] for choice in reply["choices"]] == list(streamed.values())


async def test_prompt_logprobs_are_maps_from_token_id(server: Server) -> None:
    _, reply = await server.complete(prompt_logprobs=1)
    entries = reply["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["101"] == {"logprob": -0.25, "rank": 1, "decoded_token": "e"}


async def test_tokens_can_be_shown_as_ids(server: Server) -> None:
    _, reply = await server.complete(logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)
    assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:89"]


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["", "a"], [-1], [2**63], [True], [1.5], {"a": 1}, [None], 7, [["a"]], ["a"] * 129],
)
async def test_a_bad_prompt_is_a_400_naming_the_field(server: Server, prompt: object) -> None:
    status, reply = await server.complete(prompt=prompt)
    assert (status, reply["error"]["param"]) == (400, "prompt")
    assert server.engine.requests == []


async def test_null_is_the_beginning_of_a_document(server: Server) -> None:
    status, reply = await server.complete(prompt=None, echo=None)
    assert status == 200, reply
    assert server.engine.requests[-1].prompt == chr(EOS)


@pytest.mark.parametrize(("fields", "status"), [({"n": 2}, 200), ({"n": 2, "best_of": 3}, 400), ({}, 400)])
async def test_best_of_may_ask_for_what_n_does(server: Server, fields: dict, status: int) -> None:
    found, reply = await server.complete(**{"best_of": 2} | fields)
    assert found == status, reply
    assert status == 200 or reply["error"]["param"] == "best_of"


async def test_metrics_are_of_all_prompts(server: Server) -> None:
    fields = {"return_metrics": True, "max_tokens": 99}
    _, reply = await server.complete(prompt=["a", "b"], **fields)
    num_tokens = reply["usage"]["completion_tokens"]
    assert reply["metrics"]["tokens_per_second"] == num_tokens - 1  # the fake engine needs a second
    chunks = await complete_chunks(server, n=2, **fields)
    assert chunks[-1]["metrics"]["tokens_per_second"] == 2 * len("You said hello") - 1


def test_times_of_several_prompts_go_from_the_first_to_the_last() -> None:
    times = [RequestMetrics(1.0, 2.0, 3.0, 8.0, 1), RequestMetrics(1.5, 1.8, 4.0, 9.0), RequestMetrics(2.0)]
    assert join_times(times) == RequestMetrics(1.0, 1.8, 3.0, 9.0, 1)
