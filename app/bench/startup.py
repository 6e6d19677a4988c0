"""`bench startup`: from the start of the process to the port, to readiness, to the first token.

python -m app bench startup --num-iters 3
python -m app bench startup --server-flags='--model PATH --no-ui'
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from pathlib import Path

import aiohttp

from app.bench.client import Target, send
from app.bench.own_server import run_server
from app.bench.serve import find_model
from app.bench.settings import write_json
from app.bench.spread import Spread
from app.bench.workload import Job, add_number
from app.config import UsageError

PHASES = ("port answers", "ready", "first token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--num-iters", 3, 1, 100, "starts")
    parser.add_argument("--server-flags", default="", help="flags of the server: --server-flags='--no-ui'")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there, too")


def run(arguments: argparse.Namespace, start: float) -> int:
    """Measure and print.

    Raises UsageError: the server did not come up.
    """
    flags = arguments.server_flags.split()
    times = [asyncio.run(start_once(flags)) for _ in range(arguments.num_iters)]
    for phase, values in zip(PHASES, zip(*times, strict=True), strict=True):
        print(f"{phase:14}{Spread(values)} s")
    write_json(arguments.output_json, None, {"phases": PHASES, "seconds": times})
    return 0


async def start_once(flags: list[str]) -> tuple[float, float, float]:
    """Seconds to each of the phases."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.perf_counter()
    waiting = asyncio.create_task(wait_for_port(port))
    try:
        async with run_server(["--port", str(port), *flags]) as url, aiohttp.ClientSession() as session:
            ready_at = time.perf_counter() - begun
            record = await send(session, Target(url, await find_model(url, None)), Job([1, 2, 3, 4], 2))
            if record.error:
                raise UsageError(f"the first request failed: {record.error}")
            first_token_at = time.perf_counter() - begun - record.e2e + record.ttft
            return await waiting - begun, ready_at, first_token_at
    finally:
        waiting.cancel()


async def wait_for_port(port: int) -> float:
    """Return the time at which a connection is accepted."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        writer.close()
        return time.perf_counter()
