"""Routes beside generation: models, health, version, metrics, tokens, request ids, unknown paths."""

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from engine import EngineConfig, EngineOverloaded
from engine.messages import CoreStats
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine, FakeTokenizer
from tests.waiting import wait_until

CHAT_PATH = "/v1/chat/completions"
ABC = {"x-request-id": "abc-1"}
LONG = "a" * 2049


async def test_a_request_id_comes_back_in_header_and_reply(server: Server) -> None:
    status, headers, reply = await server.ask(CHAT_PATH, "POST", json=CHAT, headers=ABC)
    assert (status, headers["x-request-id"]) == (200, "abc-1") and "abc-1" in reply["id"]
    replies = [await server.chat(request_id="same") for _ in range(2)]
    assert replies[0][1]["id"] != replies[1][1]["id"]


async def test_a_bug_has_its_id_and_its_status_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "troupe.requests")
    server = await start(FakeEngine(reject=RuntimeError("secret")))
    status, headers, reply = await server.ask(CHAT_PATH, "POST", json=CHAT, headers=ABC)
    assert (status, headers.getall("x-request-id")) == (500, ["abc-1"])
    assert reply["error"]["message"] == "internal error"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "troupe.requests"]
    assert line.startswith("POST /v1/chat/completions 500 id=abc-1")


@pytest.mark.parametrize("value", ["x" * 129, "a b", "é"])
async def test_an_odd_request_id_is_replaced(server: Server, value: str) -> None:
    _, headers, _ = await server.ask("/version", headers={"x-request-id": value})
    assert len(headers["x-request-id"]) == 32


async def test_models_lists_the_served_one_and_another_is_a_404(server: Server) -> None:
    _, reply = await server.get("/v1/models")
    assert reply["object"] == "list"
    assert [(model["id"], model["max_model_len"]) for model in reply["data"]] == [("fake", 2048)]
    status, reply = await server.chat(model="gpt-x")
    assert status == 404
    assert (reply["error"]["code"], reply["error"]["param"]) == ("model_not_found", "model")
    assert (await server.get("/v1/models/gpt-x"))[0] == 404


async def test_a_model_may_have_several_names(start: Start) -> None:
    engine = FakeEngine()
    engine.config = replace(engine.config, served_model_name="fake,other")
    server = await start(engine)
    assert [model["id"] for model in (await server.get("/v1/models"))[1]["data"]] == ["fake", "other"]
    status, reply = await server.chat(model="other")
    assert (status, reply["model"]) == (200, "other")


@pytest.mark.parametrize(
    ("state", "health", "live", "ready"),
    [
        ("ready", 200, 200, 200), ("falling_asleep", 200, 200, 503), ("sleeping", 200, 200, 503),
        ("waking_up", 200, 200, 503), ("starting", 503, 200, 503), ("restarting", 503, 200, 503),
        ("dead", 503, 503, 503), ("closed", 503, 503, 503),
    ],
)
async def test_alive_live_and_ready_are_three_things_and_need_no_key(
    start: Start, state: str, health: int, live: int, ready: int
) -> None:
    server = await start(api_key=("right",))
    server.engine.state, server.engine.error = state, "RuntimeError: the device in /opt/devices/one is on fire"
    for path, status in (("/health", health), ("/ping", health), ("/livez", live), ("/readyz", ready)):
        found, reply = await server.get(path)
        assert (found, reply["state"], reply["status"] == "ok") == (status, state, status == 200), path
        # the cause, without the path that it names
        assert reply.get("error") == (None if state == "ready" else "RuntimeError: the device in ... is on fire")
        async with server.client.head(server.url + path) as response:
            assert (response.status, await response.read()) == (status, b"")


@pytest.mark.parametrize("state", ["starting", "restarting", "sleeping", "waking_up", "dead", "closed"])
async def test_an_engine_that_is_not_ready_is_a_503(server: Server, state: str) -> None:
    server.engine.state = state
    status, headers, _ = await server.ask(CHAT_PATH, "POST", json=CHAT)
    assert status == 503 and int(headers["retry-after"]) >= 1


async def test_a_method_that_a_route_does_not_take_is_a_405(server: Server) -> None:
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"), ("TRACE", "/v1/models", "GET, HEAD"),
        ("TRACE", "/health", "GET, HEAD"), ("QUERY", "/sleep", "POST"),
        ("PATCH", "/openapi.json", "GET, HEAD"),
    ):
        status, headers, reply = await server.ask(path, method)
        assert (status, headers["allow"]) == (405, allowed), (method, path)
        told = f"{method} is not allowed on {path}; it takes {allowed}"
        assert (reply["error"]["code"], reply["error"]["message"]) == ("method_not_allowed", told)


BASE_URL = "check the client's base URL"
ONLY_TEXT = "this server generates text; it"


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("POST", "/chat/completions", f"; use /v1/chat/completions: {BASE_URL}"),
        ("GET", "/models/fake", f"; use /v1/models/fake: {BASE_URL}"),
        ("POST", "/v1/v1/messages", f"; use /v1/messages: {BASE_URL}"),
        ("POST", "/nothing", " for POST"),
        ("POST", "/nothing/else", " for POST"),
        ("POST", "/v1/moderations", f" for POST: {ONLY_TEXT} has no moderation model"),
        ("POST", "/v1/audio/transcriptions", f" for POST: {ONLY_TEXT} has no model for speech"),
        ("POST", "/v1/filesystem", " for POST"), ("GET", "/v1", " for GET"),
    ],
)
async def test_an_unknown_path_error_suggests_the_right_one_or_names_the_missing_feature(
    server: Server, method: str, path: str, told: str
) -> None:
    status, reply = await server.get(path, method=method)
    assert (status, reply["error"]["code"]) == (404, "route_not_found")
    assert reply["error"]["message"] == f"there is no route {path}{told}"


async def test_metrics_use_vllms_names_under_our_prefix_and_cumulative_buckets(server: Server) -> None:
    await server.chat()
    _, text = await server.get("/metrics")
    assert 'troupe:num_requests_running{engine="0",model_name="fake"} 0.0' in text
    assert 'troupe:generation_tokens_total{engine="0",model_name="fake"} 20.0' in text
    assert 'troupe:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 1.0' in text
    assert 'troupe:engine_state{engine="0",model_name="fake",state="ready"} 1.0' in text
    assert 'troupe:cache_config_info{block_size="16",cache_dtype="auto"' in text
    _, renamed = await server.get("/metrics?prefix=vllm")
    assert 'vllm:num_requests_running{engine="0",model_name="fake"} 0.0' in renamed and "troupe:" not in renamed
    assert (await server.get("/metrics?prefix=x"))[0] == 400
    cores = {index: CoreStats(num_running=index, num_steps=5 + index) for index in range(2)}
    server.engine.replica_stats = lambda: cores
    _, text = await server.get("/metrics")
    for index in range(2):
        assert f'troupe:num_requests_running{{engine="{index}",model_name="fake"}} {index}.0' in text
        assert f'troupe:engine_steps_total{{engine="{index}",model_name="fake"}} {5 + index}.0' in text
    stats = server.engine.stats()
    histogram = server.engine.make_histogram((0.1, 1.0), (0.05, 0.5, 0.5, 5.0))
    server.engine.stats = lambda: replace(stats, histograms={"time_to_first_token_seconds": histogram})
    lines = [line for line in (await server.get("/metrics"))[1].splitlines() if "_bucket" in line]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["1.0", "3.0", "4.0"]


async def test_tokenize_and_detokenize_are_each_others_inverse(server: Server) -> None:
    status, reply = await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert (status, reply["tokens"], reply["token_strs"]) == (200, [104, 233], ["h", "é"])
    assert reply["count"] == 2
    assert await server.post("/detokenize", {"tokens": [104, 233]}) == (200, {"prompt": "hé"})


async def test_tokenize_counts_what_a_chat_with_these_fields_would(start: Start) -> None:
    server = await start(FakeEngine(tokenizer=FakeTokenizer(knows_tools=True)))
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    for fields in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
        _, counted = await server.post("/tokenize", {"messages": CHAT["messages"]} | fields)
        _, reply = await server.chat(**fields)
        assert counted["count"] == reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt has 2049 characters, which do not fit the model's 2048 tokens"),
        ("/v1/completions", {"prompt": LONG, "add_special_tokens": False}, "prompt has 2049 characters"),
        ("/detokenize", {"tokens": [97] * 2049}, "tokens has 2049 entries"),
    ],
)
async def test_what_cannot_fit_the_context_is_refused_before_any_work(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], message: str
) -> None:
    for name in ("encode", "decode"):
        monkeypatch.setattr(FakeTokenizer, name, None)
    status, reply = await server.post(path, body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert reply["error"]["message"].startswith(message)


async def test_the_texts_of_tokens_are_made_off_the_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    note = lambda *_, **__: threads.add(threading.current_thread()) or "a"  # noqa: E731
    for name in ("token_text", "decode"):
        monkeypatch.setattr(FakeTokenizer, name, note)
    await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    await server.post("/detokenize", {"tokens": [104]})
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"chat_template": "{{ x }}"}), ("/tokenize", {"documents": [{"text": "x"}]}),
     ("/tokenize", {"continue_final_message": True, "add_generation_prompt": True}),
     ("/tokenize", {"stop": [""]}), ("/tokenize", {"grammar": "x"}), ("/tokenize", {"top_k": 1.5}),
     ("/tokenize", {"tools": [{}]}), ("/tokenize", {"reasoning_effort": "x"}),
     *(("/detokenize", {"tokens": tokens}) for tokens in ([-1], [2**63], ["a"], None))],
)
async def test_a_wrong_field_beside_tokens_is_named(server: Server, path: str, body: dict[str, Any]) -> None:
    status, reply = await server.post(path, body if path == "/detokenize" else CHAT | body)
    assert (status, reply["error"]["param"]) == (400, next(iter(body)))


async def test_without_a_tokenizer_ids_still_work(start: Start) -> None:
    config = EngineConfig(served_model_name="fake", skip_tokenizer_init=True)
    server = await start(FakeEngine(config=config, tokenizer=None))
    assert (await server.complete(prompt=[104, 105]))[0] == 200
    status, reply = await server.post("/tokenize", {"prompt": "a"})
    assert (status, reply["error"]["code"]) == (400, "no_tokenizer")
    assert (await server.chat())[0] == 400


async def test_a_full_engine_refuses_before_it_reads_the_body(start: Start) -> None:
    def be_full(count: int = 1) -> None:
        raise EngineOverloaded("4 requests are waiting", retry_after_s=1)

    engine = FakeEngine()
    engine.check_capacity = be_full  # type: ignore[method-assign]
    server = await start(engine)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        status, headers, reply = await server.ask(path, "POST", data=b"{ no JSON")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "4 requests are waiting" in reply["error"]["message"]
    assert (await server.post("/tokenize", {"prompt": "a"}))[0] == 200


async def test_every_request_leaves_one_log_line_without_its_content(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "troupe.requests")
    await server.post("/v1/chat/completions", CHAT, headers={"x-request-id": "mine"})
    await server.stream("/v1/chat/completions", CHAT)
    await server.post("/v1/%0aFAKE", {})
    await wait_until(lambda: len(caplog.messages) == 3)
    whole, streamed, wrong = caplog.messages
    assert whole.startswith("POST /v1/chat/completions 200 id=mine model=fake prompt_tokens=")
    for line in (whole, streamed):
        assert " output_tokens=20 finish=stop " in line and "total_ms=" in line and "hello" not in line
    assert wrong.startswith("POST /v1/\\nFAKE 404 id=")


async def test_the_description_names_every_error_and_no_other(server: Server) -> None:
    paths = (await server.get("/openapi.json"))[1]["paths"]
    assert "/v1/messages" in paths and "/metrics" in paths
    for operations in paths.values():
        for method, operation in operations.items():
            assert "422" not in operation["responses"]
            assert {"401", "403", "503"} <= operation["responses"].keys()
            assert method != "post" or {"400", "413", "429", "504"} <= operation["responses"].keys()
