"""A server that is asked for twice what it can take: who was admitted must not notice.

    python -m tests.measure.overload --clients 256 --seconds 60

Four phases on one server of our own, one after the other:

    full       as many clients as it has room for, running and queued; each sends one request after another
    overload   `--clients` of them: those for whom there is no room get a 503 and come back later
    storm      half as many as run at once, beside `--requests` random requests, each aborted at a random moment,
               `--abort-rate` a second, and a reader that takes one byte a second
    empty      no clients: every KV block must be free

What is compared is the time between two chunks of an admitted request, p99 against p99 of the full phase. A
machine that others keep busy spoils it: each line says how long the server's event loop waited for a core.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp

from app.bench.client import Record, Target, send
from app.bench.own_server import run_server
from app.bench.spread import percentiles
from tests.measure.storm import make_job, read_slowly, run_storm_process

GAUGE = re.compile(r"^troupe:(\w+)\{[^}]*\} (\S+)", re.MULTILINE)
SETTLE_S = 30.0  # how long the server may take to become empty


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the server and the crowd."""

    max_num_seqs: int = 64
    max_num_waiting: int = 64
    num_clients: int = 256
    seconds: float = 60.0
    num_aborts: int = 10_000
    abort_rate: float = 500.0

    @property
    def room(self) -> int:
        return self.max_num_seqs + self.max_num_waiting


@dataclass(slots=True)
class Phase:
    """Measurements of the clients of one phase. Times are seconds."""

    admitted: list[Record] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # neither answered in full nor refused
    rss_bytes: list[int] = field(default_factory=list)
    cpu_s: float = 0.0  # that the server's event loop used
    starved_s: float = 0.0  # that it could have run, and other programs had the cores
    num_aborts: int = 0
    abort_s: float = 0.0
    seconds: float = 0.0

    @property
    def itls(self) -> list[float]:
        return [gap for record in self.admitted for gap in record.itls]


async def be_client(
    session: aiohttp.ClientSession, target: Target, phase: Phase, is_over: Callable[[], bool], rng: Random
) -> None:
    """Send one request after another; after a refusal wait about the second that Retry-After says."""
    while not is_over():
        job, start = make_job(rng), time.perf_counter()
        record = await send(session, target, job)
        if record.error.startswith("503"):
            phase.refused_s.append(time.perf_counter() - start)
            await asyncio.sleep(rng.uniform(0.75, 1.25))
        elif record.error or record.num_output != job.max_tokens:
            phase.failed.append(record.error or f"{record.num_output} tokens instead of {job.max_tokens}")
        else:
            phase.admitted.append(record)


async def run_crowd(
    session: aiohttp.ClientSession, target: Target, num_clients: int, pid: int | None,
    is_over: Callable[[], bool],
) -> Phase:
    """So many clients until it is over; requests that run then are waited for."""
    phase, start = Phase(), time.perf_counter()
    cpu_s, starved_s = read_cpu_s(pid)
    watcher = asyncio.create_task(watch_memory(pid, phase))
    clients = (be_client(session, target, phase, is_over, Random(start + i)) for i in range(num_clients))
    await asyncio.gather(*clients)
    watcher.cancel()
    phase.seconds = time.perf_counter() - start
    cpu_end_s, starved_end_s = read_cpu_s(pid)
    phase.cpu_s, phase.starved_s = cpu_end_s - cpu_s, starved_end_s - starved_s
    return phase


def read_cpu_s(pid: int | None) -> tuple[float, float]:
    """Seconds that a process's main thread ran and that it waited for a core; 0 where the system does not tell."""
    stat = Path(f"/proc/{pid}/task/{pid}/schedstat")
    if not stat.exists():
        return 0.0, 0.0
    ran, waited, _ = stat.read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def after(seconds: float) -> Callable[[], bool]:
    """True from then on."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


async def watch_memory(pid: int | None, phase: Phase) -> None:
    """Note the server's resident memory once a second, where the system tells."""
    while (size := read_memory(pid)) is not None:
        phase.rss_bytes.append(size)
        await asyncio.sleep(1)


def read_memory(pid: int | None) -> int | None:
    """Resident bytes of a process; None where the system does not tell."""
    status = Path(f"/proc/{pid}/status")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return None if found is None else int(found[1]) * 1024


async def read_gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The server's plain metrics by name, without prefix."""
    async with session.get(f"{url}/metrics") as response:
        return {name: float(value) for name, value in GAUGE.findall(await response.text())}


async def count_lost_blocks(session: aiohttp.ClientSession, url: str) -> int:
    """Blocks that are not free although no request is left; waits for the last ones to leave."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        gauges = await read_gauges(session, url)
        lost = int(gauges["kv_cache_blocks"] - gauges["kv_cache_free_blocks"])
        is_idle = not gauges["num_requests_running"] and not gauges["num_requests_waiting"]
        if (is_idle and not lost) or time.perf_counter() > deadline:
            return lost
        await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Result:
    """All phases, and the number of KV blocks that were not freed."""

    full: Phase
    overload: Phase
    storm: Phase
    num_lost_blocks: int

    def describe(self) -> list[str]:
        """One line per phase, and what follows from them."""
        base = percentiles(self.full.itls, [99])["p99"]
        lines = [describe(name, getattr(self, name), base) for name in ("full", "overload", "storm")]
        return [*lines, f"empty: {self.num_lost_blocks} blocks are not free"]


def describe(name: str, phase: Phase, base: float) -> str:
    """The line of a phase; `base` is the p99 that its own is compared with."""
    gaps = percentiles(phase.itls, [50, 99])
    parts = [
        f"{name}: {len(phase.admitted)} admitted and finished in {phase.seconds:.0f} s, {len(phase.failed)} failed",
        f"event loop ran {phase.cpu_s / phase.seconds:.0%}, waited for a core {phase.starved_s / phase.seconds:.0%}",
        f"chunk gap p50 {gaps['p50'] * 1000:.1f} ms, p99 {gaps['p99'] * 1000:.1f} ms ({gaps['p99'] / base:.2f}x)",
    ]
    if phase.refused_s:
        waits = percentiles(phase.refused_s, [50, 99])
        parts.append(
            f"{len(phase.refused_s)} refused, after p50 {waits['p50'] * 1000:.1f} ms, p99 {waits['p99'] * 1000:.1f} ms"
        )
    if phase.num_aborts:
        parts.append(f"{phase.num_aborts} aborts, {phase.num_aborts / phase.abort_s:.0f} a second")
    if len(phase.rss_bytes) > 1:
        third = max(1, len(phase.rss_bytes) // 3)
        early, late = max(phase.rss_bytes[:third]), max(phase.rss_bytes[-third:])
        parts.append(f"RSS {early / 2**20:.0f} MiB in the first third, {late / 2**20:.0f} in the last")
    return "; ".join(parts + phase.failed[:3])


async def measure(url: str, model: str, size: Size, pid: int | None = None) -> Result:
    """All phases against a running server of that size."""
    target = Target(url, model)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
        await run_crowd(session, target, size.room, pid, after(min(3.0, size.seconds)))  # warm-up
        full = await run_crowd(session, target, size.room, pid, after(size.seconds))
        over = await run_crowd(session, target, size.num_clients, pid, after(size.seconds))
        slow = asyncio.create_task(read_slowly(target))
        aborts = asyncio.create_task(run_storm_process(target, size.num_aborts, size.abort_rate))
        stormy = await run_crowd(session, target, size.max_num_seqs // 2, pid, aborts.done)
        stormy.num_aborts, stormy.abort_s = size.num_aborts, aborts.result()
        slow.cancel()
        with suppress(asyncio.CancelledError):
            await slow
        return Result(full, over, stormy, await count_lost_blocks(session, url))


async def run(size: Size, flags: Sequence[str]) -> Result:
    """Start a server and measure it."""
    pids: list[int] = []
    limits = ["--max-num-seqs", str(size.max_num_seqs), "--max-num-waiting", str(size.max_num_waiting), "--no-ui"]
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_server([*limits, *flags], pids.append))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        return await measure(url, model, size, pids[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=256, help="of the overload phase")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--requests", type=int, default=10_000, help="of the storm")
    parser.add_argument("--abort-rate", type=float, default=500.0, help="requests of the storm a second")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests the server runs at once")
    parser.add_argument("--max-num-waiting", type=int, default=64, help="requests it lets wait")
    parser.add_argument("--mock-step-ms", help="no model: steps of that length, to measure everything else")
    args = parser.parse_args()
    size = Size(args.max_num_seqs, args.max_num_waiting, args.clients, args.seconds, args.requests, args.abort_rate)
    # A small cache is soon touched as a whole; after that, memory that grows is a leak.
    flags = ["--num-blocks", str(16 * size.max_num_seqs)]
    if args.mock_step_ms is not None:
        flags += ["--mock-step-ms", args.mock_step_ms]
    result = asyncio.run(run(size, flags))
    print("\n".join(result.describe()))
    return (1 if result.num_lost_blocks or result.full.failed or result.overload.failed or result.storm.failed else 0)


if __name__ == "__main__":
    sys.exit(main())
