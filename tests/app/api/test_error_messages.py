"""Errors give the full location of the invalid value, in the field names of the route."""

import json
import pickle
from typing import Any

import pytest

from app.api.errors import scrub
from grammar import GrammarError, InvalidGrammar, UnsupportedGrammar
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine

USER = {"role": "user", "content": "x"}
MESSAGE = CHAT | {"max_tokens": 9}
CODE = {"code": "unsupported_grammar"}

PLACE = "/properties/a/properties/b"
REFUSALS = [
    InvalidGrammar(f"$ref at {PLACE} points to #/x, which is not a schema", PLACE),
    UnsupportedGrammar(PLACE, "$dynamicRef", "it is never known before"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
async def test_a_refused_grammar_is_reported_with_its_pointer_on_every_route(
    start: Start, refusal: GrammarError
) -> None:
    server = await start(FakeEngine(reject=refusal))
    bodies = {"/v1/chat/completions": CHAT, "/v1/responses": {"input": "x"}, "/v1/messages": MESSAGE}
    for path, body in bodies.items():
        status, reply = await server.post(path, body)
        error = reply["error"]
        assert (status, error["pointer"]) == (400, PLACE), reply
        assert error["message"] == str(refusal) and error["reason"] in str(refusal)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", CHAT, {"error": {"type": "invalid_request_error"} | CODE}),
        ("/v1/completions", {"prompt": "x"}, {"error": {"param": None} | CODE}),
        ("/v1/responses", {"input": "x"}, {"type": "error"} | CODE),
        ("/v1/messages", MESSAGE, {"type": "error", "error": {"type": "invalid_request_error"}}),
    ],
)
async def test_a_grammar_that_fails_in_mid_answer_is_the_clients_mistake_in_the_form_of_the_route(
    start: Start, path: str, body: dict[str, Any], told: dict[str, Any]
) -> None:
    server = await start(FakeEngine(fail_after=(3, REFUSALS[1])))
    status, reply = await server.post(path, body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reply["error"]["message"] == str(REFUSALS[1])
    lines = (await server.stream(path, body)).decode().splitlines()
    last = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))
    assert str(REFUSALS[1]) in str(last)
    for name, value in told.items():
        assert last[name].items() >= value.items() if isinstance(value, dict) else last[name] == value


async def test_a_malformed_schema_is_reported_with_its_pointer(server: Server) -> None:
    level = {"type": "object", "properties": {"b": {"type": "strin"}}}
    schema = {"type": "object", "properties": {"a": level}}
    asked = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    status, reply = await server.chat(response_format=asked)
    assert (status, reply["error"]["code"]) == (400, "invalid_grammar")
    assert reply["error"]["pointer"] == f"{PLACE}/type"
    assert f"malformed at {PLACE}/type" in reply["error"]["message"]
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    _, reply = await server.chat(response_format=tag)
    assert reply["error"]["pointer"].endswith(f"{PLACE}/type"), reply


def test_a_pointer_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InvalidGrammar("wrong", "/a")))
    assert (str(error), error.pointer) == ("wrong", "/a")


async def test_errors_keep_our_own_routes_and_names(server: Server) -> None:
    _, reply = await server.chat(model="/models/of/mine")
    assert "'/models/of/mine'" in reply["error"]["message"]
    status, reply = await server.post("/detokenize", {})
    assert (status, reply["error"]["message"], reply["error"]["code"]) == (400, "tokens is required", "missing_field")


async def test_half_of_a_surrogate_pair_in_a_text_of_json_is_a_400(server: Server) -> None:
    torn = r'{"type": "\ud800"}'
    for fields in ({"structured_outputs": {"json": torn}}, {"guided_json": torn}):
        status, reply = await server.chat(**fields)
        assert (status, reply["error"]["code"]) == (400, "invalid_grammar"), reply
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": torn}}
    status, reply = await server.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert status == 400
    assert reply["error"]["message"].startswith("messages[1].tool_calls[0].function.arguments must be")


@pytest.mark.parametrize(
    ("role", "call", "message"),
    [
        ("assistant", {"name": "f", "arguments": "[1]"}, "function_call.arguments must be the text of a JSON object"),
        ("assistant", {"name": 5, "arguments": "{}"}, "function_call.name must be a text"),
        ("user", {"name": "f", "arguments": "{}"}, "function_call is a part of an assistant's message"),
    ],
)
async def test_an_older_call_is_named_as_the_client_wrote_it(
    server: Server, role: str, call: dict[str, Any], message: str
) -> None:
    status, reply = await server.chat(messages=[USER, {"role": role, "content": "x", "function_call": call}])
    assert (status, reply["error"]["message"]) == (400, f"messages[1].{message}")


def test_messages_of_the_system_lose_their_paths() -> None:
    assert scrub("no file /usr/lib/x.so at 0x7f001122") == "no file ... at ..."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": [1]}, "stop[0]=1 must be a text"),
        ({"stop": 5}, "stop=5 must be a text or a list"),
        ({"stop": ["a"] * 2000}, "stop=(list of 2000) must have at most 1024 items"),
        ({"tool_choice": 5}, "tool_choice=5 must be a text or an object"),
        ({"guided_json": [1]}, "guided_json=(list of 1) must be an object or true or false or a text"),
        (
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json=5 must be an object or true or false or a text",
        ),
        ({"logit_bias": {"str": "x"}}, "logit_bias.str='x' must be a number"),
        ({"messages": []}, "messages=(list of 0) must have at least 1 item"),
        ({"n": True}, "n=true must be an integer"),
        ({"n": 1.5}, "n=1.5 must be an integer"),
        ({"stream": "yes"}, "stream='yes' must be true or false"),
        ({"stream": True, "stream_options": 4}, "stream_options=4 must be an object"),
        ({"deadline_s": 0}, "deadline_s=0 must be greater than 0"),
        ({"deadline_s": 1e6}, "deadline_s=1000000.0 must be at most 86400"),
        ({"cache_salt": ""}, "cache_salt='' must have at least 1 character"),
        ({"request_id": "a b"}, r"request_id='a b' must match ^[\w.:-]+$"),
        ({"tools": ["f"]}, "tools[0]='f' must be an object"),
        ({"messages": None}, "messages=null must be a list"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be an integer from 0 to 20"),
    ],
)
async def test_an_invalid_value_is_reported_with_its_rule(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    status, reply = await server.chat(**fields)
    assert (status, reply["error"]["message"]) == (400, message)
    assert reply["error"]["param"] in fields
