"""OpenAI's client and the terminal's verbs against our server: each understands what the other sends."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from engine import EngineOverloaded
from tests.app.api.harness import Server, Start
from tests.fakes import FakeEngine

MESSAGES = [{"role": "user", "content": "hello"}]


class Person(BaseModel):
    name: str
    age: int


def make_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with make_client(server) as one:
        yield one


async def test_it_chats(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=1)
    assert reply.choices[0].message.content == "You said <user>hello"
    assert reply.choices[0].logprobs.content[0].token == "Y"
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert reply._request_id
    assert [model.id async for model in client.models.list()] == ["fake"]


async def test_its_stream_helper_ends_with_a_whole_completion(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "You said <user>hello"


async def test_it_parses_a_pydantic_model_that_is_not_cut(client: openai.AsyncOpenAI, server: Server) -> None:
    fields: Any = {"model": "fake", "messages": MESSAGES, "response_format": Person}
    reply = await client.chat.completions.parse(**fields)
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
    assert server.engine.requests[-1].params.grammar.kind == "json_schema"
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(**fields, max_tokens=5)


async def test_it_completes_text(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(model="fake", prompt=["a", "b"], max_tokens=50)
    assert [choice.text for choice in reply.choices] == ["You said a", "You said b"]
    stream = await client.completions.create(model="fake", prompt="a", max_tokens=50, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "You said a"


async def test_a_full_queue_is_retried_by_it(start: Start) -> None:
    server = await start(FakeEngine(reject=EngineOverloaded("full", retry_after_s=0.01)))
    async with make_client(server).with_options(max_retries=1) as one:
        with pytest.raises(openai.InternalServerError):
            await one.chat.completions.create(model="fake", messages=MESSAGES)
    assert len(server.engine.requests) == 2
