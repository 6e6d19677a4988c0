"""The API in front of the real engine with the embedded demo model, whose chat template knows no tools."""

import json
from typing import Any

import anthropic
import pytest

from grammar import SchemaValidator
from tests.app.api.harness import Server, events, needs_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_model]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello! Who are you?"}], "max_tokens": 24}


COLOURS = ["red", "green"]


@pytest.fixture
def server(real: Server) -> Server:
    return real


async def chat(server: Server, **fields: Any) -> tuple[int, Any]:
    return await server.post("/v1/chat/completions", CHAT | fields)


def text_of(reply: Any) -> str:
    text: str = reply["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [("xgrammar", {"grammar": 'root ::= "red" | "green"'}), ("llguidance", {"choice": COLOURS}),
     ("outlines_core", {"choice": COLOURS})],
)
async def test_a_request_may_name_its_backend(server: Server, backend: str, wanted: dict[str, Any]) -> None:
    status, reply = await chat(server, structured_outputs=wanted | {"backend": backend}, seed=3)
    assert status == 200, reply
    assert text_of(reply).strip('"') in COLOURS
    assert reply["structured"]["backend"] == backend


async def test_a_schema_that_cannot_be_kept_exactly_is_refused_with_keyword_and_place(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}, "required": ["a"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    status, reply = await chat(server, response_format=response_format)
    told = {"code": "unsupported_grammar", "param": "response_format", "keyword": "$dynamicRef"}
    assert status == 400 and reply["error"].items() >= told.items()


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


async def test_an_echo_repeats_the_special_tokens_that_were_written_out(server: Server) -> None:
    body = {"prompt": "a<|im_end|>b", "echo": True, "max_tokens": 3, "logprobs": 0, "temperature": 0}
    _, plain = await server.post("/v1/completions", body)
    _, bare = await server.post("/v1/completions", body | {"add_special_tokens": False})
    streamed = events(await server.stream("/v1/completions", body | {"add_special_tokens": False}))
    assert bare["choices"] == plain["choices"]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == plain["choices"][0]["text"]
    assert plain["choices"][0]["text"].startswith("a<|im_end|>b")


MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Is it raining in Paris?"}]
WEATHER = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"], "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


async def call(server: Server, **fields: Any) -> tuple[int, Any]:
    body = {"messages": MESSAGES, "max_tokens": 300, "tools": TOOLS, "seed": 1}
    return await server.post("/v1/chat/completions", body | fields)


@pytest.mark.parametrize("seed", range(4))
async def test_a_named_function_gets_arguments_that_fit(server: Server, seed: int) -> None:
    status, reply = await call(server, tool_choice=NAMED, seed=seed)
    assert status == 200, reply
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] == "weather"
    assert SchemaValidator(WEATHER).is_valid(json.loads(function["arguments"]))
    assert reply["structured"]["backend"]


@pytest.mark.parametrize(
    "parameters",
    [{"anyOf": [{"const": "x"}]}, {"$ref": "#/$defs/text", "$defs": {"text": {"type": "string"}}},
     {"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}, "required": ["a"]},
     {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/schema"}}, "required": ["a"]}],
)
async def test_arguments_of_no_object_or_no_backend_are_a_400_of_the_tools(server: Server, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    status, reply = await call(server, tools=tools, tool_choice="required")
    assert (status, reply["error"]["param"]) == (400, "tools"), reply


async def test_arguments_that_may_be_an_object_are_one(server: Server) -> None:
    day = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]}
    parameters = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/day"}], "$defs": {"day": day}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    _, reply = await call(server, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (made,) = reply["choices"][0]["message"]["tool_calls"]
    assert made["function"]["arguments"].startswith("{")


@pytest.mark.parametrize("first", ["auto", "any"])
async def test_the_agent_loop_of_anthropics_client_ends_in_text(server: Server, first: Any) -> None:
    messages: list[Any] = list(MESSAGES)
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    choice = first
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        for _ in range(3):
            asked: Any = {"messages": messages, "tools": tools, "tool_choice": {"type": choice}}
            reply = await client.messages.create(model="demo_model", max_tokens=400, **asked)
            choice = "auto"
            messages.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                break
            result = {"type": "tool_result", "content": "rain"}
            messages.append({"role": "user", "content": [result | {"tool_use_id": use.id} for use in calls]})
    assert reply.content[0].text and reply.stop_reason in ("end_turn", "max_tokens")
    assert len(messages) == (2 if first == "auto" else 4)


async def test_a_prompt_that_is_too_long_is_named_as_the_route_does(server: Server) -> None:
    long = "word " * 3000
    for path, body, param in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/responses", {"input": long}, "input"),
        ("/v1/completions", {"prompt": ["a", long]}, "prompt"),
    ):
        status, reply = await server.post(path, body)
        assert (status, reply["error"]["param"]) == (400, param)
        assert "prompt is too long" in reply["error"]["message"]


async def test_a_client_can_read_what_the_tokenizer_knows(server: Server) -> None:
    status, reply = await server.get("/tokenizer_info")
    assert status == 200 and reply["tokenizer_class"] and reply["chat_template"] and reply["eos_token"]
