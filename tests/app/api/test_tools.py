"""Tools: forced by the grammar, parsed from text, and rejected if invalid."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from app.api.messages import read_messages, write_as_text
from app.api.protocol import ChatRequest
from app.api.tools.custom import to_function
from app.api.tools.lark_regex import NotRegular, to_regex
from app.api.tools.use import ToolUse, explain, read_choice, read_tools, use_tools
from app.template_facts import TemplateFacts
from grammar import GrammarCompiler, GrammarError, GrammarSpec, UnsupportedGrammar, list_tool_styles
from tests.app.api.harness import CHAT, Server, Start, events
from tests.fakes import FakeEngine, FakeTokenizer
from tests.grammar.vocabularies import accepts, make_byte_vocabulary

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "weather in Paris?"}]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CITY["additionalProperties"] = False


def tool(name: str = "weather", parameters: Any = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS = [tool(), tool("clock", None)]
INPUT_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "clock")]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '{"name": "weather", "arguments": {"city": "a \\"}{ \\\\ b"}}'
TWO = f'[{CALL}, {{"name": "clock", "arguments": {{}}}}]'
ARGUMENTS = {"city": 'a "}{ \\ b'}


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.fixture
async def forced(start: Start) -> Server:
    """Its engine answers every grammar with one call."""
    return await start(FakeEngine(record=CALL))


@pytest.fixture
async def knowing(start: Start) -> Server:
    """Its chat template knows tools; its engine writes content and calls two of them."""
    text = "Let me < see.\n" + tagged(CALL, '{"name": "clock", "arguments": {}}') + "\n"
    tokenizer = FakeTokenizer(knows_tools=True)
    return await start(FakeEngine(reply=lambda prompt: text, record=text, tokenizer=tokenizer))


def reader_of(spec: GrammarSpec | None) -> Callable[[Any], bool]:
    """Return a function that checks whether a grammar accepts a value as JSON."""
    assert spec is not None
    vocabulary = make_byte_vocabulary()
    compiled = GrammarCompiler(vocabulary).compile(spec)
    return lambda value: accepts(compiled.matcher(), vocabulary, json.dumps(value))


def reader_of_last(server: Server) -> Callable[[Any], bool]:
    return reader_of(server.engine.requests[-1].params.grammar)


def collect(chunks: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Join the content, calls and end of a stream as a client does."""
    words, end, calls = "", "", []
    for chunk in chunks:
        choice = chunk["choices"][0]
        words += choice["delta"].get("content") or ""
        end = choice["finish_reason"] or end
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                calls.append(part)
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return words, calls, end


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_is_in_the_message(forced: Server, choice: Any) -> None:
    status, reply = await forced.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert status == 200, reply
    message = reply["choices"][0]["message"]
    assert (message["content"], reply["choices"][0]["finish_reason"]) == (None, "tool_calls")
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_") and "index" not in call
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    takes = reader_of_last(forced)
    assert takes(json.loads(CALL)) and not takes(json.loads(TWO))
    assert takes({"name": "clock", "arguments": {}}) is (choice == "required")
    assert not takes({"name": "clock", "arguments": {"city": "x"}})


@pytest.mark.parametrize(("parallel", "knows_tools"), [({}, True), ({"parallel_tool_calls": True}, False)])
async def test_parallel_calls_are_in_the_model_s_form_or_an_array(
    start: Start, parallel: dict[str, Any], knows_tools: bool
) -> None:
    written = tagged(CALL, '{"name": "clock", "arguments": {}}') if knows_tools else TWO
    server = await start(FakeEngine(record=written, tokenizer=FakeTokenizer(knows_tools=knows_tools)))
    _, reply = await server.chat(tools=TOOLS, tool_choice="required", **parallel)
    calls = reply["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    assert len({call["id"] for call in calls}) == 2
    spec = server.engine.requests[-1].params.grammar
    assert accepts(GrammarCompiler(make_byte_vocabulary()).compile(spec).matcher(), make_byte_vocabulary(), written)
    _, again, end = collect(await server.chat_chunks(tools=TOOLS, tool_choice="required", **parallel))
    assert [call["function"] for call in again] == [call["function"] for call in calls]
    assert end == "tool_calls"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT | {"tools": TOOLS, "tool_choice": "required"}),
        ("/v1/messages", CHAT | {"max_tokens": 99, "tools": INPUT_TOOLS, "tool_choice": {"type": "any"}}),
    ],
)
async def test_a_model_that_is_not_shown_its_tools_calls_one(
    forced: Server, path: str, fields: dict[str, Any]
) -> None:
    status, reply = await forced.post(path, fields)
    assert status == 200, reply
    takes = reader_of_last(forced)
    assert takes(json.loads(CALL)) and not takes(json.loads(TWO))


async def test_references_within_parameters_still_lead_somewhere(forced: Server) -> None:
    parameters = {
        "type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}, "$ref": {"const": {"$ref": "#/x"}}},
        "required": ["tree"], "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    status, reply = await forced.chat(tools=[tool("grow", parameters)], tool_choice="required")
    assert status == 200, reply
    takes = reader_of_last(forced)
    assert takes({"name": "grow", "arguments": {"tree": [[], [[]]], "$ref": {"$ref": "#/x"}}})
    assert not takes({"name": "grow", "arguments": {"tree": [1]}})


async def test_streamed_arguments_come_in_pieces_after_id_and_name(forced: Server) -> None:
    chunks = await forced.chat_chunks(tools=TOOLS, tool_choice=NAMED)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert parts[0]["id"] and parts[0]["function"] == {"name": "weather", "arguments": "{"}
    assert all(set(part) == {"index", "function"} for part in parts[1:])
    # clients exist that read only the first part of a chunk
    assert len(parts) == sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks) > 10
    words, (call,), end = collect(chunks)
    assert (words, end) == ("", "tool_calls")
    assert call["function"]["arguments"] == CALL[CALL.index('{"city') : -1]


async def test_a_call_cut_short_ends_with_length(forced: Server) -> None:
    fields = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 45}
    _, (call,), end = collect(await forced.chat_chunks(**fields))
    _, reply = await forced.chat(**fields)
    assert end == reply["choices"][0]["finish_reason"] == "length"
    assert call["function"] == reply["choices"][0]["message"]["tool_calls"][0]["function"]
    assert CALL[:45].endswith(call["function"]["arguments"]) and call["function"]["arguments"]


@pytest.mark.parametrize(
    "text",
    [
        "no call at all <tool_cal", "<tool_call>\nnot json\n</tool_call> and on",
        tagged('{"name": "clock", "arguments": [1]}'), tagged('{"name": ["clock"], "arguments": {}}'),
        "<tool_call>" + "[" * 1500, "<tool_call>" * 3,
    ],
)
async def test_what_is_no_call_stays_text(knowing: Server, text: str) -> None:
    knowing.engine.record = text
    _, reply = await knowing.chat(tools=TOOLS)
    message = reply["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == (text, False)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert collect(await knowing.chat_chunks(tools=TOOLS)) == (text, [], "stop")


async def test_none_leaves_the_tools_out(knowing: Server) -> None:
    _, reply = await knowing.chat(tools=TOOLS, tool_choice="none")
    assert "<tool>" not in knowing.engine.requests[-1].prompt
    assert "<tool_call>" in reply["choices"][0]["message"]["content"]


WEATHER_CALL = {"name": "weather", "arguments": '{"city": "Pâris"}'}
HISTORY = [
    *MESSAGES,
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": WEATHER_CALL}]},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]


async def test_results_of_calls_reach_a_template_that_knows_them(knowing: Server) -> None:
    status, _ = await knowing.chat(messages=HISTORY, tools=TOOLS)
    assert status == 200
    assert "<tool>rain\n" in knowing.engine.requests[-1].prompt


async def test_a_template_without_tools_gets_calls_and_results_as_text(forced: Server) -> None:
    said = {"role": "user", "content": "and now?"}
    messages = [*HISTORY, {"role": "tool", "tool_call_id": "2", "content": "?"}, said]
    for path, body in (("/v1/chat/completions", {"tools": TOOLS, "tool_choice": NAMED}), ("/tokenize", {})):
        status, reply = await forced.post(path, {"messages": messages} | body)
        assert status == 200, reply
    assert forced.engine.requests[-1].prompt == (
        "<user>weather in Paris?\n"
        '<assistant>{"name": "weather", "arguments": {"city": "Pâris"}}\n'
        "<user>Result of weather: rain\nResult: ?\nand now?\n<assistant>"
    )
    assert reply["count"] == len(forced.engine.requests[-1].prompt)


def test_content_beside_a_call_stays_and_turns_alternate() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "assistant", "content": ""},
        *({"role": "user", "content": content} for content in "bc"),
    ]
    written = '{"name": "f", "arguments": {}}'
    told = [("assistant", f"Let me see.\n{written}\n{written}"), ("user", "Result of f: x"), ("assistant", "")]
    told += [("user", "b"), ("user", "c")]
    assert [(one["role"], one["content"]) for one in write_as_text(messages)] == told
    assert "tool_calls" in messages[0]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"tools": TOOLS}),
        ("/v1/chat/completions", {"tools": TOOLS, "stream": True, "tool_choice": "auto"}),
        ("/v1/chat/completions", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
        ("/v1/messages", {"tools": INPUT_TOOLS, "max_tokens": 99}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "clock"}]}),
    ],
)
async def test_auto_without_a_template_for_tools_answers_in_text_with_a_warning(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    body = fields if "input" in fields else CHAT | fields
    status, headers, reply = await server.ask(path, "POST", json=body)
    assert status == 200, reply
    assert "knows no tools" in headers["x-troupe-warning"]
    told = str(reply).replace('"', "'")
    assert "'tool_calls'" not in told and "tool_use" not in told
    assert server.engine.requests[-1].prompt == "<user>hello\n<assistant>"


async def test_tools_that_are_shown_or_forced_or_off_need_no_warning(knowing: Server, forced: Server) -> None:
    for server, choice in ((knowing, "auto"), (forced, "required"), (forced, "none")):
        body = CHAT | {"tools": TOOLS, "tool_choice": choice}
        status, headers, _ = await server.ask("/v1/chat/completions", "POST", json=body)
        assert (status, headers.get("x-troupe-warning")) == (200, None)


WRONG: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}]}, {"tools": [{"type": "retrieval"}]}, {"tools": [tool("two words")]},
    {"tools": [tool("x" * 129)]}, {"tools": [tool(), tool()]},
    {"tools": [tool(f"t{i}") for i in range(1025)]}, {"tools": "weather"},
    *({"tools": [tool(parameters=schema)]} for schema in ("text", {"type": "array"})),
    *({"tools": [tool(parameters={"properties": value})]} for value in ([], None, 5)),
    {"tools": [tool(parameters={"type": ["object", 7]})]},
    {"tools": [tool(parameters={"properties": {"a": {"enum": ["x" * 10] * 40_000}}})]},
    {"tools": TOOLS, "tool_choice": "always"}, {"tools": TOOLS, "tool_choice": {"type": "function"}},
    {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"tools": TOOLS, "tool_choice": 3}, {"tool_choice": "required"},
]


@pytest.mark.parametrize("fields", WRONG)
async def test_a_hostile_tool_is_a_400_and_reaches_no_engine(server: Server, fields: dict[str, Any]) -> None:
    status, reply = await server.chat(**{"tool_choice": "required"} | fields)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reply["error"]["param"] in ("tools", "tool_choice")
    assert server.engine.requests == []


@pytest.mark.parametrize(
    "call",
    ["x", {"id": "1"},
     {"id": "1", "function": {"name": "f", "arguments": "[1]"}},
     {"id": "1", "function": {"name": "f", "arguments": '{"a" 1'}},
     {"id": 1, "function": {"name": "f", "arguments": ""}}],
)
async def test_a_malformed_call_in_the_history_is_a_400(knowing: Server, call: Any) -> None:
    status, reply = await knowing.chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert (status, reply["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
async def test_a_history_of_other_servers_is_read(knowing: Server, arguments: Any) -> None:
    given = [("0", arguments), ("1", None)]
    calls = [{"id": identity, "function": {"name": "clock", "arguments": each}} for identity, each in given]
    results = [{"role": "tool", "tool_call_id": "0", "content": None}, {"role": "tool", "tool_call_id": "1"}]
    history = [{"role": "assistant", "content": None, "tool_calls": calls}, *results]
    assert [call["function"]["arguments"] for call in read_messages(history)[0]["tool_calls"]] == [{"a": 1}, {}]
    status, reply = await knowing.chat(messages=history)
    assert status == 200, reply


async def test_a_tool_of_a_service_beside_others_is_left_out_with_a_warning(knowing: Server) -> None:
    foreign = [{"type": "web_search", "web_search": {}}, {"type": "builtin_function", "builtin": {"name": "$x"}}]
    body = CHAT | {"tools": [*foreign, *TOOLS]}
    status, headers, reply = await knowing.ask("/v1/chat/completions", "POST", json=body)
    assert status == 200 and "tools[1].type='builtin_function'" in headers["x-troupe-warning"], reply
    assert (await knowing.chat(tools=foreign))[0] == 400


def test_arguments_that_a_limit_cut_anywhere_come_back_as_far_as_they_go() -> None:
    whole = r'{"path": "a.txt", "n": -12.5e3, "t": "\n\ud83d\ude00 \\u1 {", "l": [1, {"x": true}], "z": {}}'

    def read(text: str) -> Any:
        call = {"id": "1", "function": {"name": "write", "arguments": text}}
        (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
        return message["tool_calls"][0]["function"]["arguments"]

    expected = json.loads(whole)
    assert read(whole[:14]) == {"path": "a.tx"} and read(whole[:-2])["l"] == expected["l"]
    for length in range(len(whole) + 1):
        found = read(whole[:length])
        *complete, _ = found.items() if found else [()]
        assert list(found) == list(expected)[: len(found)] and dict(complete).items() <= expected.items()
        assert expected["t"].startswith(found.get("t", ""))


@pytest.mark.parametrize("limit", range(1, 40, 6))
async def test_the_last_chunk_only_ends_the_choice(knowing: Server, forced: Server, limit: int) -> None:
    for server, choice in ((knowing, "auto"), (forced, "required")):
        fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": limit}
        chunks = await server.chat_chunks(**fields)
        assert chunks[-1]["choices"][0]["delta"] == {}
        words, calls, _ = collect(chunks)
        _, reply = await server.chat(**fields)
        message = reply["choices"][0]["message"]
        assert (message["content"] or "", len(message.get("tool_calls", ()))) == (words, len(calls))
        assert server is knowing or not words


PATCH = """start: begin hunk+ end
begin: "*** Begin Patch" LF  // as in Codex' apply_patch
end.2: "*** End Patch" LF?
?hunk: add
  | "*** Delete File: " name LF
add: "*** Add File: " name LF line+
name: /(.+)/
line: ("+" | "\\t") /[^\\/"\\n]*/ LF -> added
%import common.LF
"""


def test_a_lark_grammar_is_enforced_in_the_string_of_a_call() -> None:
    asked = {"type": "grammar", "syntax": "lark", "definition": PATCH}
    function = to_function(("tools", 0), {"name": "patch", "format": asked})
    assert function is not None
    read = reader_of(GrammarSpec.json_schema(function["parameters"]))
    good = "*** Begin Patch\n*** Add File: a.txt\n+one\n\ttwo\n*** Delete File: b\n*** End Patch\n"
    assert read({"input": good}) and read({"input": good[:-1]})
    wrongs = (("+one", "one"), ("+one", '+"one'), ("one", "o/ne"), ("a.txt", ""), ("Begin", "begin"), ("b\n", "b"))
    for old, new in wrongs:
        assert not read({"input": good.replace(old, new)}), new


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('start: "(" start? ")"', "the rule start is recursive"), ("start: a", "no rule a"), ('start: "a"i', "case"),
        ('start: "a"\n%ignore /x/', "%ignore"), ("start: /a/i", "flags 'i'"), ("start: (/a/", "not closed"),
        ("start: " + "(" * 20_000, "levels"), ('start: "a"~3', "~"), ("start: &", "'&'"),
        ("".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"\nstart: r0', "more than 50000"),
    ],
)
def test_a_lark_grammar_that_is_not_regular_is_told_apart(text: str, reason: str) -> None:
    with pytest.raises(NotRegular, match=re.escape(reason)):
        to_regex(text)


async def test_a_custom_tool_gets_a_text(start: Start) -> None:
    record = '{"name": "patch", "arguments": {"input": "a\\n\\"b"}}'
    server = await start(FakeEngine(record=record))
    custom = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
    fields = {"tools": [tool(), custom], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
    _, reply = await server.chat(**fields)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": 'a\n"b'})
    deltas = [chunk["choices"][0]["delta"] for chunk in await server.chat_chunks(**fields)]
    parts = [part["custom"]["input"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(parts) == 'a\n"b' and len(parts) > 3
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    status, _ = await server.chat(messages=[*history, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}])
    assert status == 200 and record in server.engine.requests[-1].prompt
    wrong = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "x"}}}}
    assert (await server.chat(tools=[wrong]))[1]["error"]["param"] == "tools"


HERMES = TemplateFacts(True, list_tool_styles()["hermes"])


def require(tools: list[dict[str, Any]], choice: Any = "required", template: TemplateFacts = HERMES) -> ToolUse:
    body = ChatRequest(model="m", messages=MESSAGES, tools=tools, tool_choice=choice, parallel_tool_calls=True)
    use = use_tools(read_tools(tools), read_choice(choice, True), body, template)
    assert use is not None
    return use


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
PAIR = {"type": "array", "items": [{"type": "boolean"}], "additionalItems": False, "minItems": 1}
ANCHORED = {"properties": {"p": {"$ref": "#e"}}, "$defs": {"e": {"$anchor": "e", "enum": ["first"]}}}
BESIDE_REF = {
    "properties": {"p": {"$ref": "#/definitions/e", "maxLength": 1}},  # which means nothing in draft 7
    "definitions": {"e": {"enum": ["ab", "b"]}},
}
OLD_DEMAND = {
    "dependencies": {"enum": {"$ref": "#/definitions/z"}}, "definitions": {"z": {"required": ["z"]}},
    "properties": {"enum": {}, "z": {}},
}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        ({"$schema": DRAFT_7, "properties": {"p": PAIR}}, {"p": [True]}, {"p": [1]}),
        (ANCHORED, {"p": "first"}, {"p": "second"}),
        ({"$schema": DRAFT_7, **BESIDE_REF}, {"p": "ab"}, {"p": "c"}),
        ({"$schema": DRAFT_7, **OLD_DEMAND}, {"enum": 1, "z": 1}, {"enum": 1}),
    ],
)
def test_each_tool_keeps_to_its_own_draft_and_names(parameters: Any, right: Any, wrong: Any) -> None:
    closed = {"type": "object", "additionalProperties": False} | parameters
    other = ANCHORED | {"type": "object", "$defs": {"e": {"$anchor": "e", "enum": ["second"]}}}
    new = {"properties": {"p": {"prefixItems": [{"type": "null"}], "items": False}}, "required": ["p"]}
    tools = [tool("one", closed), tool("two", other), tool("three", new | {"type": "object"})]
    takes = reader_of(require(tools, template=TemplateFacts()).spec)
    for name, arguments, expected in (
        ("one", right, True), ("one", wrong, False), ("three", {"p": [None]}, True), ("three", {"p": [1]}, False)
    ):
        assert takes([{"name": name, "arguments": arguments}]) == expected


@pytest.mark.parametrize(
    ("more", "has_others"),
    [
        ({}, False), ({"additionalProperties": True}, True), ({"minProperties": 2}, True),
        ({"anyOf": [{"required": ["a"]}, {"required": ["z"]}]}, True), ({"required": ["z"]}, True),
    ],
)
def test_arguments_are_the_listed_ones_unless_the_schema_asks_for_others(more: Any, has_others: bool) -> None:
    """Models that are not trained to call tools write unlisted names without end."""
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner}} | more
    takes = reader_of(require([tool("f", schema)], template=TemplateFacts()).spec)
    assert takes([{"name": "f", "arguments": {"a": {"b": 1}, "z": 1}}]) == has_others
    assert takes([{"name": "f", "arguments": {"a": {"b": 1}}}]) or has_others
    assert has_others or not takes([{"name": "f", "arguments": {"a": {"b": 1, "z": 1}}}])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, True), ('{"name": "weather", "arguments": {"city": 5}}', False),
        ('{"name": "other", "arguments": {}}', False), (CALL[:-5], False), ('"weather"', False),
    ],
)
async def test_forced_calls_are_validated_by_each_tool_s_own_schema(start: Start, text: str, expected: bool) -> None:
    server = await start(FakeEngine(record=text))
    _, reply = await server.chat(tools=TOOLS, tool_choice="required")
    assert reply["structured"]["valid"] is expected


async def test_a_call_cut_by_a_stop_string_is_not_to_be_carried_out(forced: Server) -> None:
    for stop, reason in ((None, "tool_calls"), ("city", "stop")):
        _, reply = await forced.chat(tools=TOOLS, tool_choice="required", stop=stop)
        assert reply["choices"][0]["finish_reason"] == reason


def allow(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_leave_no_others() -> None:
    forced = require(TOOLS, allow("required", "clock"))
    assert [tool.name for tool in forced.tools] == ["clock"] and forced.is_forced
    auto = require(TOOLS, allow("auto", "clock", "weather"))
    assert len(auto.tools) == 2 and not auto.is_forced


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (allow("required", "other"), "'other', which is not among the tools"),
        (allow("none", "clock"), '"auto" or "required"'),
        (allow("auto"), "with a tool"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools must be"),
        (allow("auto") | {"allowed_tools": {"mode": "auto", "tools": ["clock"]}}, "tool_choice must be"),
    ],
)
async def test_allowed_tools_that_are_none_are_refused(server: Server, choice: Any, message: str) -> None:
    status, reply = await server.chat(tools=TOOLS, tool_choice=choice)
    assert (status, reply["error"]["param"]) == (400, "tool_choice")
    assert message in reply["error"]["message"]


BROKEN = {"type": "object", "properties": {"p": {"type": "nonsense"}}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
async def test_a_malformed_schema_is_reported_with_its_tool(server: Server, choice: Any) -> None:
    tools = [tool(), tool("broken", BROKEN)]
    status, reply = await server.chat(tools=tools, tool_choice=choice)
    error = reply["error"]
    assert (status, error["param"], error["pointer"]) == (400, "tools", "/properties/p/type")
    assert error["message"].startswith("tool 'broken': the schema is malformed at /properties/p/type")


@pytest.mark.parametrize("depth", [40, 400])
async def test_a_schema_that_is_too_deep_is_reported_with_its_tool(server: Server, depth: int) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    status, reply = await server.chat(tools=[tool(), tool("deep", schema)])
    assert (status, reply["error"]["param"]) == (400, "tools")
    assert reply["error"]["message"] == "tool 'deep': the JSON Schema is nested deeper than 64 levels"


def test_a_keyword_without_enforcer_is_reported_with_its_tool() -> None:
    use = require([tool("one", {}), tool("two", {})])
    error = UnsupportedGrammar("/tools/1/parameters/properties/a", "$dynamicRef", "why not")
    told = explain(error, use)
    assert str(told) == "tool 'two': '$dynamicRef' at /properties/a is not supported: why not"
    assert told.details["pointer"] == "/properties/a" and told.code == "unsupported_grammar"
    assert str(explain(GrammarError("other"), use)) == "other"


@pytest.mark.parametrize("is_strict", [True, False, None])
async def test_a_schema_that_cannot_be_enforced_is_refused_only_for_a_strict_tool(
    knowing: Server, is_strict: bool | None
) -> None:
    hard = {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}
    given = tool("hard", hard)
    given["function"]["strict"] = is_strict
    status, headers, reply = await knowing.ask("/v1/chat/completions", "POST", json=CHAT | {"tools": [*TOOLS, given]})
    if is_strict:
        assert (status, reply["error"]["pointer"]) == (400, "/properties/a")
    else:
        assert status == 200 and "'hard' are any object" in headers["x-troupe-warning"]


async def test_a_model_whose_form_of_calls_is_unknown_is_refused_by_name(start: Start) -> None:
    class Silent(FakeTokenizer):
        def write_calls(self, calls: Any) -> str:
            return "".join(call["function"]["name"] for call in calls)

    server = await start(FakeEngine(record=CALL, tokenizer=Silent(knows_tools=True)))
    status, reply = await server.chat(tools=TOOLS)
    assert status == 400 and "the model 'fake' writes tool calls could not be read" in reply["error"]["message"]
    status, reply = await server.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert status == 200 and reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_the_grammar_of_the_same_tools_is_built_once() -> None:
    """Clients send their tools with each request."""
    for choice in ("auto", "required"):
        first, second = require(TOOLS, choice), require(TOOLS, choice)
        assert first.spec is second.spec


async def test_functions_are_tools_under_their_older_names(knowing: Server, forced: Server) -> None:
    functions = [each["function"] for each in TOOLS]
    status, reply = await forced.chat(functions=functions, function_call={"name": "weather"})
    message = reply["choices"][0]["message"]
    assert status == 200 and "tool_calls" not in message
    assert message["function_call"]["name"] == "weather"
    assert json.loads(message["function_call"]["arguments"]) == ARGUMENTS
    assert reply["choices"][0]["finish_reason"] == "function_call"
    parts = [each["choices"][0] for each in events(await forced.stream(
        "/v1/chat/completions", CHAT | {"functions": functions, "function_call": {"name": "weather"}}
    ))]
    pieces = [part["delta"].get("function_call", {}) for part in parts]
    assert "".join(piece.get("arguments", "") for piece in pieces) == message["function_call"]["arguments"]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["weather"]
    assert parts[-1]["finish_reason"] == "function_call"
    history = [message, {"role": "function", "name": "weather", "content": "21"}]
    assert (await knowing.chat(messages=[*MESSAGES, *history], functions=functions))[0] == 200
    assert "<tool>weather" in knowing.engine.requests[-1].prompt and "<tool>21" in knowing.engine.requests[-1].prompt
    assert (await knowing.chat(functions=functions, tools=TOOLS))[1]["error"]["param"] == "functions"
