"""The API in front of the real engine with the embedded demo model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from grammar import SchemaValidator
from tests.app.api.harness import Server, events, needs_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_model]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """Bounded, because a tiny model may not find the end of a text."""

    name: str = Field(max_length=20)
    is_nice: bool


@pytest.fixture
def server(real: Server) -> Server:
    return real


async def chat(server: Server, **fields: Any) -> tuple[int, Any]:
    return await server.post("/v1/chat/completions", CHAT | fields)


def text_of(reply: Any) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


async def test_stream_and_whole_reply_have_the_same_text(server: Server) -> None:
    status, reply = await chat(server, temperature=0)
    assert status == 200 and text_of(reply)
    chunks = events(await server.stream("/v1/chat/completions", CHAT | {"temperature": 0}))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text_of(reply)
    assert chunks[-1]["choices"][0]["finish_reason"] == reply["choices"][0]["finish_reason"]


async def test_a_schema_is_kept_and_its_enforcer_named(server: Server) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
    status, reply = await chat(server, response_format=response_format, max_tokens=200, seed=1)
    assert status == 200, reply
    assert SchemaValidator(SCHEMA).is_valid(json.loads(text_of(reply)))
    assert reply["structured"]["backend"]


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        ("xgrammar", {"json": {"enum": ["red", "green"]}}),
        ("llguidance", {"choice": ["red", "green"]}),
        ("outlines_core", {"choice": ["red", "green"]}),
    ],
)
async def test_a_request_may_name_its_backend(server: Server, backend: str, wanted: dict[str, Any]) -> None:
    status, reply = await chat(server, structured_outputs=wanted | {"backend": backend}, seed=3)
    assert status == 200, reply
    assert text_of(reply).strip('"') in ("red", "green")
    assert reply["structured"]["backend"] == backend


async def test_a_schema_that_cannot_be_kept_exactly_is_refused_with_keyword_and_place(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    status, reply = await chat(server, response_format=response_format)
    assert status == 400
    assert reply["error"]["code"] == "unsupported_grammar"
    assert reply["error"]["param"] == "response_format"
    assert reply["error"]["keyword"] == "$dynamicRef"


async def test_scoring_a_prompt_gives_each_of_its_tokens_a_probability(server: Server) -> None:
    body = {"prompt": "The name is Ada.", "echo": True, "max_tokens": 0, "logprobs": 2}
    _, reply = await server.post("/v1/completions", body)
    logprobs = reply["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == body["prompt"] == reply["choices"][0]["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])


async def test_a_character_in_parts_has_its_bytes_and_its_place(server: Server) -> None:
    wanted = {"structured_outputs": {"choice": ["a🙂日b"]}}
    _, reply = await chat(server, **wanted, logprobs=True)
    parts = reply["choices"][0]["logprobs"]["content"]
    told = b"".join(bytes(part["bytes"]) for part in parts if part["token"] != "<|im_end|>")
    assert told.decode().strip() == text_of(reply) == "a🙂日b"
    body = {"prompt": "a", "logprobs": 0, "stop": ["日bc"], **wanted}
    _, whole = await server.post("/v1/completions", body)
    chunks = events(await server.stream("/v1/completions", body))
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    plain = events(await server.stream("/v1/completions", {"prompt": "a", "stop": ["日bc"], **wanted}))
    assert "".join(chunk["choices"][0]["text"] for chunk in plain) == "a🙂日b"
    offsets = [place for each in logprobs if each for place in each["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]
    assert whole["choices"][0]["text"] == "a🙂日b" and sorted(set(offsets)) == [0, 1, 2, 3, 4]


async def test_a_prompt_that_is_null_begins_a_document(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {"prompt": None, "return_token_ids": True})
    assert status == 200, reply
    assert server.engine.tokenizer.decode(reply["choices"][0]["prompt_token_ids"], False) == "<|endoftext|>"


async def test_the_official_client_parses_a_model(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        reply = await client.chat.completions.parse(
            model="demo_model",
            messages=CHAT["messages"],
            response_format=Person,
            temperature=0,
            max_tokens=400,
        )
    assert isinstance(reply.choices[0].message.parsed, Person)


async def test_tokenize_agrees_with_usage(server: Server) -> None:
    _, tokens = await server.post("/tokenize", {"messages": CHAT["messages"]})
    _, reply = await chat(server)
    assert tokens["count"] == reply["usage"]["prompt_tokens"]
    _, back = await server.post("/detokenize", {"tokens": tokens["tokens"]})
    assert "Hello! Who are you?" in back["prompt"]


async def test_a_response_keeps_its_schema_and_streams_the_same_text(server: Server) -> None:
    body = {"input": "Who is it?", "max_output_tokens": 200, "seed": 1}
    body |= {"text": {"format": {"type": "json_schema", "name": "r", "schema": SCHEMA}}}
    status, reply = await server.post("/v1/responses", body)
    assert (status, reply["status"]) == (200, "completed"), reply
    text = reply["output"][0]["content"][0]["text"]
    assert SchemaValidator(SCHEMA).is_valid(json.loads(text))
    raw = await server.stream("/v1/responses", body)
    last = json.loads(raw.removesuffix(b"\n\n").rsplit(b"\ndata: ", 1)[1])
    assert last["response"]["output"][0]["content"][0]["text"] == text
    assert last["response"]["usage"]["output_tokens"] == reply["usage"]["output_tokens"]


async def test_an_echo_repeats_the_special_tokens_that_were_written_out(server: Server) -> None:
    body = {"prompt": "a<|im_end|>b", "echo": True, "max_tokens": 3, "logprobs": 0, "temperature": 0}
    _, plain = await server.post("/v1/completions", body)
    _, bare = await server.post("/v1/completions", body | {"add_special_tokens": False})
    streamed = events(await server.stream("/v1/completions", body | {"add_special_tokens": False}))
    assert bare["choices"] == plain["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == plain["choices"][0]["text"]
    assert plain["choices"][0]["text"].startswith("a<|im_end|>b")
