"""POST /v1/responses: its object, its events, and its errors."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseUsage
from pydantic import BaseModel

from app.api.batch import answer_row
from app.api.context import ApiContext
from app.config import AppConfig
from app.store import Limits, Store, objects
from engine import EngineDead, EngineOverloaded, InvalidRequest
from tests.app.api.harness import Server, Start, limit_pages, run_server
from tests.fakes import FakeEngine, FakeTokenizer

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORMAT = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
TEXT_EVENTS = [
    "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
    "output_text.done", "content_part.done", "output_item.done", "completed",
]


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as one:
        yield one


async def respond(server: Server, **fields: Any) -> tuple[int, Any]:
    return await server.post("/v1/responses", {"model": "fake", "input": "hello"} | fields)


async def stream(server: Server, **fields: Any) -> list[Any]:
    """The events, whose names and numbers are checked."""
    return read_events(await server.stream("/v1/responses", {"model": "fake", "input": "hello"} | fields), 0)


def read_events(raw: bytes, first: int | None = None) -> list[Any]:
    assert raw.endswith(b"\n\n") and b"[DONE]" not in raw
    events = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        first = event["sequence_number"] if first is None else first
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", first + number)
        events.append(event)
    return events


async def test_a_response_reports_its_default_settings(server: Server) -> None:
    _, reply = await respond(server)
    told = {name: reply[name] for name in ("temperature", "top_p", "tool_choice", "parallel_tool_calls")}
    assert told == {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "parallel_tool_calls": True}
    _, reply = await respond(server, tools=[TOOL], tool_choice="required", temperature=0.5)
    assert (reply["temperature"], reply["tool_choice"]) == (0.5, "required")
    assert reply["parallel_tool_calls"] is False  # the model is not shown its tools


async def test_a_row_of_a_batch_may_ask_for_a_response() -> None:
    context = ApiContext(FakeEngine(), AppConfig())  # type: ignore[arg-type]
    row = {"custom_id": "a", "url": "/v1/responses", "body": {"input": "hello"}}
    answer = (await answer_row(context, row))["response"]
    assert (answer["status_code"], answer["body"]["object"]) == (200, "response")
    assert answer["body"]["output"][0]["content"][0]["text"] == "You said <user>hello"
    wrong = await answer_row(context, row | {"body": {"input": "hello", "max_output_tokens": -1}})
    assert "max_output_tokens=-1" in wrong["response"]["body"]["error"]["message"]
    wrong = await answer_row(context, row | {"url": ["/v1/responses"]})
    assert wrong["response"]["body"]["error"]["param"] == "url"


async def test_a_text_is_answered_by_a_message(server: Server) -> None:
    status, reply = await respond(server, instructions="be kind", max_output_tokens=100, metadata={"a": "b"})
    assert status == 200, reply
    assert server.engine.requests[-1].prompt == "<system>be kind\n<user>hello\n<assistant>"
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "fake")
    assert reply["id"].startswith("resp_")
    (item,) = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": "You said <user>hello", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert reply["usage"]["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    told = {"instructions": "be kind", "max_output_tokens": 100, "metadata": {"a": "b"}}
    told |= {"previous_response_id": None, "store": True}
    assert {name: reply[name] for name in told} == told
    usage = ResponseUsage.model_validate(reply["usage"], strict=True)
    assert (usage.total_tokens, usage.output_tokens) == (usage.input_tokens + 20, 20)


async def test_events_come_in_order_and_tell_the_whole_text(server: Server) -> None:
    events = await stream(server)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == TEXT_EVENTS
    assert "".join(e["delta"] for e in events if "delta" in e) == "You said <user>hello"
    item = events[2]["item"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    final = events[-1]["response"]
    assert final["id"] == events[0]["response"]["id"] and events[0]["response"]["status"] == "in_progress"
    assert final["output"] == [events[-2]["item"]]
    assert final["usage"]["output_tokens"] == 20


async def test_log_probabilities_of_the_text_come_whole_and_in_events(server: Server) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, reply = await respond(server, **asked)
    entries = reply["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "You said <user>hello"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    events = await stream(server, **asked)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    told = [entry for event in deltas for entry in event["logprobs"]]
    assert told == entries == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    body = {"input": "hello", "tools": [TOOL], "tool_choice": "required", **asked}
    status, headers, _ = await server.ask("/v1/responses", "POST", json=body)
    assert status == 200 and "logprobs were left out" in headers["x-troupe-warning"]


async def test_a_cut_answer_is_incomplete(server: Server) -> None:
    _, reply = await respond(server, max_output_tokens=4)
    events = await stream(server, max_output_tokens=4)
    for response in (reply, events[-1]["response"]):
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["type"] == "response.incomplete"


async def test_a_conversation_may_be_the_input(server: Server) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        {"role": "user", "content": "again"},
    ]
    status, _ = await respond(server, input=items)
    assert status == 200
    told = "<system>be brief\n<user>hi\n<assistant>ho\n<user>again\n<assistant>"
    assert server.engine.requests[-1].prompt == told


WEATHER = {"type": "function", "name": "weather"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [WEATHER]}


@pytest.mark.parametrize("choice", [WEATHER, ALLOWED], ids=["named", "allowed"])
async def test_a_forced_call_is_an_item(start: Start, choice: Any) -> None:
    server = await start(FakeEngine(record=CALL))
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    _, reply = await respond(server, **fields)
    (item,) = reply["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "weather", "completed")
    assert json.loads(item["arguments"]) == {"city": "Paris"} and item["call_id"].startswith("call_")
    events = await stream(server, **fields)
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item["arguments"] and len(deltas) > 5
    assert events[-1]["response"]["output"][0]["arguments"] == item["arguments"]


async def test_results_of_calls_go_back_in(start: Start) -> None:
    engine = FakeEngine(record=f"ok <tool_call>\n{CALL}\n</tool_call>", tokenizer=FakeTokenizer(knows_tools=True))
    server = await start(engine)
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    status, reply = await respond(server, input=items, tools=[TOOL])
    assert status == 200, reply
    assert "<tool>rain\n" in engine.requests[-1].prompt
    assert [item["type"] for item in reply["output"]] == ["message", "function_call"]
    kinds = [event["type"] for event in await stream(server, input=items, tools=[TOOL])]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


USER = {"role": "user", "content": "x"}
ASKED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
TOLD = {"type": "function_call_output", "call_id": "1", "output": "x"}
IMAGE = [{"type": "input_image", "image_url": 5}]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input=(list of 0) must have at least 1 item"),
    ({"input": 3}, "input=3 must be a text or a list"),
    ({"input": [{"type": "nonsense"}]}, "input[0]: items of type 'nonsense' are not supported"),
    ({"input": [{"role": "user", "content": IMAGE}]}, "input[0].content[0].image_url must have the url"),
    ({"input": [{"type": "reasoning"}, {"role": "bogus", "content": "x"}]}, "input[1].role='bogus' must be"),
    ({"input": [USER, ASKED | {"arguments": "["}]}, "input[1].arguments must be the text of a JSON object"),
    ({"input": [USER, ASKED, ASKED | {"name": 5}]}, "input[2].name must be a text"),
    ({"input": [USER, ASKED, ASKED | {"call_id": None}]}, "input[2].call_id must be a text"),
    ({"input": [ASKED, TOLD | {"output": 5}]}, "input[1].output must be a text or a list"),
    ({"input": [ASKED, TOLD | {"call_id": 5}]}, "input[1].call_id must be a text"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name must be 1 to 128"),
    ({"tools": [TOOL, TOOL | {"parameters": 5}]}, "tools[1].parameters must be a JSON Schema"),
    ({"tools": [{"name": "f"}]}, 'tools[0] must be {"type": "function", "name": ..., "parameters": ...}'),
    ({"tools": [TOOL | {"input_schema": {"type": "object"}}]}, "tools[0].input_schema is not a field of a function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type='web_search' is not supported"),
    ({"tools": [TOOL], "tool_choice": {"name": "f"}}, 'tool_choice must be {"type": "function", "name":'),
    ({"tools": [TOOL], "tool_choice": WEATHER | {"a": {}}}, "tool_choice.a is not a field of this route"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens=0 must be an integer"),
    ({"max_output_tokens": 2**63}, "max_output_tokens=9223372036854775808 must be"),
    ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens=3 must not exceed max_output_tokens=2"),
    ({"temperature": -3}, "temperature=-3.0 must be"), ({"top_p": "1"}, "top_p='1' must be a number"),
    ({"top_logprobs": 21}, "top_logprobs=21 must be"), ({"truncation": "some"}, "truncation='some' must be"),
    ({"guided_jsonn": {}}, "guided_jsonn is not a field of this route; use text"),
    *(({name: 5}, f"{name} is not a field of this route") for name in ("max_tokens", "max_completion_tokens", "n")),
    ({"messages": [USER]}, "messages is not a field"), ({"structured": {}}, "structured is not a field"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort='much' must be 'none', 'minimal', "),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode='pro' is not supported; it can be standard"),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens is not a field of this route"),
    ({"text": {"format": {"type": "json_schema", "name": "p"}}}, "text.format"),
    ({"text": {"format": FORMAT["format"] | {"schema": {"type": "nonsense"}}}}, ""),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type="),
    ({"text": {"format": {"name": "p", "schema": {"type": "object"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_object", "schema": {"type": "object"}}}}, "text.format.schema"),
    ({"previous_response_id": "resp_1"}, "there is no response 'resp_1'"), ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_field_is_a_400_that_begins_with_its_place(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    status, reply = await respond(server, **fields)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply
    assert reply["error"]["message"].startswith(message), reply["error"]["message"]
    assert reply["error"]["param"].split(".")[0] in fields
    assert server.engine.requests == []


async def test_a_field_that_asks_for_nothing_passes(server: Server) -> None:
    for value in (None, 0):
        status, reply = await respond(server, top_logprobs=value, background=False, previous_response_id=None)
        assert status == 200, reply


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_response_is_kept_and_another_goes_on_with_it(server: Server, is_stream: bool) -> None:
    if is_stream:
        first = (await stream(server))[-1]["response"]
    else:
        _, first = await respond(server, input="hello")
    assert await server.get(f"/v1/responses/{first['id']}") == (200, first)
    _, second = await respond(server, input="and?", previous_response_id=first["id"])
    assert server.engine.requests[-1].prompt == (
        "<user>hello\n<assistant>You said <user>hello\n<user>and?\n<assistant>"
    )
    assert second["previous_response_id"] == first["id"]
    _, items = await server.get(f"/v1/responses/{second['id']}/input_items")
    assert [item["content"] for item in items["data"]] == [[{"type": "input_text", "text": "and?"}]]
    assert (await server.ask(f"/v1/responses/{first['id']}", "DELETE"))[2]["deleted"] is True
    assert (await server.get(f"/v1/responses/{first['id']}"))[0] == 404


async def test_a_chain_survives_a_restart_and_ends_where_a_response_was_deleted(tmp_path: Path) -> None:
    last = None
    ids = []
    for number in range(3):
        store = Store(tmp_path)
        async with run_server(FakeEngine(), AppConfig(), store) as server:
            status, reply = await respond(server, input=f"q{number}", previous_response_id=last)
            assert status == 200 and server.engine.requests[-1].prompt.count("<user>") == number + 1 + number
            ids.append(last := reply["id"])
            if number == 2:
                assert (await server.ask(f"/v1/responses/{ids[0]}", "DELETE"))[0] == 200
                status, reply = await respond(server, input="x", previous_response_id=last)
                assert status == 400 and ids[0] in reply["error"]["message"]
        store.close()


async def test_a_full_store_refuses_before_it_answers() -> None:
    store = Store(limits=Limits(max_bytes=400_000))
    await store.run(objects.put, "", "file", "f", {}, data=b"x" * 95_000)
    async with run_server(FakeEngine(), AppConfig(), store) as server:
        status, reply = await respond(server, input="hello")
        assert (status, reply["error"]["code"]) == (507, "store_full") and server.engine.requests == []
        assert (await respond(server, input="hello", store=False))[0] == 200


async def test_a_response_that_the_disk_had_no_room_for_is_written_later() -> None:
    store = Store()
    async with run_server(FakeEngine(), AppConfig(), store) as server:
        await store.run(limit_pages, 1)
        status, lost = await respond(server, input="word " * 2000)
        assert status == 200
        for request in (server.get(f"/v1/responses/{lost['id']}"), respond(server)):
            status, refusal = await request
            assert status == 507 and "the disk of the data folder (--data-dir) is full" in refusal["error"]["message"]
        await store.run(limit_pages, 10_000)
        assert await server.get(f"/v1/responses/{lost['id']}") == (200, lost)


async def test_only_what_may_be_kept_is_found_and_only_with_its_key(start: Start) -> None:
    server = await start(api_key=("a", "b"))
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    _, kept = await server.post("/v1/responses", {"input": "x"}, headers=mine)
    _, dropped = await server.post("/v1/responses", {"input": "x", "store": False}, headers=mine)
    assert (await server.get(f"/v1/responses/{kept['id']}", headers=other))[0] == 404
    assert (await server.get(f"/v1/responses/{dropped['id']}", headers=mine))[0] == 404
    status, reply = await server.post(
        "/v1/responses", {"input": "x", "previous_response_id": kept["id"]}, headers=other
    )
    assert (status, reply["error"]["param"]) == (400, "previous_response_id")


async def test_a_refusal_of_the_engine_comes_before_any_event_with_this_routes_names(start: Start) -> None:
    refusal = InvalidRequest("max_tokens=9 leaves no room", "max_tokens")
    server = await start(FakeEngine(reject=refusal))
    for is_stream in (False, True):
        status, reply = await respond(server, stream=is_stream)
        assert (status, reply["error"]["param"]) == (400, "max_output_tokens")
        assert reply["error"]["message"] == "max_output_tokens=9 leaves no room"
    server.engine.reject = EngineOverloaded("full", retry_after_s=1)
    status, reply = await respond(server, stream=True)
    assert (status, reply["error"]["code"]) == (503, "engine_overloaded")


async def test_an_error_in_mid_stream_is_the_last_event(start: Start) -> None:
    server = await start(FakeEngine(fail_after=(3, EngineDead("crash"))))
    event = (await stream(server))[-1]
    assert (event["type"], event["code"]) == ("error", "engine_dead")


async def test_the_official_client_parses_a_model_whole_and_streamed(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    reply = await client.responses.parse(model="fake", input="hello", text_format=Person)
    assert reply.output_parsed == Person(name="Ada", age=36)
    assert server.engine.requests[-1].params.grammar.kind == "json_schema"
    _, plain = await respond(server, text=FORMAT)
    assert plain["text"]["format"]["schema"] == SCHEMA
    async with client.responses.stream(model="fake", input="hello", text_format=Person) as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.output_parsed == Person(name="Ada", age=36)


# fields that OpenAI's clients and Open Responses require
REQUIRED = [
    "background", "completed_at", "created_at", "error", "frequency_penalty", "id", "incomplete_details",
    "instructions",
    "max_output_tokens", "max_tool_calls", "metadata", "model", "object", "output", "parallel_tool_calls",
    "presence_penalty", "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier",
    "status", "store", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage",
]


async def test_a_response_has_every_required_field_and_takes_the_sampling_of_chat(server: Server) -> None:
    asked: Any = {"stop_token_ids": [1], "ignore_eos": True, "logit_bias": {"5": 1}, "skip_special_tokens": False}
    asked |= {"truncation": "auto", "reasoning": {"effort": "low", "context": "all_turns"}, "max_tool_calls": 3}
    asked |= {"include": ["web_search_call.action.sources"], "client_metadata": {"turn_id": "x"}}
    body = {"input": "hello", "tools": [{"type": "function", "name": "f"}], **asked}
    status, headers, reply = await server.ask("/v1/responses", "POST", json=body)
    assert status == 200 and not set(REQUIRED) - reply.keys(), reply
    assert reply["tools"] == [{**body["tools"][0], "description": None, "parameters": None, "strict": True}]
    assert reply["reasoning"] == {"effort": "low", "summary": None, "context": "all_turns"}
    assert all(name in headers["x-troupe-warning"] for name in ("include 'web_search", "client_metadata", "truncation"))
    params = server.engine.requests[-1].params
    assert (params.ignore_eos, params.stop_token_ids, params.logit_bias) == (True, (1,), {5: 1})


TURNS: list[Any] = [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "id": "x"},
    {"role": "user", "content": "c"},
]


async def test_input_items_come_in_pages_with_ids_of_their_own(server: Server) -> None:
    _, reply = await respond(server, input=[*TURNS, TURNS[1]])
    place = f"/v1/responses/{reply['id']}/input_items"
    _, whole = await server.get(f"{place}?order=asc")
    parts = [item["content"][0] for item in whole["data"]]
    assert [(part["type"], part["text"]) for part in parts] == [
        ("input_text", "a"), ("output_text", "b"), ("input_text", "c"), ("output_text", "b")
    ]
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 4 and ids[1] == "x"
    _, page = await server.get(f"{place}?limit=2")
    assert [item["id"] for item in page["data"]] == ids[:1:-1] and page["has_more"]
    _, page = await server.get(f"{place}?limit=2&after={page['last_id']}")
    assert [item["id"] for item in page["data"]] == ids[1::-1] and not page["has_more"]
    for wrong in ("limit=0", "limit=101", "order=up", "after=y"):
        status, refused = await server.get(f"{place}?{wrong}")
        assert (status, refused["error"]["param"]) == (400, wrong.split("=")[0])
    status, _ = await respond(server, input=[{"id": ids[0]}, TURNS[2]])
    assert status == 200 and server.engine.requests[-1].prompt == "<user>a\n<user>c\n<assistant>"
    status, refused = await respond(server, input=[{"type": "item_reference", "id": "y"}])
    assert (status, refused["error"]["code"]) == (404, "item_not_found")


async def test_a_stored_response_is_streamed_again(client: openai.AsyncOpenAI, start: Start) -> None:
    server = await start(FakeEngine(record=f"ok <tool_call>\n{CALL}\n</tool_call>", tokenizer=FakeTokenizer(True)))
    for fields in ({}, {"tools": [TOOL]}, {"max_output_tokens": 3}):
        original = await stream(server, **fields)
        place = f"/v1/responses/{original[-1]['response']['id']}?stream=true"
        again = read_events((await server.get(place))[1].encode())

        def squeeze(events: list[Any]) -> list[Any]:
            """The events without their numbers, with the deltas of an item joined."""
            found: list[Any] = []
            for event in events:
                delta, bare = event.get("delta", ""), {n: v for n, v in event.items() if n != "sequence_number"}
                if found and delta and found[-1]["type"] == event["type"]:
                    found[-1]["delta"] += delta
                else:
                    found.append(bare)
            return found

        assert squeeze(again) == squeeze(original)
        _, rest = await server.get(f"{place}&starting_after=2")
        assert json.loads(rest.split("data: ")[1].split("\n")[0]) == again[3]


async def test_a_running_response_can_be_cancelled(start: Start) -> None:
    server = await start(FakeEngine(step_s=0.01, reply=lambda prompt: "x" * 5000))
    body = {"input": "hello", "stream": True}
    async with server.client.post(f"{server.url}/v1/responses", json=body) as response:
        first = json.loads((await response.content.readuntil(b"\n\n")).split(b"data: ")[1])
        identity = first["response"]["id"]
        _, cancelled = await server.post(f"/v1/responses/{identity}/cancel", {})
        last = read_events(await response.read())[-1]["response"]
    assert cancelled["status"] == "cancelled" and last == cancelled
    assert await server.post(f"/v1/responses/{identity}/cancel", {}) == (200, cancelled)
    _, reply = await respond(server, max_output_tokens=2)
    assert (await server.post(f"/v1/responses/{reply['id']}/cancel", {}))[0] == 400
    assert (await server.post("/v1/responses/resp_x/cancel", {}))[0] == 404


async def test_the_tokens_of_an_input_are_counted(server: Server) -> None:
    for fields in ({"input": "hello"}, {"input": TURNS, "instructions": "be kind", "tools": [TOOL]}):
        _, counted = await server.post("/v1/responses/input_tokens", fields)
        _, reply = await respond(server, **fields)
        assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}


PATCH = {"type": "custom", "name": "patch", "description": "d"}
AGENT = {"type": "namespace", "name": "agents", "tools": [{**TOOL, "name": "close"}]}
SERVICES = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "tool_search", "execution": "client"}]


async def test_tools_of_every_type_are_taken_or_named_in_a_warning(start: Start) -> None:
    calls = (
        '{"name": "agents__close", "arguments": {"a": 1}}',
        '{"name": "patch", "arguments": {"input": "a\\n\\"\\ud83d\\ude00"}}',
    )
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    server = await start(FakeEngine(record=text, tokenizer=FakeTokenizer(knows_tools=True)))
    lark = PATCH | {"name": "l", "format": {"type": "grammar", "syntax": "lark", "definition": "start: start?"}}
    regex = PATCH | {"name": "r", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}}
    body = {"input": "hello", "tools": [TOOL, AGENT, PATCH, regex, lark, *SERVICES]}
    status, headers, reply = await server.ask("/v1/responses", "POST", json=body)
    assert status == 200, reply
    told = headers["x-troupe-warning"]
    assert all(name in told for name in ("tools[4]", "web_search", "image_generation", "tool_search"))
    request = server.engine.requests[-1]
    assert request.prompt.startswith("<tool>weather\n<tool>agents__close\n<tool>patch\n<tool>r\n<user>")
    assert "^(?:a|b)$" in request.params.grammar.text
    function, custom = reply["output"]
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "close", "agents")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", 'a\n"😀')
    events = await stream(server, **body)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == custom["input"] and len(deltas) > 2
    results = [{"type": f"{name}_output", "call_id": item["call_id"], "output": name} for name, item in
               (("function_call", function), ("custom_tool_call", custom))]
    status, _ = await respond(server, input=[TURNS[0], function, custom, *results], tools=body["tools"])
    assert status == 200 and "<tool>function_call\n<tool>custom_tool_call\n" in server.engine.requests[-1].prompt
    assert (await respond(server, tools=[lark]))[0] == 200 and (await respond(server, tools=SERVICES))[0] == 400
    for choice in ({"type": "function", "name": "close", "namespace": "agents"}, {"type": "custom", "name": "patch"}):
        assert (await respond(server, tools=body["tools"], tool_choice=choice))[0] == 200


async def test_a_local_shell_is_called_by_its_own_item(start: Start) -> None:
    server = await start(FakeEngine(record='{"name": "local_shell", "arguments": {"command": ["ls", "-l"]}}'))
    fields: Any = {"tools": [{"type": "local_shell"}], "tool_choice": "required", "parallel_tool_calls": False}
    _, reply = await respond(server, **fields)
    (call,) = reply["output"]
    assert (call["type"], call["action"]["command"]) == ("local_shell_call", ["ls", "-l"])
    kinds = [event["type"].removeprefix("response.") for event in await stream(server, **fields)]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    replayed = read_events((await server.get(f"/v1/responses/{reply['id']}?stream=true"))[1].encode())
    assert [event["type"].removeprefix("response.") for event in replayed] == kinds
    result = {"type": "local_shell_call_output", "id": call["call_id"], "output": "a.txt"}
    status, _ = await respond(server, input=[TURNS[0], call, result])
    assert status == 200 and "Result of local_shell: a.txt" in server.engine.requests[-1].prompt


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"type": "web_search_call", "status": "completed", "action": {"query": "q"}}, '"query": "q"'),
        ({"type": "tool_search_call", "call_id": "1", "arguments": {"query": "q"}}, "tool_search"),
        ({"type": "tool_search_output", "call_id": "1", "tools": [{"name": "t9"}]}, "t9"),
        ({"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}}, '"ls"'),
        ({"type": "local_shell_call_output", "id": "1", "output": "a.txt"}, "a.txt"),
        ({"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "a.txt", "outcome": {}}]}, "a.txt"),
        ({"type": "apply_patch_call_output", "call_id": "1", "status": "failed", "output": "no file"}, "no file"),
        ({"type": "apply_patch_call_output", "call_id": "1", "status": "completed"}, "completed"),
        ({"type": "mcp_list_tools", "tools": [{"name": "t9"}]}, "t9"),
        ({"type": "additional_tools", "tools": [{"name": "t9"}]}, ""),
        ({"type": "compaction", "encrypted_content": "x"}, ""),
    ],
)
async def test_items_of_other_services_become_text(server: Server, item: Any, told: str) -> None:
    status, headers, reply = await server.ask("/v1/responses", "POST", json={"input": [*TURNS, item]})
    assert status == 200, reply
    assert told in server.engine.requests[-1].prompt
    assert bool(told) != (item["type"] in headers.get("x-troupe-warning", ""))
