"""POST /v1/chat/completions against a FakeEngine: replies, raw event streams, and requests that are cut off."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from app.api import sse
from app.api.chat import UNSET
from engine import (
    ConfigError,
    EngineConfig,
    EngineDead,
    EngineOverloaded,
    InvalidRequest,
    read_sampling_defaults,
)
from tests.app.api.harness import CHAT, Server, Start, events
from tests.fakes import RECORD, FakeEngine
from tests.waiting import wait_until

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
PROMPT_TOKENS = len("<user>hello\n<assistant>")
URL = "/v1/chat/completions"


async def test_a_reply_has_the_openai_shape(server: Server) -> None:
    status, reply = await server.chat()
    assert (status, reply["object"], reply["model"]) == (200, "chat.completion", "fake")
    assert reply["id"].startswith("chatcmpl-")
    choice = reply["choices"][0]
    said = {"role": "assistant", "content": "You said <user>hello", "refusal": None}
    assert choice["message"] == said | dict.fromkeys(UNSET) and reply["service_tier"] is None
    # clients of vLLM read these as attributes
    assert choice["token_ids"] is choice["logprobs"] is None
    assert reply["prompt_logprobs"] is reply["prompt_token_ids"] is reply["kv_transfer_params"] is None
    assert choice["finish_reason"] == "stop"
    assert reply["system_fingerprint"].startswith("troupe-")
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 20, "total_tokens": PROMPT_TOKENS + 20}
    assert reply["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 3}}


async def test_a_stream_of_server_sent_events_has_role_then_text_then_reason_then_done(server: Server) -> None:
    _, headers, text = await server.ask(URL, "POST", json=CHAT | {"stream": True})
    assert headers["content-type"] == "text/event-stream; charset=utf-8" and headers["cache-control"] == "no-store"
    assert all(part.startswith("data: {") and "\n" not in part for part in text.split("\n\n")[:-2])
    chunks = events(text.encode())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "You said <user>hello"
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_awkward_characters_survive_the_templated_chunks(start: Start) -> None:
    text = 'a"b\\c\n\n\u2028é😀</script>\x00\x7f'
    server = await start(FakeEngine(reply=lambda prompt: text))
    chunks = await server.chat_chunks()
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


async def test_usage_comes_last_without_choices_and_with_every_chunk_when_asked_for(server: Server) -> None:
    chunks = await server.chat_chunks(stream_options={"include_usage": True})
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 20)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    chunks = await server.chat_chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts[:4] == [0, 1, 2, 3]
    alone = await server.chat_chunks(stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in alone)


async def test_n_choices_are_numbered(server: Server) -> None:
    _, reply = await server.chat(n=3)
    streamed = [chunk["choices"][0] for chunk in await server.chat_chunks(n=3)]
    for ends in (reply["choices"], [choice for choice in streamed if choice["finish_reason"]]):
        assert sorted(end["index"] for end in ends) == [0, 1, 2]


async def test_logprobs_carry_tokens_bytes_and_alternatives(server: Server) -> None:
    _, reply = await server.chat(logprobs=True, top_logprobs=2)
    first = reply["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Y", -0.25, [89])
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.25, -9999.0]
    chunks = await server.chat_chunks(logprobs=True, top_logprobs=20)
    for chunk in chunks[1:-1]:
        choice = chunk["choices"][0]
        assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["delta"]["content"]


async def test_ids_come_only_when_asked_for(server: Server) -> None:
    _, reply = await server.chat(return_token_ids=True)
    assert "".join(map(chr, reply["prompt_token_ids"])) == "<user>hello\n<assistant>"
    assert "".join(map(chr, reply["choices"][0]["token_ids"])) == "You said <user>hello"


async def test_a_limit_or_a_stop_string_that_cuts_is_the_reason(server: Server) -> None:
    _, reply = await server.chat(max_completion_tokens=3, max_tokens=9)
    assert reply["choices"][0]["message"]["content"] == "You"
    assert reply["choices"][0]["finish_reason"] == "length"
    _, reply = await server.chat(stop=" said")
    choice = reply["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("You", " said")


async def test_a_grammar_request_says_which_backend_enforced_it(server: Server) -> None:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}}
    _, reply = await server.chat(**body)
    assert reply["choices"][0]["message"]["content"] == RECORD
    assert reply["structured"] == {"backend": "fakegrammar", "compile_time_ms": 4.0, "valid": True}
    chunks = await server.chat_chunks(**body)
    assert chunks[-1]["structured"]["backend"] == "fakegrammar"


async def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields = {"temperature": 0.5, "top_k": 7, "seed": 42, "logit_bias": {"65": -3}, "min_tokens": 2}
    await server.chat(**fields, priority=-4, cache_salt="mine", deadline_s=9.5)
    request = server.engine.requests[-1]
    assert (request.params.temperature, request.params.top_k, request.params.seed) == (0.5, 7, 42)
    assert request.params.logit_bias == {65: -3.0}
    assert request.options == {"priority": -4, "cache_salt": "mine", "deadline_s": 9.5}


@pytest.mark.parametrize(
    "content", ["some text", [{"type": "text", "text": "some "}, {"type": "text", "text": "text"}]]
)
async def test_a_prediction_reaches_the_engine_and_is_counted(server: Server, content: Any) -> None:
    _, reply = await server.chat(prediction={"type": "content", "content": content})
    assert server.engine.requests[-1].options["prediction"] == "some text"
    counts = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert reply["usage"]["completion_tokens_details"] == counts


async def test_text_parts_are_joined_and_developer_is_a_system_role(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    await server.chat(messages=messages)
    assert server.engine.requests[-1].prompt == "<system>be brief\n<user>a\nb\n<assistant>"


async def test_the_final_message_can_be_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    _, reply = await server.chat(
        messages=messages, continue_final_message=True, add_generation_prompt=False, echo=True
    )
    assert server.engine.requests[-1].prompt.endswith("<assistant>Well")
    assert reply["choices"][0]["message"]["content"].startswith("WellYou said")


async def test_an_error_before_the_first_token_keeps_its_status_in_a_stream(start: Start) -> None:
    server = await start(FakeEngine(reject=EngineOverloaded("the queue is full", retry_after_s=2.5)))
    status, headers, reply = await server.ask(URL, "POST", json=CHAT | {"stream": True})
    assert (status, headers["retry-after"], reply["error"]["code"]) == (503, "3", "engine_overloaded")


async def test_an_error_in_mid_stream_is_an_event_and_then_done(start: Start) -> None:
    server = await start(FakeEngine(fail_after=(4, EngineDead("crashed in /home/x/engine.py"))))
    raw = await server.stream(URL, CHAT)
    error = events(raw)[-1]["error"]
    assert error["code"] == "engine_dead"
    assert "/home" not in error["message"]


async def test_the_engines_own_refusal_is_a_400_naming_the_field(start: Start) -> None:
    server = await start(FakeEngine(reject=InvalidRequest("the prompt has 9000 tokens", "messages")))
    status, reply = await server.chat()
    told = {"message": "the prompt has 9000 tokens", "type": "invalid_request_error"}
    assert (status, reply["error"]) == (400, told | {"param": "messages", "code": "invalid_value"})


async def test_a_queued_stream_is_kept_alive_by_comments(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.1)
    engine = FakeEngine(hold=asyncio.Event())
    server = await start(engine)
    async with server.client.post(server.url + URL, json=CHAT | {"stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        engine.hold.set()
        rest = await response.read()
    assert events(rest)[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("path", "first", "again"),
    [("messages", ["message_start"], "ping"),
     ("responses", ["response.created", "response.in_progress"], "response.in_progress")],
)
async def test_events_come_before_the_first_token_and_go_on(
    start: Start, path: str, first: list[str], again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.1)
    server = await start(FakeEngine(hold=asyncio.Event()))
    body = {"model": "fake", "stream": True, "messages" if path == "messages" else "input": CHAT["messages"]}
    body |= {"max_tokens": 9} if path == "messages" else {}
    async with server.client.post(f"{server.url}/v1/{path}", json=body) as response:
        kinds = [
            (await response.content.readuntil(b"\n\n")).split(b"\n")[0].decode().removeprefix("event: ")
            for _ in [*first, again, again]
        ]
        server.engine.hold.set()
        rest = (await response.read()).decode()
    assert kinds == [*first, again, again]
    assert not any(f"event: {kind}\n" in rest for kind in first) and "_delta" in rest.replace(".", "_")


async def test_a_grammar_that_takes_too_long_is_blamed_on_its_own_field(start: Start) -> None:
    engine = FakeEngine(reject=InvalidRequest("the grammar took longer than 10 s to compile", "grammar"))
    status, reply = await (await start(engine)).chat(structured_outputs={"regex": "a+"})
    assert (status, reply["error"]["param"]) == (400, "structured_outputs.regex")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The lines that the API logs."""
    caplog.set_level(logging.INFO, "troupe.requests")
    caplog.set_level(logging.INFO, "troupe.api")
    return caplog


@asynccontextmanager
async def begin_stream(start: Start) -> AsyncIterator[tuple[Server, aiohttp.ClientResponse, bytes]]:
    """A server, the reply of a long stream, and its first event."""
    server = await start(FakeEngine(reply=lambda prompt: "x" * 10_000, step_s=0.01))
    async with server.client.post(server.url + URL, json=CHAT | {"stream": True}) as response:
        yield server, response, await response.content.readuntil(b"\n\n")


async def test_a_stream_whose_reader_left_is_aborted_and_logged_with_its_tokens(
    start: Start, log: pytest.LogCaptureFixture
) -> None:
    async with begin_stream(start) as (server, response, _):
        response.close()
    await wait_until(lambda: server.engine.requests[0].is_aborted and bool(log.records))
    assert server.engine.requests[0].num_sent < 1000
    line = log.messages[0]
    assert f"prompt_tokens={PROMPT_TOKENS} cached_tokens=3 output_tokens=" in line
    assert " finish=abort ttft_ms=1000.0 " in line


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_whose_client_left_before_any_output_is_aborted_and_logged(
    start: Start, log: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    server = await start(FakeEngine(hold=asyncio.Event()))
    task = asyncio.create_task(server.post(URL, CHAT | {"stream": is_stream}))
    await wait_until(lambda: len(server.engine.requests) == 1)
    task.cancel()
    await wait_until(lambda: server.engine.requests[0].is_aborted and bool(log.records))
    line = log.messages[0]
    assert f"prompt_tokens={PROMPT_TOKENS} cached_tokens=0 output_tokens=0 finish=abort total_ms=" in line


async def test_a_stream_that_an_intended_close_cuts_off_is_no_error(
    start: Start, log: pytest.LogCaptureFixture
) -> None:
    async with begin_stream(start) as (server, response, first):
        await server.engine.close()
        error = events(first + await response.read())[-1]["error"]
    assert (error["code"], error["type"]) == ("server_closing", "service_unavailable")
    await wait_until(lambda: len(log.records) == 2)
    told, visited = log.records
    assert (told.levelname, told.name) == ("INFO", "troupe.api") and "closing" in told.getMessage()
    assert " finish=abort ttft_ms=" in visited.getMessage()


async def test_a_reply_in_one_piece_that_a_close_cuts_off_is_a_503(start: Start) -> None:
    hold = asyncio.Event()
    server = await start(FakeEngine(hold=hold))
    reply = asyncio.create_task(server.chat())
    await wait_until(lambda: len(server.engine.requests) == 1)
    await server.engine.close()
    hold.set()
    status, body = await reply
    assert (status, body["error"]["code"]) == (503, "server_closing")


async def test_a_prompt_that_is_only_scored_has_no_output_in_the_log(
    start: Start, log: pytest.LogCaptureFixture
) -> None:
    server = await start()
    _, reply = await server.complete(max_tokens=0, echo=True, logprobs=1)
    assert reply["usage"]["completion_tokens"] == 0
    await wait_until(lambda: bool(log.records))
    assert " output_tokens=0 finish=length " in log.messages[0]


async def test_requests_are_sampled_as_the_model_recommends_unless_they_say(start: Start, tmp_path: Path) -> None:
    values = {"max_new_tokens": 5, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "do_sample": True, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    server = await start(FakeEngine(config=EngineConfig(generation_config=str(tmp_path), served_model_name="fake")))
    for body, temperature in ((CHAT, 0.6), (CHAT | {"temperature": 0.0}, 0.0)):
        assert (await server.post("/v1/chat/completions", body))[0] == 200
        params = server.engine.requests[-1].params
        assert (params.temperature, params.top_k, params.max_tokens) == (temperature, 20, 5)
    assert (await server.post("/v1/completions", {"prompt": "x"}))[0] == 200
    assert server.engine.requests[-1].params.temperature == 0.6
    plain = await start(FakeEngine(config=EngineConfig(generation_config="vllm", served_model_name="fake")))
    assert (await plain.chat())[0] == 200 and plain.engine.requests[-1].params.temperature == 1.0


@pytest.mark.parametrize("value", ["hot", -1])
def test_a_recommended_value_out_of_range_names_the_file(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature"):
        read_sampling_defaults(tmp_path)
