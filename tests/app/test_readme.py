"""The curl lines of app/README.md do what they say."""

import re
import shlex
from pathlib import Path

from app.api.admin import router
from app.config import AppConfig
from engine import Engine, EngineConfig
from tests.app.api.harness import Server, needs_model, run_server

README = Path(__file__).resolve().parents[2] / "app" / "README.md"
# Routes of one replica need an engine with several; see test_replicas.py.
ROUTES = {path for route in router.routes if "{" not in (path := route.path)}  # type: ignore[attr-defined]

pytestmark = needs_model


def read_curl_lines() -> list[str]:
    """Every curl command with the comment behind it, continued lines put together."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("curl ")]


async def send(server: Server, line: str, path: str) -> int:
    """Do what curl would, on another path where one is given."""
    words = shlex.split(line, comments=True)
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    data = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "GET" if data is None else "POST"
    async with server.client.request(method, server.url + path, headers=headers, data=data) as response:
        return response.status


async def test_the_curl_lines_and_the_routes_named_beside_them_work() -> None:
    tried = set()
    async with (
        Engine(EngineConfig(num_blocks=64, enable_lora=True, lora_root=("assets",))) as engine,
        run_server(engine, AppConfig(admin_key="KEY")) as server,
    ):
        for line in read_curl_lines():
            (path,) = re.findall(r"http://127\.0\.0\.1:7860(/[^\s\"]*)", line)
            others = {f"/{word}" for word in re.findall(r"\w+", line.partition(" # ")[2])} & ROUTES
            for each in (path, *sorted(others, reverse=True)):
                assert await send(server, line, each) == 200, (each, line)
                tried.add(each.partition("?")[0])
    assert tried == ROUTES | {"/v1/extract"}
