"""Every kind of grammar has a field of the API; a reply reports whether an independent validator accepts it."""

import asyncio
import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from app.api.call import MAX_CHARS_ON_LOOP
from app.config import AppConfig
from engine import Engine, EngineConfig
from grammar import GrammarSpec, SchemaValidator, XmlValidator
from tests.app.api.harness import CHAT, Server, Start, needs_model, run_server
from tests.fakes import RECORD, FakeEngine

TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": "</n>"}
TAGS = {"type": "triggered_tags", "triggers": ["<n"], "tags": [TAG], "at_least_one": True}
LEGACY = {"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<n"]}
TREE = {"name": "a", "children": [{"name": "b", "text": "integer", "min": 1, "max": 2}]}
TABLE = {"columns": {"n": "integer", "s": ["x", "y"]}, "has_header": True}
PAIR = {"type": "object", "properties": {"a": {}, "b": {}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "structural_tag", "format": TAGS}}, "structural_tag"),
        ({"response_format": {"type": "structural_tag", **LEGACY}}, "structural_tag"),
        (outputs(structural_tag={"type": "structural_tag", "format": TAGS}), "structural_tag"),
        (outputs(structural_tag='{"format": {"type": "any_text"}}'), "structural_tag"),
        (outputs(xml={"root": TREE, "declaration": "optional"}, whitespace="any"), "xml"),
        (outputs(grammar='start: "a"+'), "lark"), (outputs(json=PAIR, property_order="any"), "json_schema"),
        (outputs(json='{"type": "object"}'), "json_schema"),
        (outputs(json_object=True, disable_any_whitespace=True), "json_object"),
        ({"response_format": {"type": "json_object", "schema": PAIR}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": PAIR}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_object"), ({"response_format": {"type": "text"}}, None),
        ({"guided_json": PAIR, "guided_decoding_backend": "guidance:no-fallback"}, "json_schema"),
        ({"guided_regex": "a+", "guided_decoding_backend": "guidance"}, "regex"),
        ({"guided_choice": ["a"], "guided_decoding_backend": "outlines"}, "choice"),
        ({"guided_grammar": 'root ::= "a"', "guided_decoding_backend": "auto"}, "ebnf"),
        ({"regex": "a+"}, "regex"), ({"ebnf": 'root ::= "a"'}, "ebnf"),
    ],
)
async def test_a_field_becomes_the_grammar_of_its_kind(
    server: Server, fields: dict[str, Any], kind: str | None
) -> None:
    status, reply = await server.chat(**fields)
    assert status == 200, reply
    spec = server.engine.requests[-1].params.grammar
    assert (spec and spec.kind) == kind
    assert spec is None or spec.property_order == fields.get("structured_outputs", {}).get("property_order", "schema")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "structural_tag"}}, "structural tag"),
        ({"response_format": {"type": "json_object", "format": TAGS}}, "part of the type structural_tag"),
        ({"response_format": {"type": "text", "schema": {}}}, "not text"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_tokens"}}}, "'any_tokens' at /format"),
        (outputs(structural_tag={"format": {"type": "tag"}}), "missing required field `begin`"),
        (outputs(xml={"name": "a b"}), "not an XML name"),
        (outputs(xml={"root": TREE, "schema": {}}), "unknown field `schema`"),
        (outputs(csv={"columns": ["a"]}), "CSV table is malformed at /columns"),
        (outputs(csv=TABLE | {"has_header": "yes"}), "malformed at /has_header"),
        (outputs(csv=TABLE | {"quote": True}), "unknown field `quote`"),
        (outputs(grammar="nothing"), "rule named start"),
        (outputs(regex="a", property_order="any"), "property_order belongs"),
        (outputs(csv=TABLE, xml=TREE), "one constraint"),
        (outputs(csv=TABLE, whitespace="spaced"), "whitespace='spaced' belongs to json,"),
        (outputs(choice=["a"], disable_any_whitespace=True), "disable_any_whitespace=True belongs to json,"),
        (outputs(json=PAIR, whitespace="any", disable_any_whitespace=True), "=True exclude each other"),
    ],
)
async def test_a_malformed_grammar_is_a_400_of_its_field(server: Server, fields: dict[str, Any], words: str) -> None:
    status, reply = await server.chat(**fields)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert reply["error"]["param"].split(".")[0] == next(iter(fields))
    assert words in reply["error"]["message"]
    assert server.engine.requests == []


def is_table(text: str) -> bool:
    head, *rows = csv.reader(text.split("\n"))
    return head == ["n", "s"] and all(len(row) == 2 and row[1] in "xy" for row in rows)


CLOSED = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}}
CLOSED |= {"required": ["a", "b"], "additionalProperties": False}
# fields of a request and how its text is checked, one of each kind
KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"json": CLOSED}, lambda text: SchemaValidator(CLOSED).is_valid(json.loads(text))),
    ({"json": CLOSED, "property_order": "any"}, lambda text: SchemaValidator(CLOSED).is_valid(json.loads(text))),
    ({"json": {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 2}},
     lambda text: len(set(json.loads(text))) == len(json.loads(text))),
    ({"regex": "[a-c]{3}-[0-9]{2}"}, lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)),
    ({"choice": ["yes", "no"]}, ["yes", "no"].__contains__),
    ({"grammar": 'root ::= "x" [0-9] "y"'}, lambda text: re.fullmatch("x[0-9]y", text)),
    ({"grammar": 'start: "(" start ")" | "z"'}, lambda text: re.fullmatch(r"\(*z\)*", text)),
    ({"csv": TABLE}, is_table),
    ({"xml": TREE}, XmlValidator(GrammarSpec.xml(TREE).text).is_valid),
    ({"structural_tag": {"format": TAG}}, lambda text: re.fullmatch("<n>[0-9]{1,3}</n>", text)),
]


@pytest.mark.asyncio(loop_scope="session")
@needs_model
async def test_one_batch_mixes_all_kinds(real: Server) -> None:
    """Thirty requests at once, three of each kind: every text that came to its end is what was asked for."""

    async def ask(number: int, fields: dict[str, Any]) -> Any:
        body = {"prompt": "Ada is 36.", "max_tokens": 80, "seed": number, "structured_outputs": fields}
        return await real.post("/v1/completions", body)

    asked = [pair for pair in KINDS for _ in range(3)]
    replies = await asyncio.gather(*(ask(number, fields) for number, (fields, _) in enumerate(asked)))
    num_whole = 0
    for (fields, is_fine), (status, reply) in zip(asked, replies, strict=True):
        assert status == 200, reply
        choice = reply["choices"][0]
        num_whole += choice["finish_reason"] == "stop"
        assert choice["finish_reason"] in ("stop", "length")
        assert choice["finish_reason"] == "length" or is_fine(choice["text"]), (fields, choice["text"])
    assert num_whole >= 15


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@needs_model
async def test_auto_is_enforced_by_the_style_of_the_models_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EngineConfig().model, folder, ignore=shutil.ignore_patterns("recipe"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    config = EngineConfig(model=str(folder), num_blocks=256)
    async with Engine(config) as engine, run_server(engine, AppConfig()) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "tools": [tool]}
        status, reply = await server.post("/v1/chat/completions", body)
    assert (status, reply["structured"]["backend"]) == (200, "tool_calls"), reply


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}
BROKEN = '{"age": "36"}'
LARGE = json.dumps({"age": 3, "more": "x" * MAX_CHARS_ON_LOOP})  # checked in a thread


async def validity(server: Server, **fields: Any) -> Any:
    status, reply = await server.chat(**fields)
    assert status == 200, reply
    return reply["structured"]["valid"]


@pytest.mark.parametrize(
    ("record", "valid"),
    [(RECORD, True), (LARGE, True), (BROKEN, False), ('{"age": 3', False), ("", False)],
    ids=lambda value: str(value)[:20],
)
async def test_a_record_is_checked_against_its_schema(start: Start, record: str, valid: bool) -> None:
    server = await start(FakeEngine(record=record))
    assert await validity(server, response_format=FORMAT) is valid
    chunks = await server.chat_chunks(response_format=FORMAT)
    assert [chunk["structured"]["valid"] for chunk in chunks if "structured" in chunk] == [valid]


async def test_what_was_cut_is_never_valid(start: Start) -> None:
    server = await start(FakeEngine(record="12345"))
    assert await validity(server, **outputs(json={"type": "integer"}), max_tokens=3) is False
    assert await validity(server, **outputs(json={"type": "integer"}), max_tokens=5) is True
    assert await validity(server, **outputs(grammar='start: "12345"'), max_tokens=3) is None
    assert "structured" not in (await server.chat())[1]  # without a constraint


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
    form = {"type": "json_schema", "schema": SCHEMA}
    asked = {"input": "x", "text": {"format": form | {"name": "r"}}}
    _, reply = await server.post("/v1/responses", asked)
    assert reply["structured"]["valid"] is valid
    last = json.loads((await server.stream("/v1/responses", asked)).split(b"data: ")[-1])
    assert last["response"]["structured"]["valid"] is valid
    asked = {**CHAT, "max_tokens": 99, "output_config": {"format": form}}
    _, reply = await server.post("/v1/messages", asked)
    assert reply["structured"]["valid"] is valid
    raw = await server.stream("/v1/messages", asked)
    found = [json.loads(part.split(b"data: ")[1]) for part in raw.split(b"\n\n")[:-1]]
    assert [event["structured"]["valid"] for event in found if "structured" in event] == [valid]
