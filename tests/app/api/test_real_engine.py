"""The API in front of the real engine with the embedded demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from app.config import AppConfig
from engine import Engine, EngineConfig
from grammar import SchemaValidator
from tests.app.api.harness import Server, events, run_server
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (Path(EngineConfig().model) / "model.safetensors").exists(), reason="the demo model is not here"
    ),
]

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with Engine(EngineConfig(num_blocks=512)) as engine, run_server(engine, AppConfig()) as running:
        yield running


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


async def test_the_same_seed_gives_the_same_text_alone_and_among_others(server: Server) -> None:
    _, alone = await chat(server, seed=7)
    together = await asyncio.gather(*(chat(server, seed=seed) for seed in range(4, 10)))
    assert text_of(together[3][1]) == text_of(alone)


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


async def test_bad_grammars_leave_the_engine_as_it_was(server: Server) -> None:
    for bad in ({"regex": "(((("}, {"grammar": "root ::="}, {"json": {"$ref": "#/nowhere"}}):
        status, reply = await chat(server, structured_outputs=bad)
        assert status == 400, reply
    assert (await chat(server))[0] == 200


async def test_a_prompt_beyond_the_model_is_a_400_with_counts(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {"prompt": "word " * 5000})
    assert status == 400
    assert "2048" in reply["error"]["message"]


async def test_a_token_beyond_the_vocabulary_is_a_400(server: Server) -> None:
    status, _ = await server.post("/v1/completions", {"prompt": [5, 10**6]})
    assert status == 400


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
    offsets = [place for each in logprobs if each for place in each["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]
    assert whole["choices"][0]["text"] == "a🙂日b" and sorted(set(offsets)) == [0, 1, 2, 3, 4]


async def test_a_prompt_that_is_null_begins_a_document(server: Server) -> None:
    status, reply = await server.post("/v1/completions", {"prompt": None, "return_token_ids": True})
    assert status == 200, reply
    assert server.engine.tokenizer.decode(reply["choices"][0]["prompt_token_ids"], False) == "<|endoftext|>"


async def test_a_repeated_prompt_is_served_from_the_cache(server: Server) -> None:
    messages = [{"role": "user", "content": "cache me " * 20}]
    await chat(server, messages=messages)
    _, reply = await chat(server, messages=messages)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def test_n_choices_differ_and_end(server: Server) -> None:
    _, reply = await chat(server, n=4, seed=5, temperature=1.5)
    texts = {choice["message"]["content"] for choice in reply["choices"]}
    assert len(reply["choices"]) == 4 and len(texts) > 1


async def test_a_dropped_stream_gives_its_blocks_back(server: Server) -> None:
    body = CHAT | {"stream": True, "max_tokens": 1500, "ignore_eos": True}
    async with server.client.post(server.url + "/v1/chat/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await wait_until(lambda: server.engine.stats().num_running == 0)
    stats = server.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


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


async def test_metrics_have_values_of_the_engine(server: Server) -> None:
    await chat(server)
    async with server.client.get(server.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = [line for line in lines if line.startswith("troupe:time_to_first_token_seconds_count")]
    assert float(counts[0].rsplit(" ", 1)[1]) >= 1


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
