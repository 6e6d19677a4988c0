"""POST /v1/extract: a text, a file or rows, whole or streamed; and what is refused."""

import asyncio
import base64
import io
import json
import logging
import shutil
import subprocess
import sys
import threading
from typing import Any

import aiohttp
import pytest
from PIL import Image, ImageDraw, ImageFont

from app.api import extract as api_extract
from app.extraction import Example, extract
from app.extraction.cases import SCHEMAS
from app.extraction.pdf import find_ocr
from app.ui.api_hint import CHAT, EXTRACT, LANGUAGES, make_snippets
from app.ui.api_hint import TEXT as CONTACT
from engine import LLM
from tests.app.api.harness import Server, Start, events, needs_model
from tests.app.extraction.pdf_files import make_pdf
from tests.fakes import PERSON, FakeEngine
from tests.waiting import wait_until

TEXT = "Ada is 36 years old."
BODY = {"schema": PERSON, "text": TEXT}


@pytest.fixture
async def server(start: Start) -> Server:
    return await start(FakeEngine(record='{"name": "Ada", "age": 36}'))


async def test_a_text_gives_a_record_with_what_is_known_of_each_value(server: Server) -> None:
    status, reply = await server.post("/v1/extract", BODY)
    assert status == 200 and reply["record"] == {"name": "Ada", "age": 36}
    assert (reply["valid"], reply["finish_reason"], reply["checks"]) == (True, "stop", [])
    assert reply["evidence"]["/age"] == {"match": "exact", "start": 7, "end": 9, "quote": "36"}
    assert reply["confidence"]["/name"] == 0.7788 and reply["flags"]["/name"] == ["the model was unsure"]
    assert reply["usage"]["completion_tokens"] > 0 and reply["object"] == "extraction"


async def test_instructions_and_examples_reach_the_prompt(server: Server) -> None:
    examples = [{"text": "Bob is 7.", "record": {"name": "Bob", "age": 7}}]
    status, _ = await server.post("/v1/extract", BODY | {"instructions": "Ages in years.", "examples": examples})
    prompt = server.engine.requests[0].prompt
    assert status == 200 and "Ages in years." in prompt.split("<user>")[0]
    assert prompt.index("Bob is 7.") < prompt.index('{"name": "Bob", "age": 7}') < prompt.index(TEXT)


async def test_options_reach_the_engine(server: Server) -> None:
    options = {"verbatim": True, "bounds": False, "property_order": "any"}
    assert (await server.post("/v1/extract", BODY | {"options": options}))[0] == 200
    (first,) = server.engine.requests
    assert first.params.grammar.source == TEXT and first.params.grammar.property_order == "any"
    assert "maxLength" not in first.params.grammar.text


async def test_a_stream_shows_the_record_grow_and_ends_with_the_reply(server: Server) -> None:
    *parts, last = events(await server.stream("/v1/extract", BODY))
    assert parts and {part["object"] for part in parts} == {"extraction.partial"}
    assert last["record"] == {"name": "Ada", "age": 36} and last["valid"]


async def test_rows_are_answered_as_lines_in_order_with_progress(server: Server) -> None:
    rows = [{"id": 7, "note": TEXT}, {"id": 8, "note": ""}, {"id": 9, "note": TEXT}]
    async with server.client.post(
        f"{server.url}/v1/extract", json={"schema": PERSON, "rows": rows, "column": "note"}
    ) as reply:
        assert reply.content_type == "application/x-ndjson"
        lines = [json.loads(line) for line in (await reply.text()).splitlines()]
    assert [line["progress"] for line in lines] == [{"num_done": n, "num_rows": 3} for n in (1, 2, 3)]
    assert [line["valid"] for line in lines] == [True, False, True] and "empty" in lines[1]["error"]
    assert lines[2]["row"] == {"id": "9"}


async def test_a_file_is_read_by_its_name(server: Server) -> None:
    table = f"id,text\n1,{TEXT}\n"
    for name, content, num_lines in (("a.txt", TEXT, 1), ("a.csv", table, 1), ("a.csv", f"{table}2,{TEXT}\n", 2)):
        form = aiohttp.FormData({"schema": json.dumps(PERSON)})
        form.add_field("file", content.encode(), filename=name)
        async with server.client.post(f"{server.url}/v1/extract", data=form) as reply:
            lines = [json.loads(line) for line in (await reply.text()).splitlines()]
        assert reply.status == 200 and [line["valid"] for line in lines] == [True] * num_lines
        assert ("ndjson" in reply.content_type) == ("progress" in lines[0]) == (name == "a.csv")


async def test_evidence_in_a_pdf_has_its_page_and_boxes(server: Server) -> None:
    name, content = "a.pdf", make_pdf("One page", f"More text. {TEXT}", page_entries="/CropBox [10 10 500 750]")
    status, reply = await send_form(server, ("file", name, content))
    found = reply["evidence"]["/age"]
    (box,) = found["boxes"]
    assert (status, found["page"], box["page"], found["quote"]) == (200, 2, 2, "36")
    # Helvetica of 10 points at x = 20, 700 points above the lower edge; the crop box cuts 10 on the left and 50 above.
    places = {"left": 87.8, "top": 40.5, "right": 98.9, "bottom": 52.5}
    assert {name: box[name] for name in places} == pytest.approx(places, abs=2)


@pytest.mark.skipif(not find_ocr(), reason="tesseract is not installed")
async def test_images_are_recognised_for_a_model_without_eyes(server: Server) -> None:
    image = Image.new("RGB", (900, 200), "white")
    ImageDraw.Draw(image).text((50, 50), TEXT, fill="black", font=ImageFont.load_default(60))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    status, reply = await server.post("/v1/extract", {"schema": PERSON, "text": "A note.", "images": [url]})
    (box,) = reply["evidence"]["/age"]["boxes"]
    assert status == 200 and reply["notes"] == ["images[0]: text read by OCR"]
    assert box["page"] == 1 and 50 < box["left"] < box["right"] < 400 and 40 < box["top"] < box["bottom"] < 140
    for wrong, message in ((url[5:], "not a data: URL"), (f"{url}*", "is not base64"), (url[:60], "images[0] ")):
        status, reply = await server.post("/v1/extract", {"schema": PERSON, "images": [wrong]})
        assert (status, reply["error"]["param"]) == (400, "images") and message in reply["error"]["message"]


async def send_form(server: Server, *files: tuple[str, str, bytes], **parts: str) -> tuple[int, Any]:
    form = aiohttp.FormData({"schema": json.dumps(PERSON)} | parts, default_to_multipart=True)
    for name, file_name, content in files:
        form.add_field(name, content, filename=file_name)
    return await server.post_form("/v1/extract", form)


async def test_a_form_says_where_an_image_belongs(server: Server) -> None:
    status, reply = await send_form(server, ("images", "a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"))
    assert (status, reply["error"]["param"]) == (400, "images")
    assert "data: URLs, and the part `file` takes one image" in reply["error"]["message"]


@pytest.mark.skipif(not find_ocr(), reason="tesseract is not installed")
async def test_a_text_named_as_an_image_is_refused_without_addresses(server: Server) -> None:
    status, reply = await send_form(server, ("file", "a.png", b"hello"))
    assert (status, reply["error"]["message"]) == (400, "a.png cannot be read as PNG: cannot identify image file")


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        ({"options": '{"verbatim": true, "verbatim": false}'}, 400, "options: duplicate key 'verbatim'"),
        ({"examples": '[{"text": "a", "record": NaN}]'}, 400, "examples[0].record=nan must be a finite number"),
        ({"examples": '[{"text": "\\ud800", "record": 1}]'}, 400, "examples[0].text contains an unpaired surrogate"),
        ({"rows": "[" * 100_000}, 400, "rows is nested too deeply"),
        ({"rows": "[" + "{}," * 200_000 + "{}]"}, 413, "rows has more than 200000 commas and brackets"),
        ({"schema": '{"type": "object", "type": "string"}'}, 400, "schema: duplicate key 'type'"),
    ],
)
async def test_json_in_a_form_obeys_the_rules_of_a_json_body(
    server: Server, parts: dict[str, str], status: int, message: str
) -> None:
    found, reply = await send_form(server, text=TEXT, **parts)
    assert (found, reply["error"]["message"].startswith(message)) == (status, True), reply


async def test_a_part_means_the_same_as_a_file_and_as_a_text(server: Server) -> None:
    schema = json.dumps(PERSON).encode()
    for files, parts in (
        ([("file", "a.txt", TEXT.encode()), ("options", "o.json", b'{"bounds": false}')], {}),
        ([("text", "a.txt", TEXT.encode())], {}),
        ([], {"file": TEXT}),
        ([("file", f"a.{'x' * 300}", TEXT.encode())], {}),
    ):
        status, reply = await send_form(server, *files, **parts)
        assert (status, reply.get("valid")) == (200, True), reply
    status, reply = await send_form(server, ("schema", "s.json", schema), text=TEXT)
    assert (status, reply["error"]["param"]) == (400, "schema")  # it came twice


async def test_slow_files_leave_the_threads_of_the_engine_free(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are written in asyncio's own threads; before, as many slow files as there are threads took them all."""
    release, reading = threading.Event(), threading.Event()
    monkeypatch.setattr(api_extract, "parse_rows", lambda *_, **__: reading.set() or release.wait() or [])
    uploads = [asyncio.create_task(send_form(server, ("file", name, b"x"))) for name in ("a.txt", "a.pdf") * 20]
    try:
        await asyncio.to_thread(reading.wait)
        assert (await asyncio.wait_for(server.chat(), 10))[0] == 200
    finally:
        release.set()
        await asyncio.gather(*uploads)


async def test_the_salt_reaches_every_row(server: Server) -> None:
    body = {"schema": PERSON, "rows": [TEXT, TEXT], "cache_salt": "mine"}
    await server.post_text("/v1/extract", json.dumps(body))
    await send_form(server, ("file", "a.csv", f"text\n{TEXT}\n{TEXT}\n".encode()), cache_salt="mine")
    assert [request.options["cache_salt"] for request in server.engine.requests] == ["mine"] * 4


async def test_a_ready_made_schema_goes_by_its_name(server: Server) -> None:
    assert (await server.post("/v1/extract", {"schema": "invoice", "text": TEXT}))[1]["valid"] is False
    status, reply = await server.post("/v1/extract", {"schema": "invoise", "text": TEXT})
    assert (status, reply["error"]["param"]) == (400, "schema") and "invoice" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"text": None}, "text"), ({"rows": ["x"]}, "text"), ({"text": " "}, "text"),
        ({"schema": {"type": "x"}}, "schema"),
        ({"schema": None}, "schema"), ({"max_tokens": 9}, "max_tokens"), ({"verbatim": True}, "verbatim"),
        ({"bounds": False}, "bounds"), ({"options": {"verbtim": True}}, "options"),
        ({"options": {"verbatim": 6}}, "options"), ({"text": None, "rows": [{"a": "x"}], "column": "b"}, "column"),
        ({"schema": PERSON | {"x-checks": [{"sum": []}]}}, "schema"), ({"model": "other"}, "model"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(server: Server, change: dict[str, Any], param: str) -> None:
    status, reply = await server.post("/v1/extract", BODY | change)
    assert status in (400, 404) and reply["error"]["param"] == param, reply
    assert server.engine.requests == []


async def test_the_route_is_described(server: Server) -> None:
    _, document = await server.get("/openapi.json")
    content = document["paths"]["/v1/extract"]["post"]["requestBody"]["content"]
    names = content["application/json"]["schema"]["properties"]
    assert {"schema", "text", "rows", "instructions", "examples", "options", "stream"} <= names.keys()
    assert "multipart/form-data" in content and "ExampleFields" in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("language", "command"),
    [("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"]), ("JavaScript", ["node", "-e"])],
)
async def test_the_code_of_the_page_runs_as_it_stands_with_the_schema_and_text_of_extract(
    start: Start, language: str, command: list[str]
) -> None:
    server = await start(FakeEngine(record='{"name": "Ada", "age": 36}'), api_key=("YOUR_KEY",))
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} on this machine")
    schema = PERSON | {"title": "It's $HOME `date` {x} \\ \"é\"", "deprecated": True}
    text = 'Ada\'s "36"\n${x} `y` \\n JSON\nJSON\n' + TEXT
    for kind, word in ((EXTRACT, "Ada"), (CHAT, "You said")):
        _, *codes = make_snippets(server.url, "fake", True, kind, schema, text)
        code = dict(zip(LANGUAGES, codes, strict=True))[language]
        ran = await asyncio.to_thread(subprocess.run, [*command, code], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0 and word in ran.stdout, ran.stderr
    asked = server.engine.requests[0].prompt
    assert text in asked and len(server.engine.requests) == 2





@needs_model
def test_python_extracts_on_an_llm() -> None:
    examples = [Example("Bob, 7", {"name": "Bob", "age": 7})]
    schema = json.loads((SCHEMAS / "contact.json").read_text(encoding="utf-8"))
    with LLM(num_threads=1, num_blocks=200) as llm:
        first, second = extract(llm, PERSON, [TEXT, "Bob is 7."], examples=examples)
        (found,) = extract(llm, schema, [CONTACT])
    assert first.valid and second.valid and first.evidence.keys() <= {"/name", "/age"}
    name, title, company, email, phone = CONTACT.split(", ")
    assert found.record == {"name": name, "email": email, "phone": phone, "company": company, "title": title}


async def test_the_tokens_of_every_request_are_counted_and_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A text of parts takes several requests, and each row its own."""
    caplog.set_level(logging.INFO, "troupe.requests")
    _, parts = await server.post("/v1/extract", BODY | {"text": TEXT + " Nothing else." * 300})
    usage = parts["usage"]
    num_prompt = sum(len(request.prompt) for request in server.engine.requests)
    assert len(server.engine.requests) > 1 and usage["prompt_tokens"] == num_prompt
    assert usage["completion_tokens"] == len(server.engine.record) * len(server.engine.requests)
    async with server.client.post(
        f"{server.url}/v1/extract", json={"schema": PERSON, "rows": [TEXT, TEXT, ""]}
    ) as reply:
        lines = [json.loads(line) for line in (await reply.text()).splitlines()]
    assert ["usage" in line for line in lines] == [True, True, False]
    await wait_until(lambda: len(caplog.messages) == 2)
    for line, usages in zip(caplog.messages, ([usage], [line["usage"] for line in lines[:2]]), strict=True):
        assert f"model=fake prompt_tokens={sum(each['prompt_tokens'] for each in usages)} " in line
        assert f"output_tokens={sum(each['completion_tokens'] for each in usages)} finish=stop" in line
