"""Attacks that brought other servers down, against a whole server in a process: keys, memory, CPU and sockets.

Costs are told in the CPU time of the server's event loop, which a busy machine does not change.
"""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from app.api.errors import HEALTH_PATHS
from app.bench.own_server import run_server
from tests.app.api.harness import Server, needs_model
from tests.measure.overload import read_cpu_s, read_memory

KEY = {"Authorization": "Bearer key"}
JSON = {"Content-Type": "application/json"}


@dataclass
class Process(Server):
    """A whole server in a process of its own, and what the system tells of it."""

    pid: int
    home: Path

    async def post(self, path: str, body: Any, headers: Any = KEY) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.get(path, method="POST", data=io.BytesIO(data), headers=headers | JSON)

    @property
    def loop_cpu_s(self) -> float:
        return read_cpu_s(self.pid)[0]

    @property
    def memory_bytes(self) -> int:
        return read_memory(self.pid) or 0


def list_listeners(pid: int) -> list[tuple[str, str]]:
    """(protocol, address) of every socket of a process and its children that takes what others send."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    links = [str(link.readlink()) for each in pids for link in Path(f"/proc/{each}/fd").iterdir()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    found = []
    for protocol in ("tcp", "tcp6", "udp", "udp6", "raw"):
        for columns in map(str.split, Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]):
            is_open = columns[3] == "0A" or not protocol.startswith("tcp")
            if is_open and columns[9] in own:
                found.append((protocol, columns[1]))
    return found


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_model,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc"),
]

FLAGS = ["--no-ui", "--no-enable-native-ops", "--num-blocks", "512", "--api-key", "key", "--admin-key", "boss"]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4}, "/v1/messages": CHAT | {"model": "demo_model"},
}
MB = 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    home = tmp_path_factory.mktemp("home")
    pids: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
            patch.setenv(name, str(home))
        async with run_server(FLAGS, pids.append) as url, aiohttp.ClientSession() as client:
            running = Process(None, url, client, pids[0], home)
            for path, body in BODIES.items():  # the first request loads the rest
                status, reply = await running.post(path, body)
                assert status == 200, (path, reply)
            yield running


async def test_with_a_key_only_the_health_is_open(server: Process) -> None:
    paths = (await server.get("/openapi.json", headers=KEY))[1]["paths"]
    found = {}
    for path, methods in paths.items():
        for method in methods:
            found[path], _ = await server.get(path, method=method)
    assert {path for path, status in found.items() if status != 401} == {*HEALTH_PATHS}
    assert len(found) >= 19


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", str(2**63), str(-(2**63) - 1)])
async def test_no_number_of_any_route_takes_what_is_none_or_too_large(server: Process, number: str) -> None:
    _, document = await server.get("/openapi.json", headers=KEY)
    num_fields = 0
    for path, body in BODIES.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = document["components"]["schemas"][reference["$ref"].rpartition("/")[2]]["properties"]
        for name, schema in fields.items():
            if not any(part.get("type") in ("integer", "number") for part in schema.get("anyOf", [schema])):
                continue
            num_fields += 1
            if name == "temperature" and number == str(2**63):  # any finite one is taken
                continue
            more = {"logprobs": True} if name == "top_logprobs" and path != "/v1/responses" else {}
            text = json.dumps({k: v for k, v in (body | more).items() if k != name})
            status, reply = await server.post(path, f'{text[:-1]}, "{name}": {number}}}'.encode())
            assert status == 400, (path, name, reply)
            assert name in str(reply["error"]), (path, name, reply)
    assert num_fields >= 38


async def test_a_hundred_megabytes_of_headers_stay_outside(server: Process) -> None:
    memory = server.memory_bytes
    host, port = server.url.removeprefix("http://").split(":")
    for start in (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ", b"GET /", b"GET /health HTTP/1.1\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        chunk = b"a" * MB if not start.endswith(b"\n") else b"X-Many: a\r\n" * (MB // 11)
        writer.write(start)
        try:
            for _ in range(100):
                writer.write(chunk)
                await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        except ConnectionError:
            pass  # it hung up while we still wrote
        writer.close()
    assert server.memory_bytes - memory < 10 * MB
    assert (await server.get("/health"))[0] == 200


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(400):
    NESTED = {"type": "array", "items": NESTED}
HOSTILE: dict[str, Any] = {
    "nested quantifiers": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "counted repeat": {"regex": "(a|b){1000000}"}, "catastrophic": {"regex": "(a+)+(b+)+((c|d)*e?)*$"},
    "self reference": {"json": {"$ref": "#"}},
    "references in a circle": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "400 levels": {"json": NESTED}, "a megabyte of enum": {"json": {"enum": [f"{i:08x}" * 8 for i in range(15_000)]}},
    "many alternatives": {"json": {"allOf": [{"anyOf": [{"const": i} for i in range(300)]}] * 12}},
    "a schema from elsewhere": {"json": {"$ref": "http://127.0.0.1:9/x.json"}},
    "left recursion": {"grammar": 'root ::= root "a" | root root | ""'},
    "a huge grammar": {"grammar": "root ::= " + " | ".join(['"ab"'] * 50_000)},
    "a pattern that is none": {"json": {"type": "string", "pattern": "(?<=a)b["}},
    "a type that is none": {"json": {"type": ["string", 5]}},
}


@pytest.mark.parametrize("names", [list(HOSTILE)[start::3] for start in range(3)], ids=lambda names: names[0])
async def test_a_hostile_schema_costs_its_sender_a_4xx_and_nobody_else_a_thing(
    server: Process, names: list[str]
) -> None:
    long = BODIES["/v1/completions"] | {"stream": True, "max_tokens": 200, "ignore_eos": True}
    async with server.client.post(server.url + "/v1/completions", json=long, headers=KEY) as stream:
        await stream.content.readuntil(b"\n\n")
        for name in names:
            cpu_s = server.loop_cpu_s
            asked = BODIES["/v1/completions"] | {"structured_outputs": HOSTILE[name]}
            status, reply = await server.post("/v1/completions", asked)
            assert status in (200, 400), (name, reply)
            if status == 400:
                assert reply["error"]["param"].startswith("structured_outputs") and reply["error"]["message"]
            # the loop goes on with the stream meanwhile; what it does itself for the schema is this little
            assert server.loop_cpu_s - cpu_s < 5, name
        assert b'"finish_reason":"length"' in await stream.read()


async def test_a_message_of_a_megabyte_leaves_the_loop_free(server: Process) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "word " * 200_000}]}).encode()
    cpu_s = server.loop_cpu_s
    status, reply = await server.post("/v1/chat/completions", body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert server.loop_cpu_s - cpu_s < 0.2


async def test_schemas_nobody_saw_before_leave_no_files(server: Process) -> None:
    before = sorted(path for path in server.home.rglob("*"))
    for number in range(60):
        schema = {"type": "object", "properties": {f"name_{number}": {"type": "integer"}}, "required": []}
        asked = {"structured_outputs": {"json": schema}, "max_tokens": 1}
        assert (await server.post("/v1/completions", BODIES["/v1/completions"] | asked))[0] == 200
    assert sorted(path for path in server.home.rglob("*")) == before


async def test_it_listens_on_one_port_of_loopback_and_nowhere_else(server: Process) -> None:
    port = int(server.url.rpartition(":")[2])
    assert list_listeners(server.pid) == [("tcp", f"0100007F:{port:04X}")]


async def test_when_all_that_is_over_no_block_is_taken(server: Process) -> None:
    _, text = await server.get("/metrics", headers=KEY)
    values = dict(re.findall(r"^troupe:(\w+)\{[^}]*\} (\S+)", text, re.MULTILINE))
    assert values["kv_cache_free_blocks"] == values["kv_cache_blocks"]
    assert values["engine_restarts_total"] == "0.0"
