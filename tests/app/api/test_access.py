"""Access control: API keys, admin keys, and requests from other sites in a user's browser."""

import asyncio
from typing import Any

import pytest

from app.api.admin import router
from app.api.errors import ApiError
from app.api.gate import make_owner
from app.api.origins import AllowedOrigins
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine
from tests.waiting import wait_until

CHAT_PATH = "/v1/chat/completions"
PATHS = [CHAT_PATH, "/tokenize", "/gradio_api/run/predict", "/"]
ADMIN_PATHS = [(next(iter(route.methods)), route.path) for route in router.routes]
ADMIN = {"Authorization": "Bearer boss"}


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/metrics", "/openapi.json", "/v1/nothing", "/"])
async def test_with_keys_every_route_asks_for_one(start: Start, path: str) -> None:
    server = await start(api_key=("right", "other"))
    status, headers, reply = await server.ask(path)
    assert (status, reply["error"]["type"]) == (401, "authentication_error")
    assert headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("status", "header"),
    [(200, header) for header in ("Bearer right", "bearer other")]
    + [(401, header) for header in ("Bearer wrong", "Bearer ", "Bearer right2", "Basic bWU6cmlnaHQ=", "right")],
)
async def test_a_key_is_a_bearer_token(start: Start, header: str, status: int) -> None:
    server = await start(api_key=("right", "other"))
    assert (await server.get("/v1/models", headers={"Authorization": header}))[0] == status


@pytest.mark.parametrize(
    ("key", "bearer", "status"),
    [("foreign", "right", 200), ("right", "foreign", 200), ("", "right", 200), ("foreign", "foreign", 401)],
)
async def test_one_right_key_is_enough(start: Start, key: str, bearer: str, status: int) -> None:
    server = await start(api_key=("right",), admin_key="right")
    headers = {"x-api-key": key, "Authorization": f"Bearer {bearer}"}
    assert (await server.post("/tokenize", {"prompt": "a"}, headers=headers))[0] == status
    assert (await server.post("/reset_prefix_cache", {}, headers=headers))[0] == status


async def test_a_key_has_as_many_requests_open_as_it_may(start: Start) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    server = await start(engine, api_key=("a", "b"), max_requests_per_key=1)
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    first = asyncio.ensure_future(server.post(CHAT_PATH, CHAT, headers=mine))
    await wait_until(lambda: len(engine.requests) == 1)
    status, headers, reply = await server.ask(CHAT_PATH, "POST", json=CHAT, headers=mine)
    assert (status, headers["Retry-After"], reply["error"]["type"]) == (429, "1", "rate_limit_error")
    second = asyncio.ensure_future(server.post(CHAT_PATH, CHAT, headers=other))
    await wait_until(lambda: len(engine.requests) == 2)
    engine.hold.set()
    assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]
    assert (await server.post(CHAT_PATH, CHAT, headers=mine))[0] == 200


@pytest.mark.parametrize(("method", "path"), ADMIN_PATHS)
async def test_admin_routes_want_the_admin_key_and_exist_only_with_one(start: Start, method: str, path: str) -> None:
    server, without = await start(api_key=("right",), admin_key="boss"), await start()
    body = {"request_ids": ["chatcmpl-1"]}
    for headers in ({}, {"Authorization": "Bearer right"}):
        status, reply = await server.get(path, method=method, json=body, headers=headers)
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
    status, reply = await without.get(path, method=method, json=body, headers=ADMIN)
    assert (status, reply["error"]["code"]) == (404, "route_not_found")


async def test_an_admin_key_alone_does_not_close_the_api(start: Start) -> None:
    server = await start(admin_key="boss")
    assert (await server.chat())[0] == 200
    assert (await server.post("/reset_prefix_cache", {}))[0] == 401
    assert await server.post("/reset_prefix_cache", {}, headers=ADMIN) == (200, {"is_reset": True})


async def test_the_id_of_a_reply_ends_all_of_its_prompts(start: Start) -> None:
    engine = FakeEngine(hold=asyncio.Event())
    server = await start(engine, admin_key="boss")
    asked = asyncio.create_task(server.complete(prompt=["a", "b"]))
    await wait_until(lambda: len(engine.requests) == 2)
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


async def test_the_admin_sees_what_became_of_the_settings(start: Start) -> None:
    server = await start(admin_key="boss", shutdown_grace_s=7.0)
    status, reply = await server.get("/server_info", headers=ADMIN)
    config = reply["config"]
    assert (status, reply["model"], config["app"]["shutdown_grace_s"]) == (200, "fake", 7.0)
    assert (config["engine"]["max_model_len"], reply["runtime"]) == (2048, {"ops": "none"})
    assert "boss" not in str(reply)


EVIL = ["evil.example", "evil.example:7860", "localhost.evil.example", "127.0.0.1.evil.example"]
PAGES = ["http://evil.example", "https://evil.example:7860", "null", "http://[", "http://203.0.113.5"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("header", "value"), [("Host", x) for x in EVIL] + [("Origin", x) for x in PAGES])
async def test_a_name_that_was_pointed_here_and_another_page_are_refused(
    server: Server, path: str, header: str, value: str
) -> None:
    status, reply = await server.post(path, CHAT, headers={header: value})
    assert (status, reply["error"]["type"]) == (403, "permission_error")
    told = reply["error"]["message"]
    assert header == "Origin" or (value in told and "--allowed-host" in told)
    assert server.engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:7860", "Origin": "http://localhost:7860"}, {"Host": "LOCALHOST"},
        {"Host": "app.localhost:7860"}, {"Host": "[::1]:7860", "Origin": "http://127.0.0.1:7860"},
        {"Host": "app.localhost", "Origin": "http://app.localhost:80"}, {"Origin": "vscode-webview://abc"},
        {"Origin": ""}, {"Host": "192.168.0.7:7860", "Origin": "http://192.168.0.7:7860"},
        {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
    ],
    ids=str,
)
async def test_this_machine_may_ask(server: Server, headers: dict[str, str]) -> None:
    assert (await server.post(CHAT_PATH, CHAT, headers=headers))[0] == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:7860", "http://localhost:3000"), ("127.0.0.1:7860", "http://localhost"),
        ("192.168.0.7:7860", "http://192.168.0.7"), ("192.168.0.7", "http://192.168.0.7:7860"),
        ("localhost:7860", "https://localhost:7861"), ("localhost:7860", "http://localhost:99999"),
    ],
)
async def test_a_page_of_another_port_is_another_site(server: Server, host: str, origin: str) -> None:
    status, reply = await server.post(CHAT_PATH, CHAT, headers={"Host": host, "Origin": origin})
    assert (status, reply["error"]["code"]) == (403, "origin_not_allowed")
    with pytest.raises(ApiError):
        secure = {b"host": b"troupe.example", b"origin": b"http://troupe.example:443"}
        AllowedOrigins(checks_host=False).check("POST", secure, "https")


async def test_reading_is_guarded_by_the_name_alone(server: Server) -> None:
    status, headers, _ = await server.ask("/v1/models", headers={"Origin": "http://evil.example"})
    assert status == 200  # without a header that would let the page read it
    assert "access-control-allow-origin" not in headers
    assert (await server.get("/health", headers={"Host": "probe"}))[0] == 200


@pytest.mark.parametrize(
    "settings", [{"allowed_host": ("troupe.example",)}, {"api_key": ("key",)}, {"host": "0.0.0.0"}], ids=str
)
async def test_only_the_servers_own_pages_may_send(start: Start, settings: dict[str, Any]) -> None:
    server = await start(**settings)
    own = {"Host": "Troupe.example", "Origin": "https://troupe.example", "Authorization": "Bearer key"}
    assert (await server.post(CHAT_PATH, CHAT, headers=own))[0] == 200
    status, reply = await server.post(CHAT_PATH, CHAT, headers=own | {"Origin": "https://evil.example"})
    assert (status, reply["error"]["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("path", ["/sleep?level=1&mode=abort", "/reset_prefix_cache", "/wake_up"])
async def test_a_form_with_a_browsers_stored_credentials_does_nothing(start: Start, path: str) -> None:
    server = await start(api_key=("key",), admin_key="boss")
    form = {"Cookie": "troupe-key=boss", "Content-Type": "application/x-www-form-urlencoded"}
    for origin, expected in (({"Origin": "http://evil.example"}, 403), ({}, 401)):
        assert (await server.ask(path, "POST", data=b"a=b", headers=form | origin))[0] == expected
    assert (await server.get("/server_info", headers={"Cookie": "troupe-key=boss"}))[0] == 401


async def test_a_browser_is_asked_for_the_key_by_a_page_and_keeps_it_in_a_cookie(start: Start) -> None:
    server = await start(api_key=("k+y/1",))
    browser = {"Accept": "text/html,*/*"}
    status, headers, page = await server.ask("/", headers=browser)
    assert status == 401 and "www-authenticate" not in headers
    assert 'name="key"' in page and "This key is wrong" not in page
    form = browser | {"Content-Type": "application/x-www-form-urlencoded"}
    status, _, page = await server.ask("/key", "POST", data=b"key=no", headers=form)
    assert status == 401 and "This key is wrong" in page
    status, headers, _ = await server.ask("/key", "POST", data=b"key=k%2By%2F1", headers=form, allow_redirects=False)
    cookie = headers["set-cookie"]
    assert status == 303 and "HttpOnly" in cookie and "SameSite=strict" in cookie
    kept = browser | {"Cookie": cookie.partition(";")[0]}
    assert (await server.get("/v1/models", headers=kept))[0] == 200
    # What another page could send by itself does no work.
    assert (await server.post(CHAT_PATH, CHAT, headers=kept))[0] == 401
    evil = form | {"Origin": "https://evil.example"}
    assert (await server.ask("/key", "POST", data=b"key=x", headers=evil))[0] == 403


PREFLIGHT = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}


async def test_a_page_of_an_allowed_origin_may_send_and_read_with_its_own_key(start: Start) -> None:
    server = await start(api_key=("right",), allowed_origin=("https://app.example",))
    asked = PREFLIGHT | {"Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = await server.ask(CHAT_PATH, "OPTIONS", headers=asked)
    assert (status, headers["Access-Control-Allow-Headers"]) == (204, "authorization,content-type")
    mine = {"Origin": "https://app.example", "Authorization": "Bearer right"}
    status, headers, _ = await server.ask(CHAT_PATH, "POST", json=CHAT, headers=mine)
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://app.example")
    status, headers, _ = await server.ask(CHAT_PATH, "POST", json=CHAT, headers={"Origin": "https://app.example"})
    assert (status, headers["Access-Control-Allow-Origin"]) == (401, "https://app.example")


async def test_a_refused_origin_gets_the_flag_that_allows_it(start: Start) -> None:
    server = await start(api_key=("right",), allowed_origin=("https://other.example",))
    status, headers, reply = await server.ask(CHAT_PATH, "OPTIONS", headers=PREFLIGHT)
    assert status == 403 and "--allowed-origin allows them" in reply["error"]["message"]
    assert "Access-Control-Allow-Origin" not in headers
    # The page itself and its files stay private to the server's own origin.
    anyone = await start(allowed_origin=("*",))
    for path, is_shared in (("/v1/models", True), ("/", False)):
        _, headers, _ = await anyone.ask(path, headers={"Origin": "https://app.example"})
        assert ("Access-Control-Allow-Origin" in headers) == is_shared


async def test_a_key_and_a_browser_each_see_their_own_objects_only() -> None:
    """The digest of a key stays the same when keys are added; a cookie counts where no key is needed."""
    one, other = b"troupe=" + b"a" * 43, b"troupe=" + b"b" * 43
    asked: list[tuple[bytes, dict[bytes, bytes]]] = [
        (b"k", {}), (b"k", {b"cookie": one}), (b"l", {}), (b"", {b"cookie": b"x=1; " + one}), (b"", {b"cookie": other}),
        (b"", {}), (b"", {b"cookie": b"troupe=short"}), (b"k", {b"x-troupe-client": b"c"}),
    ]
    seen = [make_owner(*each) for each in asked]
    assert seen[0] == seen[1] and seen[5] == seen[6] == "" and len(set(seen)) == 6


async def test_only_the_page_gives_a_browser_a_cookie(start: Start) -> None:
    server = await start()
    html = {"accept": "text/html,*/*"}
    _, headers, _ = await server.ask("/", headers=html)
    cookie = headers["set-cookie"]
    assert cookie.startswith("troupe=") and cookie.endswith("; HttpOnly; SameSite=Lax")
    for path, asked in (("/", {}), ("/v1/models", html), ("/", html | {"cookie": cookie.split(";")[0]})):
        assert "set-cookie" not in (await server.ask(path, headers=asked))[1]
