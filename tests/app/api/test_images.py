"""Images through the API: a tiny model that sees them, and everything that must be refused."""

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp.web
import pytest
import pytest_asyncio

from app.config import AppConfig
from engine import Engine, EngineConfig, InvalidRequest
from engine.input.images.source import MediaReader
from tests.app.api.harness import Server, events, run_server
from tests.app.extraction.pdf_files import make_pdf
from tests.engine.vision_folders import make_picture, make_smolvlm_folder, to_bytes
from tests.fakes import FakeEngine
from tests.hostile_images import list_hostile, make_part

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOMAINS = ("localhost", "127.0.0.1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "allowed.invalid")
PNG = to_bytes(make_picture((60, 40)))
TEXT = {"type": "text", "text": "What is it?"}
HOSTILE = dict(list_hostile())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = make_smolvlm_folder(tmp_path_factory.mktemp("seeing"))
    config = EngineConfig(model=str(folder), served_model_name="eye", num_blocks=256, allowed_media_domains=DOMAINS)
    async with Engine(config) as engine, run_server(engine, AppConfig()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blind() -> AsyncIterator[Server]:
    async with run_server(FakeEngine(), AppConfig()) as running:
        yield running


async def ask(server: Server, *parts: Any, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0}
    return await server.post("/v1/chat/completions", body | fields)


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_image_costs_its_sender_a_4xx(seeing: Server, name: str) -> None:
    status, reply = await ask(seeing, TEXT, HOSTILE[name])
    assert 400 <= status < 500 and reply["error"]["message"], reply
    assert seeing.engine.state == "ready"


async def test_images_are_answered_on_all_three_routes(seeing: Server) -> None:
    status, chat = await ask(seeing, make_part(PNG), TEXT)
    assert status == 200, chat
    assert chat["usage"]["prompt_tokens"] > 30
    url = make_part(PNG)["image_url"]["url"]
    status, reply = await ask(seeing, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}, TEXT)
    assert (status, reply["choices"]) == (200, chat["choices"])
    item = {
        "role": "user",
        "content": [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}],
    }
    status, reply = await seeing.post("/v1/responses", {"input": [item], "max_output_tokens": 4, "temperature": 0})
    assert status == 200 and reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    message = {"role": "user", "content": [{"type": "image", "source": source}, TEXT]}
    body = {"model": "eye", "messages": [message], "max_tokens": 4, "temperature": 0}
    status, reply = await seeing.post("/v1/messages", body)
    assert status == 200 and reply["content"][0]["text"] == chat["choices"][0]["message"]["content"]


async def test_a_spelled_image_token_stays_text(seeing: Server) -> None:
    status, with_token = await ask(seeing, {"type": "text", "text": "<image>"})
    assert status == 200 and with_token["usage"]["prompt_tokens"] > 15
    assert (await ask(seeing, {"type": "text", "text": "<image>"}, make_part(PNG)))[0] == 200


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def test_images_in_results_of_tools_are_seen_after_the_results() -> None:
    async with run_server(FakeEngine(sees_images=True), AppConfig()) as server:
        for after in ([], [TEXT]):
            asked = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "1"}]
            asked[1]["content"] = [{"type": "text", "text": "done"}, make_part(PNG)]
            asked += [{"role": "user", "content": after}] if after else []
            status, headers, _ = await server.ask("/v1/chat/completions", "POST", json={"messages": asked})
            assert (status, headers.get("x-troupe-warning")) == (200, None)
            prompt = server.engine.requests[-1].prompt
            assert "done\n[image: it follows]\n" in prompt and prompt.count("<image>") == 1
            assert prompt.split("<user>")[-1].startswith("<image>" + "What is it?" * bool(after))


async def test_too_many_images_are_refused(seeing: Server) -> None:
    status, reply = await ask(seeing, *[make_part(PNG)] * 33)
    assert status == 400 and "at most 32" in reply["error"]["message"]


URL = make_part(PNG)["image_url"]["url"]
PDF_TEXT = "Hello PDF"
PDF = base64.b64encode(make_pdf(PDF_TEXT)).decode()
FILE = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
GIF = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "R0lG"}}
UNSEEN = "the model cannot see it]"
SEARCHED = {"type": "search_result", "source": "a.org", "title": "T", "content": [{"type": "text", "text": "found"}]}
# a part -> what a text model has instead
PARTS: list[tuple[Any, list[str]]] = [
    (make_part(PNG), [f"[image: {UNSEEN}"]),
    ({"type": "input_image", "image_url": URL}, [f"[image: {UNSEEN}"]),
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}, [UNSEEN]),
    ({"type": "file", "file": FILE}, ["[a.pdf]", PDF_TEXT]),
    ({"type": "input_file", **FILE}, [PDF_TEXT]),
    ({"type": "input_file", "filename": "b.txt", "file_data": base64.b64encode(b"notes").decode()}, ["[b.txt]\nnotes"]),
    ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}, [PDF_TEXT]),
    ({"type": "document", "title": "D", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}, ["D\nx"]),
    ({"type": "document", "source": {"type": "content", "content": [TEXT, make_part(PNG)]}}, ["What is it?", UNSEEN]),
    (SEARCHED, ["T\na.org\nfound"]),
    ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}, [UNSEEN]),
]
# the same of a tool only: what a user sends that no model here can read is refused
HISTORY: list[tuple[Any, list[str]]] = [
    (GIF, [f"[image of type image/gif: {UNSEEN}"]),
    ({"type": "document", "source": {"type": "url", "url": "http://a.org"}}, [f"[document: {UNSEEN}"]),
    ({"type": "input_audio", "input_audio": {}}, [f"[input_audio: {UNSEEN}"]),
    ({"type": "tool_reference", "tool_name": "bash"}, ["bash"]),
    ({"type": "web_search_tool_result", "content": [{"type": "web_search_result", "title": "T", "url": "u"}]}, ["T"]),
]


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(("part", "told"), [*PARTS, *HISTORY], ids=lambda value: str(value)[:40])
async def test_a_text_model_reads_texts_and_is_told_what_it_cannot_see(
    blind: Server, part: Any, told: list[str], role: str
) -> None:
    def message(kind: str) -> dict[str, Any]:
        content = [{"type": "text", "text": "Here:"}, part]
        if role == "user":
            return {"role": "user", "content": content}
        if kind == "messages":
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": content}]}
        if kind == "input":
            return {"type": "function_call_output", "call_id": "1", "output": content}
        return {"role": "tool", "tool_call_id": "1", "content": content}

    for path, name in (("chat/completions", "chat"), ("messages", "messages"), ("responses", "input")):
        body = {"model": "fake", "max_tokens": 9} if name == "messages" else {}
        body |= {"input" if name == "input" else "messages": [message(name)]}
        status, headers, reply = await blind.ask(f"/v1/{path}", "POST", json=body)
        if role == "user" and (part, told) in HISTORY[:3]:
            assert status == 400 and "is not supported" in reply["error"]["message"]
            continue
        assert status == 200, reply
        prompt = blind.engine.requests[-1].prompt
        assert all(text in prompt for text in ["Here:\n", *told])
        assert (UNSEEN in prompt) == ("cannot see" in headers.get("x-troupe-warning", ""))


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("b.txt", b"some notes", "[b.txt]\nsome notes"), ("c.pdf", base64.b64decode(PDF), PDF_TEXT),
        ("d.png", PNG, f"[image: {UNSEEN}"),
    ],
)
async def test_a_part_may_name_a_file_that_was_uploaded_by_the_same_owner(
    blind: Server, name: str, data: bytes, told: str
) -> None:
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", data, filename=name)
    stored = (await blind.post_form("/v1/files", form))[1]["id"]

    def ask(file_id: str) -> list[tuple[str, Any]]:
        image, source = {"type": "input_image", "file_id": file_id}, {"type": "file", "file_id": file_id}
        return [
            ("chat/completions", {"messages": make_user({"type": "file", "file": {"file_id": file_id}})}),
            ("messages", {"max_tokens": 9, "messages": make_user({"type": "document", "source": source})}),
            ("messages", {"max_tokens": 9, "messages": make_user({"type": "image", "source": source})}),
            ("responses", {"input": make_user({"type": "input_file", "file_id": file_id})}),
            ("responses", {"input": make_user(image)}),
            ("responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": [image]}]}),
        ]

    for path, body in ask(stored):
        status, reply = await blind.post(f"/v1/{path}", body | {"model": "fake"})
        assert status == 200, reply
        assert told in blind.engine.requests[-1].prompt
    for path, body in ask("file-1")[:5]:
        status, reply = await blind.post(f"/v1/{path}", body | {"model": "fake"})
        assert status == 400 and "there is no file 'file-1'" in reply["error"]["message"]
    assert (await blind.post("/v1/responses", ask("file-1")[5][1]))[0] == 200
    assert "[file file-1: the model cannot see it]" in blind.engine.requests[-1].prompt


def make_user(part: Any) -> list[Any]:
    return [{"role": "user", "content": [part]}]


PAID = {"type": "object", "properties": {"paid": {"type": "boolean"}}, "required": ["paid"]}


async def test_a_record_is_extracted_from_an_image_in_json_or_a_form(seeing: Server) -> None:
    url = make_part(PNG)["image_url"]["url"]
    status, whole = await seeing.post("/v1/extract", {"schema": PAID, "images": [url]})
    assert status == 200 and whole["valid"] and whole["usage"]["prompt_tokens"] > 30, whole
    assert whole["evidence"] == {}
    sink = io.BytesIO()
    make_picture((60, 40)).save(sink, "PDF")
    for name, content in (("a.png", PNG), ("a.pdf", sink.getvalue())):
        form = aiohttp.FormData({"schema": json.dumps(PAID)})
        form.add_field("file", content, filename=name)
        async with seeing.client.post(f"{seeing.url}/v1/extract", data=form) as reply:
            found = await reply.json()
        assert found["source"] == name and found["valid"], found
    assert found["usage"]["prompt_tokens"] >= whole["usage"]["prompt_tokens"]
    *_, last = events(await seeing.stream("/v1/extract", {"schema": PAID, "images": [url], "text": "Paid."}))
    assert last["valid"] and last["usage"]["prompt_tokens"] > whole["usage"]["prompt_tokens"]


async def test_images_that_cannot_be_extracted_from_are_refused(seeing: Server) -> None:
    good, bad = (make_part(each)["image_url"]["url"] for each in (PNG, PNG[:90]))
    for change, told in (
        ({"images": [bad]}, "cannot be decoded"),
        ({"images": ["file:///etc/passwd"]}, "must be a data: URL"), ({"images": []}, "images"),
        ({"images": [good] * 33}, "images"), ({"images": [good], "rows": ["x"]}, "either images or rows"),
        ({"images": [good], "options": {"verbatim": True}}, "verbatim texts must be parts of a text"),
    ):
        status, reply = await seeing.post("/v1/extract", {"schema": PAID} | change)
        assert status == 400 and reply["error"]["param"] == "images", reply
        assert told in reply["error"]["message"]
    async with run_server(FakeEngine(), AppConfig()) as server:
        status, reply = await server.post("/v1/extract", {"schema": PAID, "images": [good]})
    assert status == 400 and reply["error"]["param"] == "images"
    assert "sees none" in reply["error"]["message"] or "send text only" in reply["error"]["message"]


async def test_the_web_is_read_without_redirects_and_with_a_limit() -> None:
    async def answer(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        match request.path:
            case "/image.png":
                return aiohttp.web.Response(body=PNG)
            case "/large":
                return aiohttp.web.Response(body=bytes(33 * 2**20))
            case "/moved":
                raise aiohttp.web.HTTPFound("/image.png")
        raise aiohttp.web.HTTPNotFound

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(answer))
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    reader = MediaReader(["127.0.0.1"], is_public=lambda address: True)
    assert await reader.read(f"{base}/image.png") == PNG
    for path, told in (("/large", "at most"), ("/moved", "status 302"), ("/none", "status 404")):
        with pytest.raises(InvalidRequest, match=told):
            await reader.read(base + path)
    with pytest.raises(InvalidRequest, match="private"):
        await MediaReader(["127.0.0.1"]).read(f"{base}/image.png")
    await runner.cleanup()
