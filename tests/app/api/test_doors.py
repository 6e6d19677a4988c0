"""Keys, request ids, models, health, version, metrics, tokens, unknown routes."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from engine import EngineConfig, EngineOverloaded
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine, FakeTokenizer
from tests.waiting import wait_until

GUARDED = ["/v1/models", "/version", "/metrics", "/openapi.json", "/v1/nothing", "/"]


@pytest.mark.parametrize("path", GUARDED)
async def test_with_keys_every_route_asks_for_one(start: Start, path: str) -> None:
    server = await start(api_key=("right", "other"))
    async with server.client.get(server.url + path) as response:
        assert response.status == 401
        assert response.headers["www-authenticate"].startswith("Basic " if path == "/" else "Bearer")
        assert (await response.json())["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer right", 200),
        ("bearer other", 200),
        ("Basic " + base64.b64encode(b"me:right").decode(), 200),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Bearer right2", 401),
        ("Basic " + base64.b64encode(b"right:").decode(), 401),
        ("Basic ???", 401),
        ("right", 401),
    ],
)
async def test_a_key_is_a_bearer_token_or_a_basic_password(start: Start, header: str, status: int) -> None:
    server = await start(api_key=("right", "other"))
    async with server.client.get(server.url + "/v1/models", headers={"Authorization": header}) as response:
        assert response.status == status


@pytest.mark.parametrize(
    ("key", "bearer", "status"),
    [("foreign", "right", 200), ("right", "foreign", 200), ("", "right", 200), ("foreign", "foreign", 401)],
)
async def test_one_right_key_is_enough(start: Start, key: str, bearer: str, status: int) -> None:
    server = await start(api_key=("right",), admin_key="right")
    headers = {"x-api-key": key, "Authorization": f"Bearer {bearer}"}
    assert (await server.post("/tokenize", {"prompt": "a"}, headers=headers))[0] == status
    assert (await server.post("/reset_prefix_cache", {}, headers=headers))[0] == status


async def test_a_request_id_comes_back_in_header_and_reply(server: Server) -> None:
    headers = {"x-request-id": "abc-1"}
    async with server.client.post(
        server.url + "/v1/chat/completions", json=CHAT, headers=headers
    ) as response:
        assert response.headers["x-request-id"] == "abc-1"
        assert "abc-1" in (await response.json())["id"]


async def test_a_bug_has_its_id_and_its_status_in_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "troupe.requests")
    server = await start(FakeEngine(reject=RuntimeError("secret")))
    headers = {"x-request-id": "abc-1"}
    async with server.client.post(
        server.url + "/v1/chat/completions", json=CHAT, headers=headers
    ) as response:
        assert (response.status, response.headers.getall("x-request-id")) == (500, ["abc-1"])
        assert (await response.json())["error"]["message"] == "internal error"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "troupe.requests"]
    assert line.startswith("POST /v1/chat/completions 500 id=abc-1")


@pytest.mark.parametrize("value", ["x" * 129, "a b", "é"])
async def test_an_odd_request_id_is_replaced(server: Server, value: str) -> None:
    async with server.client.get(server.url + "/version", headers={"x-request-id": value}) as response:
        assert len(response.headers["x-request-id"]) == 32


async def test_the_same_request_id_twice_makes_two_requests(server: Server) -> None:
    replies = [await server.chat(request_id="same") for _ in range(2)]
    assert replies[0][1]["id"] != replies[1][1]["id"]


async def test_models_lists_the_served_one(server: Server) -> None:
    async with server.client.get(server.url + "/v1/models") as response:
        reply = await response.json()
    assert reply["object"] == "list"
    assert [model["id"] for model in reply["data"]] == ["fake"]
    assert reply["data"][0]["max_model_len"] == 2048


async def test_another_model_is_a_404(server: Server) -> None:
    status, reply = await server.chat(model="gpt-x")
    assert status == 404
    assert (reply["error"]["code"], reply["error"]["param"]) == ("model_not_found", "model")
    async with server.client.get(server.url + "/v1/models/gpt-x") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("state", "health", "live", "ready"),
    [
        ("ready", 200, 200, 200),
        ("falling_asleep", 200, 200, 503),
        ("sleeping", 200, 200, 503),
        ("waking_up", 200, 200, 503),
        ("starting", 503, 200, 503),
        ("restarting", 503, 200, 503),
        ("dead", 503, 503, 503),
        ("closed", 503, 503, 503),
    ],
)
async def test_alive_live_and_ready_are_three_things_and_need_no_key(
    start: Start, state: str, health: int, live: int, ready: int
) -> None:
    server = await start(api_key=("right",))
    server.engine.state = state
    for path, status in (("/health", health), ("/ping", health), ("/livez", live), ("/readyz", ready)):
        async with server.client.get(server.url + path) as response:
            reply = await response.json()
        assert (response.status, reply["state"], reply["status"] == "ok") == (status, state, status == 200), (
            path
        )
        async with server.client.head(server.url + path) as response:
            assert (response.status, await response.read()) == (status, b"")


@pytest.mark.parametrize("state", ["starting", "restarting", "sleeping", "waking_up", "dead", "closed"])
async def test_an_engine_that_is_not_ready_is_a_503(server: Server, state: str) -> None:
    server.engine.state = state
    async with server.client.post(server.url + "/v1/chat/completions", json=CHAT) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1


async def test_unknown_routes_and_methods_answer_in_the_openai_form(server: Server) -> None:
    status, reply = await server.post("/v1/embeddings", {})
    assert (status, reply["error"]["code"]) == (404, "route_not_found")
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", "POST"),
        ("TRACE", "/v1/models", "GET"),
        ("TRACE", "/health", "GET, HEAD"),
        ("QUERY", "/sleep", "POST"),
        ("PATCH", "/openapi.json", "GET, HEAD"),
    ):
        async with server.client.request(method, server.url + path) as response:
            assert (response.status, response.headers["allow"]) == (405, allowed), (method, path)
            error = (await response.json())["error"]
            told = f"{method} is not allowed on {path}; it takes {allowed}"
            assert (error["code"], error["message"]) == ("method_not_allowed", told)


@pytest.mark.parametrize(
    ("method", "path", "other"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/fake", "/v1/models/fake"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/nothing", None),
        ("POST", "/nothing/else", None),
    ],
)
async def test_a_wrong_base_url_is_answered_with_the_right_path(
    server: Server, method: str, path: str, other: str | None
) -> None:
    async with server.client.request(method, server.url + path) as response:
        error = (await response.json())["error"]
    told = f"; use {other}: check the client's base URL" if other else f" for {method}"
    assert (response.status, error["code"]) == (404, "route_not_found")
    assert error["message"] == f"there is no route {path}{told}"


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("/v1/embeddings", "it has no embedding model"),
        ("/v1/moderations", "it has no moderation model"),
        ("/v1/audio/transcriptions", "it has no model for speech"),
        ("/v1/images/generations", "it has no model for images"),
        ("/v1/files", "it keeps no files; python -m app run-batch answers a batch file"),
        ("/v1/filesystem", None),
    ],
)
async def test_what_a_text_model_cannot_do_is_told(server: Server, path: str, missing: str | None) -> None:
    status, reply = await server.post(path, {})
    assert (status, reply["error"]["code"]) == (404, "route_not_found")
    told = "" if missing is None else f": this server generates text; {missing}"
    assert reply["error"]["message"] == f"there is no route {path} for POST{told}"


async def test_metrics_use_vllms_names_under_our_prefix(server: Server) -> None:
    await server.chat()
    async with server.client.get(server.url + "/metrics") as response:
        text = await response.text()
    assert 'troupe:num_requests_running{engine="0",model_name="fake"} 0.0' in text
    assert 'troupe:generation_tokens_total{engine="0",model_name="fake"} 20.0' in text
    assert 'troupe:request_success_total{engine="0",finished_reason="stop",model_name="fake"} 1.0' in text
    assert 'troupe:engine_state{engine="0",model_name="fake",state="ready"} 1.0' in text


async def test_histogram_buckets_are_cumulative(server: Server) -> None:
    stats = server.engine.stats()
    histogram = server.engine.make_histogram((0.1, 1.0), (0.05, 0.5, 0.5, 5.0))
    server.engine.stats = lambda: replace(stats, histograms={"time_to_first_token_seconds": histogram})
    async with server.client.get(server.url + "/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if "_bucket" in line]
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
        (
            "/tokenize",
            {"prompt": "a" * 2049},
            "prompt has 2049 characters; this model takes at most 2048 tokens",
        ),
        (
            "/v1/completions",
            {"prompt": "a" * 2049, "add_special_tokens": False},
            "prompt has 2049 characters",
        ),
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


async def test_the_texts_of_tokens_are_made_off_the_loop(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[threading.Thread] = set()
    note = lambda *_, **__: threads.add(threading.current_thread()) or "a"  # noqa: E731
    for name in ("token_text", "decode"):
        monkeypatch.setattr(FakeTokenizer, name, note)
    await server.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    await server.post("/detokenize", {"tokens": [104]})
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ x }}"),
        ("documents", [{"text": "x"}]),
        ("tools", [{}]),
        ("reasoning_effort", "x"),
    ],
)
async def test_tokenize_refuses_what_a_chat_would(server: Server, field: str, value: object) -> None:
    status, reply = await server.post("/tokenize", {"messages": CHAT["messages"], field: value})
    assert (status, reply["error"]["param"]) == (400, field)


@pytest.mark.parametrize("body", [{"tokens": [-1]}, {"tokens": [2**63]}, {"tokens": ["a"]}, {}])
async def test_detokenize_refuses_what_is_no_token(server: Server, body: dict) -> None:
    status, reply = await server.post("/detokenize", body)
    assert (status, reply["error"]["param"]) == (400, "tokens")


async def test_without_a_tokenizer_ids_still_work(start: Start) -> None:
    config = EngineConfig(served_model_name="fake", skip_tokenizer_init=True)
    server = await start(FakeEngine(config=config, tokenizer=None))
    assert (await server.complete(prompt=[104, 105]))[0] == 200
    status, reply = await server.post("/tokenize", {"prompt": "a"})
    assert (status, reply["error"]["code"]) == (400, "no_tokenizer")
    assert (await server.chat())[0] == 400


ADMIN = {"Authorization": "Bearer boss"}


async def test_admin_routes_do_not_exist_without_an_admin_key(server: Server) -> None:
    status, reply = await server.post("/reset_prefix_cache", {}, headers=ADMIN)
    assert (status, reply["error"]["code"]) == (404, "route_not_found")


async def test_admin_routes_want_the_admin_key_and_no_other(start: Start) -> None:
    server = await start(api_key=("right",), admin_key="boss")
    assert (await server.post("/reset_prefix_cache", {}, headers={"Authorization": "Bearer right"}))[0] == 401
    assert await server.post("/reset_prefix_cache", {}, headers=ADMIN) == (200, {"is_reset": True})
    body = {"request_ids": ["chatcmpl-1"]}
    assert await server.post("/abort_requests", body, headers=ADMIN) == (
        200,
        {"aborted": [], "unknown": ["chatcmpl-1"]},
    )


async def test_the_id_of_a_reply_ends_all_of_its_prompts(start: Start) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    server = await start(engine, admin_key="boss")
    asked = asyncio.create_task(server.complete(prompt=["a", "b"]))
    while len(engine.requests) < 2:
        await asyncio.sleep(0.01)
    reply_id = engine.requests[0].request_id.removesuffix("-0")
    body = {"request_ids": [reply_id, "cmpl-other"]}
    told = {"aborted": [reply_id], "unknown": ["cmpl-other"]}
    assert await server.post("/abort_requests", body, headers=ADMIN) == (200, told)
    assert [request.is_aborted for request in engine.requests] == [True, True]
    engine.hold.set()
    _, reply = await asked
    assert reply["id"] == reply_id
    told = {"aborted": [], "unknown": body["request_ids"]}
    assert await server.post("/abort_requests", body, headers=ADMIN) == (200, told)


async def test_an_admin_key_alone_does_not_close_the_api(start: Start) -> None:
    server = await start(admin_key="boss")
    assert (await server.chat())[0] == 200
    assert (await server.post("/reset_prefix_cache", {}))[0] == 401


async def test_a_key_has_as_many_requests_open_as_it_may(start: Start) -> None:
    hold = asyncio.Event()
    engine = FakeEngine(hold=hold)
    server = await start(engine, api_key=("a", "b"), max_requests_per_key=1)
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    first = asyncio.ensure_future(server.post("/v1/chat/completions", CHAT, headers=mine))
    await wait_until(lambda: len(engine.requests) == 1)
    async with server.client.post(server.url + "/v1/chat/completions", json=CHAT, headers=mine) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert (await refused.json())["error"]["type"] == "rate_limit_error"
    second = asyncio.ensure_future(server.post("/v1/chat/completions", CHAT, headers=other))
    await wait_until(lambda: len(engine.requests) == 2)
    hold.set()
    assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]
    assert (await server.post("/v1/chat/completions", CHAT, headers=mine))[0] == 200


async def test_a_full_engine_refuses_before_it_reads_the_body(start: Start) -> None:
    def be_full(count: int = 1) -> None:
        raise EngineOverloaded("4 requests are waiting", retry_after_s=1)

    engine = FakeEngine()
    engine.check_room = be_full  # type: ignore[method-assign]
    server = await start(engine)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        async with server.client.post(server.url + path, data=b"{ no JSON") as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert "4 requests are waiting" in (await response.json())["error"]["message"]
    assert (await server.post("/tokenize", {"prompt": "a"}))[0] == 200


async def test_every_request_leaves_one_line_without_its_words(
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


async def test_the_admin_sees_what_became_of_the_settings(start: Start) -> None:
    server = await start(admin_key="boss", shutdown_grace_s=7.0)
    async with server.client.get(server.url + "/server_info") as response:
        assert response.status == 401
    headers = {"Authorization": "Bearer boss"}
    async with server.client.get(server.url + "/server_info", headers=headers) as response:
        reply = await response.json()
    config = reply["config"]
    assert (response.status, reply["model"], config["app"]["shutdown_grace_s"]) == (200, "fake", 7.0)
    assert config["engine"]["max_model_len"] == 2048
    assert reply["runtime"] == {"ops": "none"}
    assert "boss" not in str(reply)


async def test_the_description_names_every_error_and_no_other(server: Server) -> None:
    async with server.client.get(server.url + "/openapi.json") as response:
        paths = (await response.json())["paths"]
    assert "/v1/messages" in paths and "/metrics" in paths
    for operations in paths.values():
        for method, operation in operations.items():
            assert "422" not in operation["responses"]
            assert {"401", "403", "503"} <= operation["responses"].keys()
            assert method == "get" or {"400", "413", "429", "504"} <= operation["responses"].keys()
