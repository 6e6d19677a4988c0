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
    config = EngineConfig(
        model=str(folder), served_model_name="eye", num_blocks=256, allowed_media_domains=DOMAINS
    )
    async with Engine(config) as engine, run_server(engine, AppConfig()) as running:
        yield running


async def ask(server: Server, *parts: Any, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0}
    return await server.post("/v1/chat/completions", body | fields)


async def test_there_are_200_hostile_cases() -> None:
    assert len(HOSTILE) >= 200


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
    status, reply = await seeing.post(
        "/v1/responses", {"input": [item], "max_output_tokens": 4, "temperature": 0}
    )
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


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_only_users_send_images(seeing: Server, role: str) -> None:
    messages = [{"role": role, "content": [make_part(PNG)]}, {"role": "user", "content": "x"}]
    status, reply = await seeing.post("/v1/chat/completions", {"messages": messages})
    assert status == 400 and "only text parts" in reply["error"]["message"]


async def test_too_many_images_are_refused(seeing: Server) -> None:
    status, reply = await ask(seeing, *[make_part(PNG)] * 33)
    assert status == 400 and "at most 32" in reply["error"]["message"]


async def test_a_text_model_refuses_images() -> None:
    async with run_server(FakeEngine(), AppConfig()) as server:
        status, reply = await ask(server, TEXT, make_part(PNG))
    assert status == 400 and reply["error"]["param"] == "messages"
    assert reply["error"]["message"].startswith("messages[0].content[1]: only text parts are supported")


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
        ({"images": ["file:///etc/passwd"]}, "must be a data: URL"),
        ({"images": []}, "images"),
        ({"images": [good] * 33}, "images"),
        ({"images": [good], "rows": ["x"]}, "either images or rows"),
        ({"images": [good], "options": {"verbatim": True}}, "verbatim texts must be parts of a text"),
    ):
        status, reply = await seeing.post("/v1/extract", {"schema": PAID} | change)
        assert status == 400 and reply["error"]["param"] == "images", reply
        assert told in reply["error"]["message"]
    async with run_server(FakeEngine(), AppConfig()) as server:
        status, reply = await server.post("/v1/extract", {"schema": PAID, "images": [good]})
    assert status == 400 and reply["error"]["param"] == "images"
    assert reply["error"]["message"] == "the model fake does not see images: send text only"


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
