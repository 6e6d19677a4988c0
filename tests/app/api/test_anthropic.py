"""POST /v1/messages: what Anthropic's own client makes of it, its events, and what it refuses."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import anthropic
import pytest

from engine import EngineDead, EngineOverloaded
from tests.app.api.harness import Server, Start
from tests.fakes import FakeEngine, FakeTokenizer

HELLO = [{"role": "user", "content": "hello"}]
BODY = {"model": "fake", "max_tokens": 100, "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOL = {"name": "weather", "description": "tells it", "input_schema": SCHEMA}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
TEXT_5 = {"type": "text", "text": 5}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class OutspokenTokenizer(FakeTokenizer):
    """Its chat template writes its variables into the prompt."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        known = ("tools", "add_generation_prompt", "continue_final_message")
        told = {name: value for name, value in kwargs.items() if name not in known}
        return str(told or "") + super().apply_chat_template(messages, **kwargs)


@pytest.fixture
async def knowing(start: Start) -> Server:
    """Its chat template knows tools."""
    return await start(FakeEngine(tokenizer=FakeTokenizer(knows_tools=True)))


@pytest.fixture
async def client(server: Server) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with make_client(server) as one:
        yield one


def make_client(server: Server, key: str = "x") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=server.url, api_key=key, max_retries=0, _strict_response_validation=True
    )


async def send(server: Server, **fields: Any) -> tuple[int, Any]:
    return await server.post("/v1/messages", BODY | fields)


async def stream(server: Server, **fields: Any) -> list[Any]:
    """The events, whose names are checked."""
    raw = await server.stream("/v1/messages", BODY | fields)
    assert raw.endswith(b"\n\n") and b"[DONE]" not in raw
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_the_official_client_reads_a_message(client: anthropic.AsyncAnthropic, server: Server) -> None:
    message = await client.messages.create(**BODY, system="be kind", extra_body={"temperature": 0.5, "top_k": 7})
    request = server.engine.requests[-1]
    assert request.prompt == "<system>be kind\n<user>hello\n<assistant>"
    assert (request.params.temperature, request.params.top_k, request.params.max_tokens) == (0.5, 7, 100)
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.content[0].text == "You said <user>hello"
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(request.prompt)
    assert message.usage.output_tokens == 20


async def test_the_official_client_follows_a_stream(client: anthropic.AsyncAnthropic) -> None:
    texts = []
    async with client.messages.stream(**BODY) as events:
        async for text in events.text_stream:
            texts.append(text)
        message = await events.get_final_message()
    assert len(texts) > 5 and "".join(texts) == message.content[0].text == "You said <user>hello"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 20)


async def test_events_come_in_order(server: Server) -> None:
    kinds = list(dict.fromkeys(event["type"] for event in await stream(server)))
    blocks = [f"content_block_{name}" for name in ("start", "delta", "stop")]
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]


async def test_the_official_client_reads_a_forced_call(start: Start) -> None:
    server = await start(FakeEngine(record=CALL))
    async with make_client(server) as client:
        message = await client.messages.create(**BODY, **FORCED)
        async with client.messages.stream(**BODY, **FORCED) as events:
            async for _ in events:
                pass
            streamed = await events.get_final_message()
    assert server.engine.requests[-1].params.grammar.kind == "tool_calls"
    for one in (message, streamed):
        (block,) = one.content
        assert (one.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
        assert block.input == {"city": "Paris"}


@pytest.mark.parametrize("city", [r'"\ud800"', "1e999", "9" * 5000])
async def test_arguments_that_no_json_holds_are_an_error_and_no_empty_call(start: Start, city: str) -> None:
    server = await start(FakeEngine(record=CALL.replace('"Paris"', city)))
    status, reply = await send(server, **FORCED, max_tokens=9999)
    assert (status, reply["error"]["type"]) == (500, "api_error")
    assert "arguments that no JSON can hold" in reply["error"]["message"]
    *_, last = await stream(server, **FORCED, max_tokens=9999)
    assert last["error"] == reply["error"]


async def test_results_of_tools_reach_the_template(knowing: Server) -> None:
    result = RESULT | {"content": [{"type": "text", "text": "sun"}]}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, USE]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    for asked, end in ((messages, "<tool>sun\n<user>so?\n<assistant>"), (messages[:2], "<assistant>")):
        end = f"<tool_call>\n{{\"name\": \"weather\", \"arguments\": {{}}}}\n</tool_call>\n{end}"
        status, reply = await send(knowing, messages=asked, tools=[TOOL])
        assert status == 200, reply
        assert knowing.engine.requests[-1].prompt.endswith(f"<assistant>{end}")


@pytest.mark.parametrize("form", [lambda line, rest: f"{line}\n{rest}", lambda *texts: list(map(text_block, texts))])
async def test_the_client_s_billing_line_does_not_reach_the_prompt(server: Server, form: Any) -> None:
    prompts = set()
    for mark in "ab":
        await send(server, system=form(f"x-anthropic-billing-header: v=2; cch={mark};", "be kind"))
        prompts.add(server.engine.requests[-1].prompt)
    assert prompts == {"<system>be kind\n<user>hello\n<assistant>"}
    await send(server, system=form("x-anthropic-billing-header: a", ""))
    assert server.engine.requests[-1].prompt.removeprefix("<system>\n") == "<user>hello\n<assistant>"


SERVICE = {"type": "web_search_20250305", "name": "web_search"}


async def test_tools_that_the_client_runs_have_their_published_arguments_and_those_of_a_service_are_left_out(
    knowing: Server,
) -> None:
    kinds = {"bash_20250124": "bash", "text_editor_20250728": "edit", "memory_20250818": "memory"}
    tools = [SERVICE, *({"type": kind, "name": name} for kind, name in kinds.items()), TOOL | {"name": "w" * 128}]
    status, headers, _ = await knowing.ask("/v1/messages", "POST", json=BODY | {"tools": tools})
    assert status == 200 and "tools[0].type='web_search_20250305'" in headers["x-troupe-warning"]
    request = knowing.engine.requests[-1]
    assert request.prompt.startswith("".join(f"<tool>{name}\n" for name in [*kinds.values(), "w" * 128]))
    assert all(name in request.params.grammar.text for name in ("restart", "view_range", "old_path"))
    tools = [SERVICE, *({**TOOL, "name": f"t{i}"} for i in range(200)), TOOL | {"description": 5}]
    status, reply = await send(knowing, tools=tools)
    assert (status, reply["error"]["message"]) == (400, "tools[201].description must be a text")


async def test_the_model_sees_that_a_tool_has_failed(knowing: Server) -> None:
    for is_error, told in ((True, "Error: no wind"), (False, "no wind"), (None, "no wind")):
        content = [RESULT | {"content": "no wind", "is_error": is_error}]
        status, reply = await send(knowing, messages=[*HELLO, {"role": "user", "content": content}])
        assert status == 200, reply
        assert knowing.engine.requests[-1].prompt.endswith(f"<tool>{told}\n<assistant>")


async def test_a_schema_is_enforced(server: Server) -> None:
    for asked in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT}):
        assert (await send(server, **asked))[0] == 200
        assert server.engine.requests[-1].params.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [({"max_tokens": 4}, "max_tokens", None), ({"stop_sequences": ["said"]}, "stop_sequence", "said")],
)
async def test_the_end_has_its_reason(
    server: Server, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    _, reply = await send(server, **fields)
    end = next(event for event in await stream(server, **fields) if event["type"] == "message_delta")
    for found in (reply, end["delta"]):
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


async def test_tokens_are_counted_without_generating(client: anthropic.AsyncAnthropic, server: Server) -> None:
    count = await client.messages.count_tokens(model="fake", messages=HELLO, system="be kind")
    assert count.input_tokens == len("<system>be kind\n<user>hello\n<assistant>")
    assert server.engine.requests == []


@pytest.mark.parametrize(
    "fields", [{"thinking": {"type": "disabled"}}, {"output_config": {"effort": "low"}}], ids=["off", "low"]
)
async def test_what_changes_the_prompt_changes_its_count(start: Start, fields: dict[str, Any]) -> None:
    server = await start(FakeEngine(tokenizer=OutspokenTokenizer()))
    async with make_client(server) as client:
        plain = await client.messages.count_tokens(model="fake", messages=HELLO)
        count = await client.messages.count_tokens(model="fake", messages=HELLO, **fields)
    _, reply = await send(server, **fields)
    usage = reply["usage"]
    assert count.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count.input_tokens > plain.input_tokens


@pytest.mark.parametrize("budget", [True, "1024", 1024.5, 1023, 0, -1])
async def test_a_budget_of_thoughts_is_a_number_of_tokens(server: Server, budget: Any) -> None:
    status, reply = await send(server, thinking={"type": "enabled", "budget_tokens": budget})
    assert status == 400
    expected = f"thinking.budget_tokens={budget!r} must be an integer of at least 1024"
    assert reply["error"]["message"] == expected
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert (await send(server, thinking=thinking, max_tokens=1025))[0] == 200
    assert (await server.post("/v1/messages/count_tokens", BODY | {"thinking": thinking}))[0] == 200


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("You", "<user>hello\n<assistant>You"),
        ([{"type": "text", "text": "You said"}], "<user>hello\n<assistant>You said"),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}], "<user>hello\n<assistant>"),
        (" ", "<user>hello\n<assistant>"),
    ],
)
async def test_the_models_last_message_goes_on(server: Server, content: Any, end: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    status, reply = await send(server, messages=messages)
    assert status == 200, reply
    assert server.engine.requests[-1].prompt == end


async def test_the_system_may_speak_among_the_messages(server: Server) -> None:
    for content in ("be brief", [{"type": "text", "text": "be brief"}]):
        status, _ = await send(server, messages=[*HELLO, {"role": "system", "content": content}], system="s")
        assert status == 200
        expected = "<system>s\n<user>hello\n<system>be brief\n<assistant>"
        assert server.engine.requests[-1].prompt == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (RESULT | {"content": 5}, "messages[0].content[0].content must be a text or a list"),
        (RESULT | {"content": [TEXT_5]}, "messages[0].content[0].content[0].text must be"),
        (RESULT | {"tool_use_id": 5}, "messages[0].content[0].tool_use_id must be a text"),
        (RESULT | {"is_error": "yes"}, "messages[0].content[0].is_error='yes' must be true or false"),
        (USE | {"name": ["x"]}, "messages[0].content[0].name must be a text"),
        (USE | {"id": None}, "messages[0].content[0].id must be a text"),
        (USE | {"input": [1]}, "messages[0].content[0].input must be an object"),
        ({"tool_choice": {"type": ["auto"]}, "tools": [TOOL]}, "tool_choice.type="),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type='any' needs tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name must be a text"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name must be"),
        ({"tools": [TOOL | {"description": 5}]}, "tools[0].description must be"),
        ({"tools": [TOOL | {"input_schema": 5}]}, "tools[0].input_schema must be"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema must have"),
        ({"system": [TEXT_5]}, "system[0].text must be a text"),
        ({"thinking": {"type": "on"}}, "thinking.type='on'"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display='all' must be one of"),
        (FORCED | {"tool_choice": {"type": "any", "name": "x"}}, "tool_choice.name is not a field"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort='huge'"),
        ({"output_config": {"schema": SCHEMA}}, "output_config.schema is not a field"),
        ({"output_config": {"format": {}}}, "output_config.format must be"),
        (
            {"output_config": {"format": FORMAT}, "output_format": FORMAT | {"schema": {"type": "object"}}},
            "output_config.format and output_format, its older name, ask for different things",
        ),
        ({"tools": [{"name": "f", "parameters": SCHEMA}]}, "tools[0].input_schema must be a JSON Schema"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role='tool'"),
        ({"stop_sequences": ["x"] * 20}, "stop_sequences has 20 entries"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens=3 must not exceed max_tokens=2"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].source must be base64 with a media_type",
        ),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools[0].type='web_search_20250305' is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not a field"),
        ({"output_format": {"type": "xml"}}, "output_config.format must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type='all' must be one of auto,"),
    ],
)
async def test_a_wrong_value_is_named_by_its_place(server: Server, fields: dict[str, Any], said: str) -> None:
    if "type" in fields:
        role = "user" if fields["type"] == "tool_result" else "assistant"
        fields = {"messages": [{"role": role, "content": [fields]}]}
    for more in ({}, {"system": "s"} if "system" not in fields else {}):
        status, reply = await send(server, **fields, **more)
        assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error")
        assert reply["error"]["message"].startswith(said)


async def test_a_request_has_its_id_in_a_header_and_in_errors(server: Server) -> None:
    for fields, status in (({}, 200), ({"messages": []}, 400)):
        found, headers, reply = await server.ask("/v1/messages", "POST", json=BODY | fields)
        assert (found, bool(headers["request-id"])) == (status, True)
        assert status == 200 or reply["request_id"] == headers["request-id"]


async def test_a_refused_thread_tells_the_client_to_send_the_whole_conversation(server: Server) -> None:
    _, reply = await send(server, thread={"type": "create"})
    assert reply["error"]["details"]["error_code"] == "thread_unsupported_request"


async def test_the_key_may_come_in_anthropics_header(start: Start) -> None:
    server = await start(api_key=("secret",))
    async with make_client(server, "secret") as right, make_client(server, "wrong") as wrong:
        await right.messages.create(**BODY)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await wrong.messages.create(**BODY)
    assert caught.value.body["error"]["type"] == "authentication_error"


async def test_a_full_queue_is_overloaded_and_an_error_in_a_stream_an_event(start: Start) -> None:
    server = await start(FakeEngine(reject=EngineOverloaded("full", retry_after_s=3)))
    for fields in ({}, {"stream": True}):
        status, reply = await send(server, **fields)
        assert (status, reply["error"]["type"]) == (503, "overloaded_error")
    server = await start(FakeEngine(fail_after=(3, EngineDead("gone"))))
    last = (await stream(server))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_the_official_client_keeps_files(client: anthropic.AsyncAnthropic) -> None:
    files = client.beta.files
    file = await files.upload(file=("a.txt", b"some notes", "text/plain"))
    assert (file.type, file.filename, file.size_bytes, file.mime_type) == ("file", "a.txt", 10, "text/plain")
    assert await files.retrieve_metadata(file.id) == file
    assert [each async for each in await files.list(limit=1)] == [file]
    block = {"type": "document", "source": {"type": "file", "file_id": file.id}}
    messages = [{"role": "user", "content": [block]}]
    assert (await client.beta.messages.create(model="fake", max_tokens=9, messages=messages)).content
    assert await (await files.download(file.id)).read() == b"some notes"
    assert (await files.delete(file.id)).type == "file_deleted"


async def test_the_official_client_lists_the_model(client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list()
    (model,) = page.data
    assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
    assert (model.lifecycle, model.max_input_tokens) == ("active", model.max_tokens)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("nope")
    assert caught.value.body["type"] == "error"
    assert isinstance(model.created_at, datetime) and model.created_at.tzinfo is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")
    assert await client.models.retrieve("fake") == model
