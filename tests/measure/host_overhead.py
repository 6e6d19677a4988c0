"""Host overhead: the Python that one decode step costs outside the forward pass.

    python -m tests.measure.host_overhead --rows 256
    python -m tests.measure.host_overhead --sse          over HTTP, with a server in another process

A mock worker answers every step after a fixed time, so all that is left is the engine. Measures the CPU time of the
event loop's thread per step: once with readers that only wait for the end (the engine core), once with readers that
take every token. Then all requests once more from start to end, as tokens per second: by the clock, and by the CPU
time of the whole process, which other processes on the machine disturb less. With --sse, clients read the bytes of
server-sent events and parse only the last ones, so that nearly all that is measured is the server.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import time
from pathlib import Path
from urllib.parse import urlsplit

from app.bench.own_server import run_server
from engine import Engine, EngineConfig, SamplingParams

WINDOW_STEPS = 40
USAGE = re.compile(rb'"completion_tokens":(\d+)')


async def read(engine: Engine, params: SamplingParams) -> None:
    async for _ in engine.generate([5, 6, 7, 8], params):
        pass


async def measure(engine: Engine, rows: int, steps: int, kind: str) -> list[float]:
    """Loop-thread CPU seconds per step with `rows` running requests, of windows in the middle half, ascending."""
    params = SamplingParams(max_tokens=steps, ignore_eos=True, output_kind=kind)  # type: ignore[arg-type]
    readers = [asyncio.create_task(read(engine, params)) for _ in range(rows)]
    first = engine.stats().num_steps
    await _reach(engine, first + steps // 4)
    begun, windows = engine.stats(), []
    for end in range(first + steps // 4 + WINDOW_STEPS, first + 3 * steps // 4, WINDOW_STEPS):
        start, num_steps = time.thread_time(), engine.stats().num_steps
        await _reach(engine, end)
        num_steps = engine.stats().num_steps - num_steps
        if num_steps:
            windows.append((time.thread_time() - start) / num_steps)
    ended = engine.stats()
    num_rows = (ended.num_step_tokens - begun.num_step_tokens) / (ended.num_steps - begun.num_steps)
    assert num_rows == rows, f"the steps had {num_rows} rows on average, not {rows}"
    await asyncio.gather(*readers)
    return sorted(windows)


async def measure_rate(engine: Engine, rows: int, steps: int) -> tuple[float, float]:
    """Tokens per second offline, ramp-up and ends included: by the clock, and by CPU time."""
    params = SamplingParams(max_tokens=steps, ignore_eos=True, output_kind="final")
    start, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(read(engine, params) for _ in range(rows)))
    num_tokens = rows * steps
    return num_tokens / (time.monotonic() - start), num_tokens / (time.process_time() - cpu)


async def _reach(engine: Engine, num_steps: int) -> None:
    while engine.stats().num_steps < num_steps:
        await asyncio.sleep(0.005)


def measure_python() -> float:
    """Nanoseconds of one turn of a plain Python loop: how fast this machine is right now."""
    start = time.thread_time()
    for _ in range(2_000_000):
        pass
    return (time.thread_time() - start) / 2_000_000 * 1e9


async def run(rows: int, steps: int, step_ms: float) -> None:
    config = EngineConfig(
        mock_step_ms=step_ms,
        max_num_seqs=rows,
        max_num_batched_tokens=max(1024, 4 * rows),
        max_num_waiting=2 * rows,
        num_blocks=rows * 140,
    )
    async with Engine(config) as engine:
        gc.collect()
        gc.freeze()  # as the server does once it is up
        for kind, name in (("final", "engine core"), ("delta", "core and readers")):
            before = measure_python()
            windows = await measure(engine, rows, steps, kind)
            turn = (before + measure_python()) / 2
            best, median = windows[0] * 1e6, windows[len(windows) // 2] * 1e6
            print(
                f"{name:<18} {median:6.0f} us of Python a step of {rows} rows, {best:.0f} us in the best window",
                end="",
            )
            print(f"   (a loop turn took {turn:.0f} ns)")
        by_clock, by_cpu = await measure_rate(engine, rows, steps)
        print(f"{'offline':<18} {by_clock:6.0f} tok/s, {by_cpu:.0f} tokens a second of CPU time")


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


async def stream_all(pid: int, port: int, streams: int, tokens: int) -> str:
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


async def run_sse(streams: int, tokens: int, step_ms: float) -> None:
    flags = {
        "mock-step-ms": step_ms, "max-num-seqs": streams, "max-num-waiting": 2 * streams,
        "max-num-batched-tokens": 4 * streams, "num-blocks": 140 * streams,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    pids: list[int] = []
    async with run_server(["--no-ui", *words], pids.append) as url:
        port = urlsplit(url).port or 0
        await stream_all(pids[0], port, min(streams, 16), 50)
        for _ in range(3):
            print(await stream_all(pids[0], port, streams, tokens), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a pass, or tokens of a stream")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a mock step")
    parser.add_argument("--sse", action="store_true", help="measure streams over HTTP")
    args = parser.parse_args()
    asyncio.run((run_sse if args.sse else run)(args.rows, args.steps, args.step_ms))


if __name__ == "__main__":
    main()
