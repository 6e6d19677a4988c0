"""A whole server in a process of its own, and what the system tells of it."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from app.bench.overload import read_cpu_s, read_memory

KEY = {"Authorization": "Bearer key"}
JSON = {"Content-Type": "application/json"}


@dataclass
class Process:
    """A server in another process."""

    url: str
    pid: int
    home: Path
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, headers: Any = KEY) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(
            self.url + path, data=io.BytesIO(data), headers=headers | JSON
        ) as response:
            return response.status, await response.json()

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
