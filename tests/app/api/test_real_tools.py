"""Tools on the real engine with the embedded demo model, whose chat template knows none."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from grammar import SchemaValidator
from tests.app.api.harness import Server, needs_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_model]

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Is it raining in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


class Weather(BaseModel):
    """Look at the sky."""

    city: str
    is_hot: bool


@pytest.fixture
def server(real: Server) -> Server:
    return real


async def chat(server: Server, **fields: Any) -> tuple[int, Any]:
    body = {"messages": MESSAGES, "max_tokens": 300, "tools": TOOLS, "seed": 1}
    return await server.post("/v1/chat/completions", body | fields)


@pytest.mark.parametrize("seed", range(4))
async def test_a_named_function_gets_arguments_that_fit(server: Server, seed: int) -> None:
    status, reply = await chat(server, tool_choice=NAMED, seed=seed)
    assert status == 200, reply
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] == "weather"
    assert SchemaValidator(WEATHER).is_valid(json.loads(function["arguments"]))
    assert reply["structured"]["backend"]


async def test_a_schema_that_no_backend_takes_is_a_400_of_its_tool(server: Server) -> None:
    for bad in ({"$dynamicRef": "#a"}, {"$ref": "http://127.0.0.1/schema"}):
        parameters = {"type": "object", "properties": {"a": bad}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        status, reply = await chat(server, tools=tools, tool_choice="required")
        assert (status, reply["error"]["param"]) == (400, "tools"), reply
    assert (await chat(server, tool_choice=NAMED))[0] == 200


@pytest.mark.parametrize(
    "parameters",
    [{"anyOf": [{"const": "x"}]}, {"$ref": "#/$defs/text", "$defs": {"text": {"type": "string"}}}],
    ids=["anyOf", "$ref"],
)
async def test_arguments_that_can_be_no_object_are_a_400(server: Server, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    status, reply = await chat(server, tools=tools, tool_choice="required")
    assert (status, reply["error"]["param"]) == (400, "tools"), reply


async def test_arguments_that_may_be_an_object_are_one(server: Server) -> None:
    day = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]}
    parameters = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/day"}], "$defs": {"day": day}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(3):
        _, reply = await chat(
            server, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"].startswith("{")


@pytest.mark.parametrize("first", ["auto", "required"])
async def test_the_agent_loop_of_openais_client_ends_in_text(server: Server, first: Any) -> None:
    messages: list[Any] = list(MESSAGES)
    choice = first
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(
                model="demo_model",
                messages=messages,
                tools=TOOLS,
                tool_choice=choice,
                max_tokens=400,
                temperature=0,
            )
            message, choice = reply.choices[0].message, "auto"
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls
            ]
    assert message.content and len(messages) == (2 if first == "auto" else 4)


@pytest.mark.parametrize("first", ["auto", "any"])
async def test_the_agent_loop_of_anthropics_client_ends_in_text(server: Server, first: Any) -> None:
    messages: list[Any] = list(MESSAGES)
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    choice = first
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        for _ in range(3):
            reply = await client.messages.create(
                model="demo_model",
                messages=messages,
                tools=tools,
                tool_choice={"type": choice},
                max_tokens=400,
            )
            choice = "auto"
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
            messages.append({"role": "user", "content": results})
    assert reply.content[0].text and reply.stop_reason in ("end_turn", "max_tokens")
    assert len(messages) == (2 if first == "auto" else 4)


async def test_the_official_client_parses_arguments(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        reply = await client.chat.completions.parse(
            model="demo_model",
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice={"type": "function", "function": {"name": "Weather"}},
            temperature=0,
            max_tokens=600,
        )
    assert isinstance(reply.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
