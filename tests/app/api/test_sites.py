"""Sites: a page of somebody else, open in a browser on this machine, cannot use a server that has no key."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.errors import ApiError
from app.api.sites import Sites
from tests.app.api.harness import CHAT, Server, Start
from tests.fakes import FakeEngine

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
@pytest.mark.parametrize("origin", ["http://evil.example", "https://evil.example:7860", "null", "http://["])
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


@pytest.mark.parametrize(
    "settings",
    [{"allowed_host": ("troupe.example",)}, {"api_key": ("key",)}, {"host": "0.0.0.0"}],
    ids=["a name of its own", "a key", "for everybody"],
)
async def test_other_guards_make_it_needless(start: Start, settings: dict[str, Any]) -> None:
    server = await start(FakeEngine(), **settings)
    headers = {"Host": "Troupe.example", "Origin": "https://troupe.example", "Authorization": "Bearer key"}
    async with server.client.post(
        server.url + "/v1/chat/completions", json=CHAT, headers=headers
    ) as response:
        assert response.status == 200


def test_a_request_without_either_header_passes() -> None:
    Sites().check("POST", "", "")
    with pytest.raises(ApiError, match="Host 'a'"):
        Sites(["b"]).check("GET", "a", "")
