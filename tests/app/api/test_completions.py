"""POST /v1/completions against a FakeEngine; places, names and bytes of its tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.api.call import Call
from app.api.completions import TextOffsets, describe_positions
from app.api.gate import RequestInfo
from app.api.protocol import CompletionRequest
from engine import Logprob, SamplingParams, Tokenizer, TokenLogprobs
from tests.app.api.harness import Server, Start, events
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.fakes import EOS, FakeEngine


async def complete_chunks(server: Server, **fields: object) -> list[dict]:
    return events(await server.stream("/v1/completions", {"model": "fake", "prompt": "hello"} | fields))


async def test_a_completion_has_the_openai_shape_and_sixteen_tokens(start: Start) -> None:
    server = await start(FakeEngine(reply=lambda prompt: "x" * 99))
    status, reply = await server.complete()
    assert (status, reply["object"]) == (200, "text_completion")
    assert reply["id"].startswith("cmpl-")
    told = {"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert reply["choices"][0] == told | dict.fromkeys(("prompt_logprobs", "token_ids", "prompt_token_ids"))


@pytest.mark.parametrize(
    "prompt", ["hello", [104, 105], ["a", "b"], [[104], [105]], ["a", [105]], [104.0], [[104.0, 105]]]
)
async def test_a_prompt_is_text_or_ids_or_a_list_of_them(server: Server, prompt: object) -> None:
    status, reply = await server.complete(prompt=prompt)
    assert status == 200
    is_many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert len(reply["choices"]) == (len(prompt) if is_many else 1)


async def test_choices_are_numbered_through_all_prompts(server: Server) -> None:
    fields = {"prompt": ["a", "b"], "n": 2, "max_tokens": 99}
    _, reply = await server.complete(**fields)
    whole = {choice["index"]: choice["text"] for choice in reply["choices"]}
    assert whole == {0: "You said a", 1: "You said a", 2: "You said b", 3: "You said b"}
    assert reply["usage"]["prompt_tokens"] == 2
    texts = dict.fromkeys(whole, "")
    for chunk in await complete_chunks(server, **fields):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == whole


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
    _, reply = await server.complete(echo=True, max_tokens=0, logprobs=1, return_token_ids=True)
    choice = reply["choices"][0]
    assert choice["text"] == "hello"
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [ord(char) for char in "hello"])
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert choice["logprobs"]["tokens"] == list("hello")
    assert reply["usage"]["completion_tokens"] == 0


async def test_what_the_unseen_token_of_a_score_was_is_not_told(start: Start) -> None:
    server = await start(FakeEngine(reply=lambda _: ""))
    _, reply = await server.complete(echo=True, max_tokens=0)
    *_, last = await complete_chunks(server, echo=True, max_tokens=0)
    for choice in (reply["choices"][0], last["choices"][0]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("field", ["max_completion_tokens", "messages", "input"])
async def test_a_field_of_another_route_is_refused(server: Server, field: str) -> None:
    status, reply = await server.complete(**{field: "x"})
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, field, "unknown_field")
    assert (await server.complete(**{field: None}))[0] == 200


async def test_logprobs_come_as_four_lists(server: Server) -> None:
    _, reply = await server.complete(logprobs=2, max_tokens=2, echo=True)
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("helloYo")
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["top_logprobs"][-1] == {"o": -0.25, "~": -9999.0}
    _, reply = await server.complete(logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)
    assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:89"]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["said"]}, {"stop": ["zz"], "n": 2}])
async def test_a_stream_tells_the_offsets_of_the_whole_reply(server: Server, fields: dict) -> None:
    fields |= {"logprobs": 0, "max_tokens": 99}
    _, reply = await server.complete(**fields)
    streamed: dict[int, list[int]] = {}
    for chunk in await complete_chunks(server, **fields):
        choice = chunk["choices"][0]
        streamed.setdefault(choice["index"], []).extend((choice["logprobs"] or {}).get("text_offset", []))
    assert [choice["logprobs"]["text_offset"] for choice in reply["choices"]] == list(streamed.values())


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}])
async def test_an_echo_of_ids_has_their_special_tokens(server: Server, fields: dict[str, Any]) -> None:
    _, reply = await server.complete(prompt=[104, EOS, 105], echo=True, max_tokens=1, logprobs=0, **fields)
    choice = reply["choices"][0]
    assert choice["text"].startswith(f"h{chr(EOS)}i")
    assert choice["logprobs"]["text_offset"][:4] == [0, 1, 2, 3]
    assert (await complete_chunks(server, prompt=[EOS], echo=True))[0]["choices"][0]["text"] == chr(EOS)


async def test_prompt_logprobs_are_maps_from_token_id(server: Server) -> None:
    _, reply = await server.complete(prompt_logprobs=1)
    entries = reply["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1]["101"] == {"logprob": -0.25, "rank": 1, "decoded_token": "e"}


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["", "a"], [-1], [2**63], [True], [1.5], {"a": 1}, [None], 7, [["a"]], ["a"] * 1025]
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def make_call(tokenizer: Tokenizer) -> Call:
    body, info = CompletionRequest(model="m", prompt="x"), RequestInfo("1")
    context: Any = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer))
    return Call(context, info, body, "1", "m", ["x"], SamplingParams(logprobs=2))


def split(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for each byte, but special ones whole."""
    table = tokenizer.token_bytes(tokenizer.vocab_size)
    ids = []
    for part in text.replace("</s>", "|</s>|").split("|"):
        ids += tokenizer.encode(part) if part == "</s>" else [table.index(bytes([b])) for b in part.encode()]
    return ids


def part_of(token_id: int, part: bytes) -> Logprob:
    return Logprob(token_id, -1.0, 1, "\ufffd", part=part)


@pytest.mark.parametrize(
    ("skips_special", "expected"), [(True, [0, 1, 1, 1, 1, 2, 2, 3]), (False, [0, 1, 1, 1, 1, 2, 6, 7])]
)
def test_offsets_are_places_in_what_is_seen(tokenizer: Tokenizer, skips_special: bool, expected: list[int]) -> None:
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
    assert TextOffsets(tokenizer).take(split(tokenizer, "éa</s>b"), echo) == expected


def test_no_rival_hides_another(tokenizer: Tokenizer) -> None:
    plain = (Logprob(9, -2.0, 3, "a"), Logprob(10, -3.0, 4, "a"))
    rivals = (part_of(7, b"\xf0\x9f"), part_of(8, b"\xf0"), *plain)
    call, position = make_call(tokenizer), TokenLogprobs(rivals[0], rivals)
    found = describe_positions(call, [None, position], [split(tokenizer, "🙂")[0], 7], [0, 0])
    assert found["tokens"] == ["bytes:\\xf0", "bytes:\\xf0\\x9f"]
    expected = {"bytes:\\xf0\\x9f": -1.0, "bytes:\\xf0": -1.0, "a": -2.0, "token_id:10": -3.0}
    assert found["top_logprobs"] == [None, expected]
