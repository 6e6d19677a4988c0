"""Invalid requests: each is a quick 400 that names its field and reaches no engine."""

import time
from typing import Any

import pytest
from pydantic import BaseModel

from app.api.anthropic.request import MessagesRequest
from app.api.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from app.api.responses.request import ResponsesRequest
from tests.app.api.harness import CHAT, Server, list_cases

MANY = list(range(50_000))
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "object"}}}
IMAGE = [{"type": "image_url", "image_url": {"url": 5}}]

WRONG: dict[str, list[Any]] = {
    "n": [0, 1_000_000, -1], "temperature": [-0.1, "0.7", [1]], "top_p": [-0.1, 1.01],
    "top_k": [-2, 2**40], "min_p": [-1], "presence_penalty": [3], "frequency_penalty": [-3],
    "repetition_penalty": [0], "seed": [2**64, "1"], "max_tokens": [0, -5, 2**63], "min_tokens": [-1],
    "stop": [["a"] * 17, ["a"] * 100_000, [""], {"a": 1}], "stop_token_ids": [MANY, [-1], [2**63], ["a"]],
    "allowed_token_ids": [MANY, [], [2**63]], "bad_words": [["a"] * 100_000, [""]],
    "logit_bias": [{str(i): 1 for i in MANY}, {"x": 1}, {"5": 101}, {"5": "much"}, {"-5": 1}],
    "top_logprobs": [3], "add_special_tokens": [True], "prompt_logprobs": [-2], "priority": [2**40],
    "cache_salt": ["x" * 1025],
    "stream_options": [{"include_usage": True}],
    "messages": [
        [], "hello", [{"role": "wizard", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": 3}], [{"role": "user", "content": IMAGE}],
        [{"role": "tool", "content": "x"}],
    ],
    "response_format": [
        {"type": "json_schema"}, {"type": "yaml"},
        {"type": "text", "json_schema": {"schema": {"type": "object"}}},
        {"type": "text", "structures": [], "triggers": []},
        {"type": "json_object", "json_schema": {"schema": {"type": "object"}}}, {"type": "structural_tag"},
        {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "nonsense"}}},
    ],
    "extra_body": [{"guided_json": {"type": "object"}}], "nvext": [{"guided_json": {"type": "object"}}],
    "text": [{"format": {"type": "json_schema"}}], "response_model": ["Person"],
    "responseFormat": [{"type": "json_object"}], "Response_Format": [{"type": "json_object"}],
    "RESPONSE_FORMAT": [{"type": "json_object"}], "response_schema": [{}],
    "output_format": [{"type": "json_schema"}], "json_mode": [True], "JSONMode": [True],
    "x-json-schema": [{}], "pattern": ["a+"], "enum": [["a"]],
    "tools": [[{"type": "function", "function": {"name": "f", "input_schema": {"type": "object"}}}]],
    "structured_outputs": [
        {}, {"jsn": {}}, {"choice": ["a"] * 100_000},
        {"json": {}, "whitespace_pattern": "a*"}, {"regex": "a", "backend": "nonsense"},
        {"structural_tag": "{}"},
    ],
    "guided_jsonn": [{"type": "object"}], "guided_whitespace_pattern": [" "],
    "guided_decoding_backend": ["lm-format-enforcer"], "structured": [{}], "grammar_file": ["x"],
    "json_schema": [{"type": "object"}], "ebnf_file": ["x"], "tool_choice": ["required"],
    "prediction": [
        {"type": "text", "content": "a"}, {"type": "content"}, {"type": "content", "content": ["a"]}, "a",
    ],
    "audio": [{"voice": "x"}], "modalities": [["text", "audio"]], "use_beam_search": [True],
    "best_of": [1_000_000_000], "length_penalty": [2.0], "prompt_embeds": ["AAAA"],
    "chat_template": ["{{ messages }}"], "spaces_between_special_tokens": [False],
    "truncate_prompt_tokens": [5],
    "chat_template_kwargs": [{"tokenize": True}, {"chat_template": "x"}, {"tools": []}],
    "continue_final_message": [True], "thinking_token_budget": [0], "n_predict": [5], "mirostat": [2],
    "repeat_penalty": [1.1], "typical_p": [0.9], "do_sample": [False],
    "options": [{"num_predict": 5}], "prompt": ["hello"], "max_output_tokens": [5],
    "stop_sequences": [["a"]], "system": ["be kind"],
}


@pytest.mark.parametrize(("field", "value"), list_cases(WRONG), ids=lambda value: repr(value)[:40])
async def test_a_wrong_field_is_a_400_naming_it(server: Server, field: str, value: Any) -> None:
    extra = {"guided_regex": "a"} if field == "guided_decoding_backend" else {}
    began = time.process_time()  # counts this process alone: others may be busy
    status, reply = await server.chat(**{field: value}, **extra)
    assert status == 400, reply
    assert time.process_time() - began < 5
    error = reply["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split(".")[0] == field
    assert len(error["message"]) <= 1000
    assert server.engine.requests == []


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


NAMED = function("f")
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED], "a": 1}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"schema": {}, "stric": True}}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"tool_choice": NAMED | {"nme": "f"}}, "tool_choice.nme"),
        ({"tool_choice": function("f", arguments={})}, "tool_choice.function.arguments"),
        ({"tool_choice": ALLOWED}, "tool_choice.allowed_tools.a"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
        ({"stream": True, "stream_options": {"max_tokens": 5}}, "stream_options.max_tokens"),
    ],
)
async def test_a_constraint_within_an_option_is_refused_by_its_place(
    server: Server, fields: dict[str, Any], place: str
) -> None:
    status, reply = await server.chat(**{"tools": [NAMED]} | fields)
    assert (status, reply["error"]["code"]) == (400, "unknown_field"), reply
    assert reply["error"]["param"] == place.split(".")[0]
    assert reply["error"]["message"].startswith(f"{place} is not a field of this route")


MESSAGE = {"max_tokens": 9, "messages": CHAT["messages"], "model": "fake"}
EXTRACT = {"schema": {"type": "object", "properties": {}, "additionalProperties": False}, "text": "x"}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/chat/completions", {"some_new_field": 1, "stream": True}, "some_new_field"),
        ("/v1/chat/completions", {"temprature": 1}, "temprature"),
        ("/v1/chat/completions", {"a\nSet-Cookie: b": 1}, "a\\nSet-Cookie: b"),
        ("/v1/chat/completions", {"stream_options": {"usge": 1}, "stream": True}, "stream_options.usge"),
        ("/v1/chat/completions", {"response_format": JSON_FORMAT}, "response_format.json_schema.stric"),
        ("/v1/chat/completions", {"tools": [function("f", paramters={"a": 1})]}, "tools[0].function.paramters"),
        ("/v1/chat/completions", {"kv_transfer_params": {"remote": 1}}, "kv_transfer_params.remote"),
        ("/v1/completions", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/v1/responses", {"input": "x", "client_metadata": {"turn_id": "x"}, "stream": True}, "client_metadata"),
        ("/v1/responses", {"input": "x", "reasoning": {"efort": "low"}}, "reasoning.efort"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "text", "a": 1}}}, "text.format.a"),
        ("/v1/messages", MESSAGE | {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ("/v1/messages", MESSAGE | {"thinking": {"type": "disabled", "b": 1}, "stream": True}, "thinking.b"),
        ("/tokenize", {"prompt": "x", "messages": None, "some_new_field": 1}, "some_new_field"),
        ("/v1/extract", EXTRACT | {"instruction": "x", "stream": True}, "instruction"),
    ],
)
async def test_an_unknown_field_is_left_out_and_named_in_a_header(
    server: Server, path: str, fields: dict[str, Any], place: str
) -> None:
    body = (CHAT if path in ("/v1/chat/completions", "/v1/messages", "/tokenize") else {}) | fields
    status, headers, reply = await server.ask(path, "POST", json=body)
    assert status == 200, reply
    assert headers["x-troupe-warning"].startswith(f"{place} is not known here and was left out")


async def test_the_names_that_clients_document_pass(server: Server) -> None:
    schema = {"name": "r", "description": "d", "strict": True, "schema": {"type": "object"}}
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": None}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema, "format": None}}
    chunks = await server.chat_chunks(stream_options=options, **fields)
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    documented = {"name": "f", "parameters": {"type": "object"}, "strict": True, "return": {"type": "string"}}
    tools = [{"type": "function", "function": documented, "cache_control": {}}]
    assert (await server.chat(tools=tools, tool_choice=NAMED))[0] == 200


BODIES: list[tuple[str, dict[str, Any], type[BaseModel]]] = [
    ("/v1/chat/completions", {"messages": CHAT["messages"]}, ChatRequest),
    ("/v1/completions", {"prompt": "x"}, CompletionRequest), ("/v1/responses", {"input": "x"}, ResponsesRequest),
    ("/v1/messages", MESSAGE, MessagesRequest), ("/tokenize", {"prompt": "x"}, TokenizeRequest),
]


@pytest.mark.parametrize(("path", "body", "model"), BODIES, ids=lambda value: str(value)[:20])
async def test_null_is_a_field_that_was_not_given(
    server: Server, path: str, body: dict[str, Any], model: type[BaseModel]
) -> None:
    names = {*model.model_fields, *ChatRequest.model_fields, *CompletionRequest.model_fields} - body.keys()
    status, reply = await server.post(path, body | dict.fromkeys(names))
    assert status == 200, reply


async def test_null_within_an_option_was_not_given_either(server: Server) -> None:
    structured = {"regex": "a", "disable_any_whitespace": None, "disable_fallback": None}
    status, reply = await server.chat(structured_outputs=structured)
    assert status == 200, reply
    for text in ({"format": None, "verbosity": None}, {"format": {"type": None}}):
        status, reply = await server.post("/v1/responses", {"input": "x", "text": text})
        assert status == 200, reply


async def test_two_constraints_are_one_too_many(server: Server) -> None:
    status, reply = await server.chat(response_format=SCHEMA_FORMAT, guided_regex="a+")
    assert (status, reply["error"]["code"]) == (400, "too_many_constraints")
    status, _ = await server.chat(structured_outputs={"regex": "a", "choice": ["a"]})
    assert status == 400


async def test_bookkeeping_fields_and_those_that_ask_for_nothing_are_ignored(server: Server) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": None}
    more = {"tool_choice": "none", "best_of": 1, "modalities": ["text"], "parallel_tool_calls": True}
    more |= {"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "dry_multiplier": 0.0, "do_sample": True}
    more |= {"truncate_prompt_tokens": -1, "stop_words": [], "context_management": {"edits": []}}
    body = CHAT | fields | more | {"stream_options": None, "num_ctx": None}
    status, headers, reply = await server.ask("/v1/chat/completions", "POST", json=body)
    assert (status, headers.get("x-troupe-warning")) == (200, None), reply


@pytest.mark.parametrize(
    ("path", "name", "said"),
    [
        ("/v1/completions", "n_predict", "use max_tokens"),
        ("/v1/responses", "num_predict", "use max_output_tokens"),
        ("/v1/chat/completions", "repeat_penalty", "use repetition_penalty"),
    ],
)
async def test_a_field_of_another_server_gets_our_name(server: Server, path: str, name: str, said: str) -> None:
    body = {"/v1/messages": MESSAGE, "/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}}
    status, reply = await server.post(path, body.get(path, CHAT) | {name: 3})
    assert (status, reply["error"]["message"]) == (400, f"{name} is not a field of this route; {said}")
    status, reply = await server.post("/v1/messages", MESSAGE | {"mirostat": 3})
    assert (status, reply["error"]["message"]) == (400, "mirostat is not a field of this route")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("/v1/chat/completions", name) for name in ("max_tokens", "seed", "top_k", "n", "top_logprobs", "priority")),
        *(("/v1/completions", name) for name in ("max_tokens", "logprobs", "min_tokens", "best_of")),
        ("/v1/responses", "max_output_tokens"), ("/v1/messages", "max_tokens"),
    ],
)
async def test_a_whole_number_with_a_point_is_an_integer(server: Server, path: str, name: str) -> None:
    bodies = {"/v1/chat/completions": CHAT | {"logprobs": True}, "/v1/responses": {"input": "x"}}
    body = bodies.get(path, MESSAGE if path == "/v1/messages" else {"prompt": "x"})
    status, reply = await server.post(path, body | {name: 1.0})
    assert status == 200, reply
    status, reply = await server.post(path, body | {name: 1.5})
    assert status == 400, reply
    assert f"{name}=1.5 must be an integer" in reply["error"]["message"]


async def test_ids_may_be_whole_numbers_with_a_point(server: Server) -> None:
    assert (await server.chat(stop_token_ids=[5.0, 6]))[0] == 200
    assert server.engine.requests[-1].params.stop_token_ids == (5, 6)
    status, reply = await server.post("/detokenize", {"tokens": [104.0, 105.5]})
    assert (status, reply["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("older", [5, 9, 99, None])
async def test_of_two_limits_the_lower_holds(server: Server, older: int | None) -> None:
    assert (await server.chat(max_tokens=older, max_completion_tokens=9))[0] == 200
    assert server.engine.requests[-1].params.max_tokens == min(older or 9, 9)


async def test_a_field_that_is_wrong_beside_another_is_named(server: Server) -> None:
    status, reply = await server.chat(max_tokens=-1, max_completion_tokens=9)
    assert (status, reply["error"]["param"]) == (400, "max_tokens")
    assert "max_tokens=-1" in reply["error"]["message"]
    status, reply = await server.chat(stream=True, prompt_logprobs=1)
    assert (status, reply["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("key", ["1_0", " 5 ", "\u0663", "-1", ""])
async def test_a_logit_bias_names_token_ids_in_plain_digits(server: Server, key: str) -> None:
    status, reply = await server.chat(logit_bias={key: 1})
    assert (status, reply["error"]["param"]) == (400, "logit_bias")
    assert repr(key) in reply["error"]["message"]
