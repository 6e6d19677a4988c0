"""A page of another site, open in a user's browser, cannot use the server with that user's access."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.app.api.harness import CHAT, Server, Start

PATHS = ["/v1/chat/completions", "/tokenize", "/gradio_api/run/predict", "/"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "localhost.evil.example", "127.0.0.1.evil.example"]
)
async def test_a_name_that_was_pointed_here_is_refused(server: Server, path: str, host: str) -> None:
    async with server.client.post(server.url + path, json=CHAT, headers={"Host": host}) as response:
        reply = await response.json()
    assert response.status == 403
    assert reply["error"]["type"] == "permission_error"
    assert host in reply["error"]["message"] and "--allowed-host" in reply["error"]["message"]
    assert server.engine.requests == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://evil.example:7860", "null", "http://[", "http://203.0.113.5"]
)
async def test_what_another_page_sends_is_refused(server: Server, path: str, origin: str) -> None:
    async with server.client.post(server.url + path, json=CHAT, headers={"Origin": origin}) as response:
        assert response.status == 403
    assert server.engine.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:7860", "Origin": "http://localhost:3000"},
        {"Host": "LOCALHOST"},
        {"Host": "app.localhost:7860"},
        {"Host": "[::1]:7860", "Origin": "http://127.0.0.1:3000"},
        {"Host": "192.168.0.7:7860"},
        {"Origin": "vscode-webview://abc"},
        {"Origin": ""},
        {"Host": "192.168.0.7:7860", "Origin": "http://192.168.0.7:7860"},
        {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
    ],
    ids=str,
)
async def test_this_machine_may_ask(server: Server, headers: dict[str, str]) -> None:
    async with server.client.post(
        server.url + "/v1/chat/completions", json=CHAT, headers=headers
    ) as response:
        assert response.status == 200


async def test_reading_is_guarded_by_the_name_alone(server: Server) -> None:
    foreign = {"Origin": "http://evil.example"}
    async with server.client.get(server.url + "/v1/models", headers=foreign) as response:
        assert response.status == 200  # without a header that would let the page read it
        assert "access-control-allow-origin" not in response.headers
    async with server.client.get(server.url + "/health", headers={"Host": "probe"}) as response:
        assert response.status == 200


OPEN: list[dict[str, Any]] = [
    {"allowed_host": ("troupe.example",)},
    {"api_key": ("key",)},
    {"host": "0.0.0.0"},
]
KEY = {"Authorization": "Bearer key"}


@pytest.mark.parametrize("settings", OPEN, ids=["a name of its own", "a key", "for everybody"])
async def test_only_the_servers_own_pages_may_send(start: Start, settings: dict[str, Any]) -> None:
    server = await start(**settings)
    headers = {"Host": "Troupe.example", "Origin": "https://troupe.example"} | KEY
    assert (await server.post("/v1/chat/completions", CHAT, headers=headers))[0] == 200
    headers["Origin"] = "https://evil.example"
    status, reply = await server.post("/v1/chat/completions", CHAT, headers=headers)
    assert (status, reply["error"]["code"]) == (403, "origin_not_allowed")


BOSS = "Basic " + base64.b64encode(b"me:boss").decode()
PAGE = {"Authorization": "Basic " + base64.b64encode(b"me:key").decode()}


@pytest.mark.parametrize("path", ["/sleep?level=1&mode=abort", "/reset_prefix_cache", "/wake_up"])
async def test_a_form_with_a_browsers_stored_credentials_does_nothing(start: Start, path: str) -> None:
    server = await start(api_key=("key",), admin_key="boss")
    form = {"Authorization": BOSS, "Content-Type": "application/x-www-form-urlencoded"}
    for origin, expected in (({"Origin": "http://evil.example"}, 403), ({}, 401)):
        async with server.client.post(server.url + path, data=b"a=b", headers=form | origin) as response:
            assert response.status == expected
            assert not response.headers.get("www-authenticate", "").startswith("Basic")


async def test_basic_credentials_open_the_page_and_what_only_reads(start: Start) -> None:
    server = await start(api_key=("key",), admin_key="boss")
    expected = {"/": 404, "/v1/models": 200, "/metrics": 200, "/server_info": 401}
    for path, status in expected.items():
        async with server.client.get(server.url + path, headers=PAGE) as response:
            assert response.status == status, path
    async with server.client.get(server.url + "/server_info", headers={"Authorization": BOSS}) as response:
        assert response.status == 401
    assert (await server.post("/v1/chat/completions", CHAT, headers=PAGE))[0] == 401
    assert (await server.post("/gradio_api/queue/join", {}, headers=PAGE))[0] == 404
