"""Limits of a body: its size, the time it takes, its number of values, and values that JSON forbids."""

import asyncio
import gzip
import json
import threading
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from app import json_text
from app.api import context, http_limits
from app.api.anthropic.request import MessagesRequest
from app.api.errors import ApiError, to_api_error
from app.api.messages import read_messages
from app.api.protocol import ChatRequest, DetokenizeRequest, Fields
from app.api.responses.request import ResponsesRequest
from app.json_text import MAX_JSON_VALUES, RefusedJson, ValueCounter, check_json
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine
from tests.waiting import wait_until

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 37\r\n\r\n"
)
BODY = b'{"model": "fake", "prompt": "hello"} '


@pytest.mark.parametrize("sent", [b"", HEAD[:30], HEAD, HEAD + BODY[:10]])
async def test_whoever_sends_nothing_more_is_hung_up_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 0.1)
    reader, writer = await connect(server)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


@pytest.fixture
async def limits(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """The time limits that connections start, recognised by their seconds."""
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 1234.5)
    loop, started = asyncio.get_running_loop(), []
    call_later = loop.call_later

    def note(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        handle = call_later(delay, *args, **options)
        if delay == http_limits.READ_TIMEOUT_S:
            started.append(handle)
        return handle

    monkeypatch.setattr(loop, "call_later", note)
    return started


async def test_each_part_of_a_body_has_the_whole_time_and_a_pause_after_the_answer_has_no_limit(
    limits: list[asyncio.TimerHandle], server: Server
) -> None:
    reader, writer = await connect(server)
    writer.write(HEAD[:-2] + b"Expect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    for part in (BODY[:9], BODY[9:18]):
        num_started = len(limits)
        writer.write(part)
        await wait_until(lambda before=num_started: len(limits) > before)  # type: ignore[misc]
        assert [limit.cancelled() for limit in limits] == [True] * (len(limits) - 1) + [False]
    writer.write(BODY[18:])
    assert b"200 OK" in await reader.readline()
    assert all(limit.cancelled() for limit in limits)
    writer.write(HEAD + BODY)
    assert await asyncio.wait_for(reader.readuntil(b"200 OK"), 20)
    writer.close()


@pytest.mark.parametrize("more", [b"\r\n", HEAD[:30]])
async def test_the_beginning_of_the_next_request_cuts_no_answer_short(
    limits: list[asyncio.TimerHandle], start: Start, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    reader, writer = await connect(await start(engine))
    writer.write(HEAD + BODY)
    await wait_until(lambda: bool(engine.requests))
    monkeypatch.setattr(http_limits, "READ_TIMEOUT_S", 0.01)
    num_started = len(limits)
    writer.write(more)
    await wait_until(lambda: len(limits) > num_started + 3)  # the time is over several times
    engine.hold.set()
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
    assert b"You said hello" in await asyncio.wait_for(reader.read(), 20)
    writer.close()


@pytest.mark.parametrize("name", ["Content-Type", "Content-Length", "Host", "Origin", "Authorization", "x-api-key"])
async def test_a_header_that_must_be_single_is_refused_when_it_comes_twice(server: Server, name: str) -> None:
    """Readers disagree about which of them counts: the bound on values would not hold for a second content type."""
    reader, writer = await connect(server)
    writer.write(HEAD[:-2] + f"{name}: 37\r\n".encode() * 2 + b"\r\n" + BODY)
    assert b" 400 " in await reader.readline()
    writer.close()
    assert server.engine.requests == []


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQC\r\n"
CHUNKED = HEAD.replace(b"Content-Length: 37", b"Transfer-Encoding: chunked")
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD[:-2] + UPGRADE + b"\r\n" + BODY,
        CHUNKED[:-2] + UPGRADE + b"\r\n25\r\n" + BODY + b"\r\n0\r\n\r\n",
        HEALTH[:-2] + b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n",
        HEALTH[:-2] + b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n\r\n",
    ],
)
@pytest.mark.parametrize("step", [17, 10_000])
async def test_an_upgrade_is_ignored_and_the_request_is_answered(server: Server, sent: bytes, step: int) -> None:
    reader, writer = await connect(server)
    for at in range(0, len(sent), step):
        writer.write(sent[at : at + step])
        await asyncio.sleep(0)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.write(HEALTH)
    assert await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 200 "), 20)
    writer.close()


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: Server) -> None:
    reader, writer = await connect(server)
    body = json.dumps(CHAT | {"stream": True}).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    head, _, rest = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower() and b"connection: close" in head.lower()
    assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
    writer.close()


RAW = zlib.compress(BODY)[2:-4]


@pytest.mark.parametrize(
    ("encoding", "body", "status", "said"),
    [
        ("gzip", gzip.compress(BODY, mtime=0), 200, ""), ("GZip", gzip.compress(BODY, mtime=0), 200, ""),
        ("deflate", zlib.compress(BODY), 200, ""), ("deflate", RAW, 200, ""), ("identity", BODY, 200, ""),
        ("gzip", gzip.compress(BODY, mtime=0)[:-5], 400, "its end is missing"),
        ("gzip", b"".join(gzip.compress(part, mtime=0) for part in (BODY[:9], b"", BODY[9:])), 200, ""),
        ("gzip, identity", gzip.compress(BODY, mtime=0), 200, ""), ("identity, ,Identity", BODY, 200, ""),
        ("gzip", gzip.compress(BODY, mtime=0) + b"{}", 400, "the body is not valid gzip"),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(b" ", mtime=0)[:-5], 400, "its end is missing"),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(b"", mtime=0) * 2048, 400, "more than 2,048 members"),
        ("gzip", gzip.compress(b" " * 2**15, mtime=0) * 9, 413, "larger than 65536 bytes"),
        ("deflate", zlib.compress(BODY) * 2, 400, "data follows its end"),
        ("gzip", BODY, 400, "the body is not valid gzip"), ("zstd", BODY, 415, "'zstd'"),
        ("gzip, gzip", BODY, 415, "'gzip, gzip'"),
        ("gzip", gzip.compress(b" " * 2**20, mtime=0), 413, "larger than 65536 bytes"),
        ("deflate", zlib.compress(b"[" * 60_000 * 17), 413, "larger than 65536 bytes"),
    ],
)
async def test_a_compressed_body_is_decoded_within_its_limit_or_refused_by_name(
    start: Start, encoding: str, body: bytes, status: int, said: str
) -> None:
    server = await start(max_body_bytes=2**16)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    got, _, reply = await server.ask("/v1/completions", "POST", data=body, headers=headers)
    assert got == status, reply
    assert said in (reply["error"]["message"] if status != 200 else "")


async def test_needless_slashes_are_no_other_route(server: Server) -> None:
    for path in ("//v1/chat/completions", "/v1//chat/completions", "/v1/chat/completions///"):
        assert (await server.post(path, CHAT))[0] == 200
    for path in ("/v1/models/", "//health/", "/v1/models/fake/"):
        assert (await server.get(path))[0] == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake", "/metrics", "/health", "/openapi.json"])
async def test_a_head_is_a_get_without_its_body(server: Server, path: str) -> None:
    status, headers, body = await server.ask(path, "HEAD")
    assert (status, body) == (200, "" if path == "/metrics" else None)
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize("media", ["Application/JSON; Charset=UTF-8", "application/vnd.x+json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
async def test_json_is_read_in_every_encoding_that_a_mark_tells(server: Server, media: str, encoding: str) -> None:
    status, reply = await server.post_text("/v1/completions", BODY.decode().encode(encoding), media)
    assert status == 200, reply


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_body_over_the_limit_is_a_413_with_and_without_its_length(start: Start) -> None:
    server = await start(max_body_bytes=1024)
    status, reply = await server.chat(user="x" * 2000)
    assert (status, reply["error"]["type"]) == (413, "invalid_request_error")

    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 100

    assert (await server.post_text("/v1/completions", endless()))[0] == 413


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(("limit", "status"), [(2**20, b" 413 "), (2**26, b" 404 ")])
async def test_a_client_that_writes_before_it_reads_gets_an_early_refusal(
    start: Start, version: bytes, limit: int, status: bytes
) -> None:
    """A connection closed with unread data is reset, which deletes the answer in the client's buffer."""
    reader, writer = await connect(await start(max_body_bytes=limit))
    writer.write(b"POST /v1/nothing HTTP/%s\r\nHost: localhost\r\nConnection: close\r\n" % version)
    writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % 2**25)
    for _ in range(32):
        writer.write(b" " * 2**20)
        await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 20)
    assert status in answer and answer.endswith(b"}")
    writer.close()


async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(server: Server) -> None:
    status, reply = await server.post("/v1/chat/completions", CHAT | {"user": [[]] * 260_000})
    assert (status, "200000 commas and brackets" in reply["error"]["message"]) == (413, True)
    assert (await server.complete(prompt=[65] * 100_000))[0] == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b"\xff\xfe{}", b"[" * 100_000, b'{"n": 1' + b"0" * 5000 + b"}"]
)
async def test_a_body_that_is_no_json_object_is_invalid_json(server: Server, body: bytes) -> None:
    status, reply = await server.post_text("/v1/chat/completions", body)
    assert (status, reply["error"]["code"]) == (400, "invalid_json") and reply["error"]["message"]


async def test_a_wrong_content_type_is_explained(server: Server) -> None:
    status, reply = await server.post_text("/v1/chat/completions", b"{}", "text/plain")
    assert status == 400 and "application/json" in reply["error"]["message"]


TORN = r'"\ud800"'
FIELDS = '"model": "fake", "messages": [{"role": "user", "content": "x"}]'
TOOL = '{"type": "function", "name": "f", "description": TORN}'
WRONG = [
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": TORN}]}', "messages[0].content"),
    ("/v1/chat/completions", "{FIELDS, TORN: 1}", "the body"),
    ("/v1/chat/completions", '{FIELDS, "metadata": {"a": [1, NaN]}}', "metadata.a[1]=nan"),
    ("/v1/completions", '{"prompt": ["a", TORN]}', "prompt[1]"),
    ("/v1/responses", '{"input": "x", "reasoning": {"x": TORN}}', "reasoning.x"),
    ("/v1/responses", '{"input": "x", "reasoning": {"x": NaN}}', "reasoning.x=nan"),
    ("/v1/responses", f'{{"input": "x", "tool_choice": "none", "tools": [{TOOL}]}}', "tools[0].description"),
    ("/v1/messages", '{FIELDS, "max_tokens": 5, "system": TORN}', "system"),
    ("/v1/messages/count_tokens", '{FIELDS, "system": TORN}', "system"),
    ("/tokenize", '{"prompt": TORN}', "prompt"),
    ("/detokenize", '{"tokens": [-Infinity]}', "tokens[0]=-inf"),
]


@pytest.mark.parametrize(("path", "body", "place"), WRONG)
async def test_a_value_that_is_none_is_a_400_naming_its_place(
    server: Server, path: str, body: str, place: str
) -> None:
    data = body.replace("FIELDS", FIELDS).replace("TORN", TORN)
    status, reply = await server.post_text(path, data)
    assert status == 400, reply
    message = reply["error"]["message"]
    assert message.startswith(place + " "), message
    assert "unpaired surrogate" in message or "finite number" in message
    assert server.engine.requests == []


@pytest.mark.parametrize("kind", ["Application/JSON", "application/vnd.api+JSON; charset=utf-8"])
@pytest.mark.parametrize(
    "extra", ['"metadata": {"a": NaN}', '"user": "a", "user": "b"', '"x": [' + "0," * 200_001 + "0]"]
)
async def test_the_case_of_the_media_type_opens_no_way_around(server: Server, kind: str, extra: str) -> None:
    status, _ = await server.post_text("/v1/chat/completions", f"{{{FIELDS}, {extra}}}", kind)
    assert status == (413 if len(extra) > 1000 else 400)
    assert server.engine.requests == []


@pytest.mark.parametrize("path", sorted({path for path, _, _ in WRONG}))
async def test_a_name_twice_is_a_400_naming_it(server: Server, path: str) -> None:
    schema = '{"properties": {"a": {"type": "string"}, "a": {"type": "integer"}}}'
    data = f'{{{FIELDS}, "prompt": "x", "input": "x", "tokens": [1], "max_tokens": 5, "metadata": {schema}}}'
    status, reply = await server.post_text(path, data)
    assert status == 400, reply
    assert reply["error"]["message"] == "the body: duplicate key 'a'"
    assert server.engine.requests == []


async def test_whole_pairs_and_large_numbers_pass(server: Server) -> None:
    content = [{"role": "user", "content": "\U0001f600 \x00 日本"}]
    status, reply = await server.chat(messages=content, metadata={"a": 1e308}, verbosity=10**400)
    assert status == 200, reply


def test_the_field_to_blame_is_the_first_step() -> None:
    nan = float("nan")
    for body, param in (({"a": {"b": [nan]}}, "a"), ([nan], None), (nan, None), ({"\ud800": 1}, None)):
        with pytest.raises(RefusedJson) as caught:
            check_json(body)
        assert to_api_error(caught.value).param == param


@pytest.mark.parametrize(
    ("path", "fields", "item"),
    [
        ("messages", {"messages": [], "max_tokens": 9}, {"type": "server_tool_use", "name": "x"}),
        ("responses", {"input": []}, {"type": "web_search_call"}),
    ],
)
async def test_a_deep_value_is_read_and_one_beyond_the_limit_is_a_400(
    server: Server, path: str, fields: dict[str, Any], item: dict[str, Any]
) -> None:
    for depth, wanted in ((600, 200), (json_text.MAX_DEPTH, 400)):
        value: Any = {}
        for _ in range(depth):
            value = {"a": value}
        one = item | {"input": value, "action": value}
        message = {"role": "assistant", "content": [one]} if path == "messages" else one
        turns = [message, {"role": "user", "content": "a"}]
        body = {name: turns if given == [] else given for name, given in fields.items()} | {"model": "fake"}
        status, reply = await server.post(f"/v1/{path}", body)
        assert status == wanted, reply


TEXTS = st.text(st.sampled_from(',[{"\\\n:é\0 a'), max_size=8)
VALUES = st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


def count_signs(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(count_signs, inner))


@given(value=VALUES, is_ascii=st.booleans(), size=st.integers(1, 40))
def test_the_count_is_that_of_the_value_however_the_text_is_cut(value: Any, is_ascii: bool, size: int) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    counter = ValueCounter()
    for at in range(0, len(text), size):
        counter.feed(text[at : at + size])
    assert counter.num_values == count_signs(value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_character_that_holds_the_byte_of_a_quote_hides_nothing(encoding: str) -> None:
    text = json.dumps(["\u0122"] + [[]] * 9, ensure_ascii=False).encode(encoding)
    assert len(json.loads(text)) == 10
    counter = ValueCounter()
    for at in range(len(text)):
        counter.feed(text[at : at + 1])
    assert counter.num_values >= 19


def test_the_arguments_of_all_calls_count_together() -> None:
    def read(num_values: int) -> object:
        function = {"name": "f", "arguments": json.dumps({"a": [0] * num_values})}
        call = {"id": "a", "type": "function", "function": function}
        return read_messages([{"role": "assistant", "tool_calls": [call] * 3}] * 2)

    assert read(1_000)
    with pytest.raises(ApiError, match="200000 commas and brackets") as caught:
        read(MAX_JSON_VALUES // 5)
    assert caught.value.status == 413


async def test_a_body_is_parsed_once_and_a_large_one_in_a_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def parse(text: bytes) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return json_text.parse_json(text)

    monkeypatch.setattr(context, "parse_json", parse)
    monkeypatch.setattr(Request, "json", None)  # Starlette's own, which parses on the event loop
    long = "x" * context.MAX_BYTES_ON_LOOP
    extract = {"schema": {"type": "object"}, "instructions": long, "text": "a"}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/chat/completions", CHAT | {"user": long})):
        assert (await server.post(path, body))[0] == 200
    assert threads == [True, False]
    await server.post("/v1/extract", extract)
    assert threads == [True, False, False]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {"messages": [{}], "logit_bias": {str(i): "x" for i in range(99)}}),
        (ChatRequest, {"messages": [{}], "stop_token_ids": ["a"] * 99}),
        (ChatRequest, {"messages": [1] * 99}),
        (ResponsesRequest, {"input": "x", "metadata": {str(i): None for i in range(99)}}),
        (ResponsesRequest, {"input": "x", "include": [None] * 99}),
        (MessagesRequest, {"model": "m", "messages": [{}], "max_tokens": 1, "stop_sequences": [1] * 99}),
        (DetokenizeRequest, {"tokens": ["a"] * 99}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_validation_ends_at_the_first_of_many_wrong_values(model: type[Fields], fields: dict[str, Any]) -> None:
    """All of 190,000 errors took a second of the event loop."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() == 1


async def test_very_many_unknown_fields_are_refused(server: Server) -> None:
    status, reply = await server.chat(stream=True, stream_options={f"a{i}": 1 for i in range(9000)})
    assert (status, reply["error"]["param"]) == (400, "stream_options")
