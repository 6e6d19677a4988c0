"""Tokens per second over server-sent events without a model: the throughput of the host alone.

    python -m app.bench.sse_rate --streams 256 --tokens 600

Starts a server with a mock engine and streams many completions at once over loopback. The client reads bytes and looks
only at the last ones, so that nearly all that is measured is the server. Beside the rate stands the server's CPU time
per token, which other processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

from app.bench.own_server import run_server

USAGE = re.compile(rb'"completion_tokens":(\d+)')


class Client(asyncio.Protocol):
    """One streaming request; `done` becomes the number of tokens in the server's usage."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.num_events = 0
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-2000:]

    def connection_lost(self, exc: Exception | None) -> None:
        found = USAGE.findall(self._tail)
        if found:
            self.done.set_result(int(found[-1]))
        else:
            self.done.set_exception(ConnectionError(f"a stream ended early: {self._tail[-300:]!r}"))


def make_request(tokens: int) -> bytes:
    """Return a complete HTTP request; the server closes the connection after its answer."""
    options = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps({"prompt": "Hello", "max_tokens": tokens, **options}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far; 0 without /proc."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(pid: int, port: int, streams: int, tokens: int) -> str:
    """Stream everything once; return one line of results."""
    request = make_request(tokens)
    loop = asyncio.get_running_loop()
    start, cpu, own_cpu = time.monotonic(), read_cpu_seconds(pid), time.process_time()
    pairs = [await loop.create_connection(lambda: Client(request), "127.0.0.1", port) for _ in range(streams)]
    num_tokens = sum(await asyncio.gather(*(client.done for _, client in pairs)))
    spent, cpu = time.monotonic() - start, read_cpu_seconds(pid) - cpu
    num_events = sum(client.num_events for _, client in pairs)
    own_us = (time.process_time() - own_cpu) / num_tokens * 1e6
    return (
        f"{streams} streams: {num_tokens / spent:.0f} tok/s, {num_tokens / num_events:.2f} tokens an event, "
        f"server {cpu / num_tokens * 1e6:.1f} us of CPU a token, client {own_us:.1f} us"
    )


async def run(streams: int, tokens: int, step_ms: float, repeats: int) -> None:
    flags = {
        "mock-step-ms": step_ms, "max-num-seqs": streams, "max-num-waiting": 2 * streams,
        "max-num-batched-tokens": 4 * streams, "num-blocks": 140 * streams,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    pids: list[int] = []
    async with run_server(["--no-ui", *words], pids.append) as url:
        port = urlsplit(url).port or 0
        await measure(pids[0], port, min(streams, 16), 50)
        for _ in range(repeats):
            print(await measure(pids[0], port, streams, tokens), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256, help="streams at once")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a mock step")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    asyncio.run(run(args.streams, args.tokens, args.step_ms, args.repeats))


if __name__ == "__main__":
    main()
