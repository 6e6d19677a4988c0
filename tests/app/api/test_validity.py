"""A reply with a constraint says whether a check by other means than the grammar's found it valid."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from app.api.verdict import check_output
from grammar import GrammarSpec
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import RECORD, FakeEngine

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
BROKEN = '{"age": "36"}'


async def validity(server: Server, **fields: Any) -> Any:
    status, reply = await server.chat(**fields)
    assert status == 200, reply
    return reply["structured"]["valid"]


@pytest.mark.parametrize(
    ("record", "valid"), [(RECORD, True), (BROKEN, False), ('{"age": 3', False), ("", False)]
)
async def test_a_record_is_checked_against_its_schema(start: Start, record: str, valid: bool) -> None:
    server = await start(FakeEngine(record=record))
    assert await validity(server, response_format=FORMAT) is valid
    chunks = await server.chat_chunks(response_format=FORMAT)
    assert [chunk["structured"]["valid"] for chunk in chunks if "structured" in chunk] == [valid]


@pytest.mark.parametrize(
    ("fields", "record", "valid"),
    [
        ({"regex": "[a-c]+"}, "abc", True),
        ({"regex": "[a-c]+"}, "abd", False),
        ({"choice": ["yes", "no"]}, "no", True),
        ({"choice": ["yes", "no"]}, "maybe", False),
        ({"json_object": True}, "[1]", False),
        ({"csv": {"columns": {"n": "integer"}}}, "n\n1\n", True),
        ({"csv": {"columns": {"n": "integer"}}}, "n\nx\n", False),
        ({"xml": {"name": "a", "text": "integer"}}, "<a>1</a>", True),
        ({"xml": {"name": "a", "text": "integer"}}, "<a>x</a>", False),
        ({"grammar": 'root ::= "a"'}, "b", None),
        ({"grammar": 'start: "a"'}, "b", None),
    ],
)
async def test_every_kind_has_its_check_or_none(
    start: Start, fields: dict[str, Any], record: str, valid: bool | None
) -> None:
    server = await start(FakeEngine(record=record))
    assert await validity(server, structured_outputs=fields) is valid


async def test_what_was_cut_is_never_valid(start: Start) -> None:
    server = await start(FakeEngine(record="12345"))
    number = {"json": {"type": "integer"}}
    assert await validity(server, structured_outputs=number, max_tokens=3) is False
    assert await validity(server, structured_outputs=number, max_tokens=5) is True
    lark = {"grammar": 'start: "12345"'}
    assert await validity(server, structured_outputs=lark, max_tokens=3) is None


async def test_a_request_without_a_constraint_has_no_verdict(server: Server) -> None:
    _, reply = await server.chat()
    assert "structured" not in reply


async def test_one_wrong_choice_makes_a_reply_of_several_prompts_invalid(start: Start) -> None:
    server = await start(FakeEngine(record="yes"))
    fields = {"structured_outputs": {"choice": ["yes"]}, "n": 2, "prompt": ["a", "b"]}
    _, reply = await server.complete(**fields)
    assert len(reply["choices"]) == 4 and reply["structured"]["valid"] is True
    server.engine.record = "no"
    _, reply = await server.complete(**fields)
    assert reply["structured"]["valid"] is False
    raw = await server.stream("/v1/completions", {"model": "fake", **fields})
    assert raw.count(b'"valid":false') == 4


@pytest.mark.parametrize(("record", "valid"), [(RECORD, True), (BROKEN, False)])
async def test_responses_and_messages_tell_it_too(start: Start, record: str, valid: bool) -> None:
    server = await start(FakeEngine(record=record))
    asked = {"input": "x", "text": {"format": {"type": "json_schema", "name": "r", "schema": SCHEMA}}}
    _, reply = await server.post("/v1/responses", asked)
    assert reply["structured"]["valid"] is valid
    last = json.loads((await server.stream("/v1/responses", asked)).split(b"data: ")[-1])
    assert last["response"]["structured"]["valid"] is valid
    asked = {**CHAT, "max_tokens": 99, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    _, reply = await server.post("/v1/messages", asked)
    assert reply["structured"]["valid"] is valid
    raw = await server.stream("/v1/messages", asked)
    found = [json.loads(part.split(b"data: ")[1]) for part in raw.split(b"\n\n")[:-1]]
    assert [event["structured"]["valid"] for event in found if "structured" in event] == [valid]


async def test_a_large_record_is_checked_in_a_thread(start: Start) -> None:
    record = json.dumps({"age": 3, "more": "x" * 50_000})
    server = await start(FakeEngine(record=record))
    _, reply = await server.chat(response_format=FORMAT)
    assert reply["structured"]["valid"] is True


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+$b", "a*a*a*a*a*a*b"])
def test_a_hostile_pattern_costs_no_time(pattern: str) -> None:
    begun = time.process_time()
    assert check_output(GrammarSpec.regex(pattern), "a" * 20_000 + "c") is False
    assert time.process_time() - begun < 2


def test_a_pattern_whose_shorthands_mean_more_than_ascii_is_left_alone() -> None:
    digits = GrammarSpec.regex(r"\d+")
    assert check_output(digits, "12") is True
    assert check_output(digits, "\u0663") is None
    assert check_output(GrammarSpec.regex("é+"), "éé") is True


def test_a_hostile_pattern_in_an_xml_document_costs_no_time_either() -> None:
    tree = {"name": "a", "text": {"pattern": "(a+)+"}}
    assert check_output(GrammarSpec.xml(tree), "<a>" + "a" * 20_000 + "!</a>") is False
    assert check_output(GrammarSpec.xml(tree), "<a>aaa</a>") is True
