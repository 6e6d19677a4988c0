"""Event-loop lag while many clients stream over HTTP.

    python -m app.bench.loop_lag --clients 64 --seconds 10

Starts a server of its own on a free port with the embedded model (or drives `--url`), streams completions from
so many clients at once, and reads the server's own lag histogram before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from contextlib import AsyncExitStack

import aiohttp

from app.bench.own_server import run_server, wait_until_ready

LAG = re.compile(r'^troupe:event_loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)
RAMP_UP_S = 2.0


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, until: float, chance: random.Random
) -> int:
    """Stream completions of 300 to 700 tokens one after another; the number of events that came."""
    body = {"model": model, "prompt": "Once upon a time", "ignore_eos": True, "stream": True}
    num_events = 0
    await asyncio.sleep(chance.random() * RAMP_UP_S)
    while time.monotonic() < until:
        body["max_tokens"] = chance.randrange(300, 700)
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                num_events += line.startswith(b"data:")
                if time.monotonic() >= until:
                    break
    return num_events


async def read_lag(session: aiohttp.ClientSession, url: str) -> dict[float, float]:
    """Cumulative counts by upper bound in seconds."""
    async with session.get(f"{url}/metrics") as response:
        return {float(bound): float(count) for bound, count in LAG.findall(await response.text())}


def find_quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Upper bound of the bucket that holds this share of what came between the two readings."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[max(counts)]
    return next((bound for bound, count in counts.items() if count >= share * total), max(counts))


async def run(url: str | None, num_clients: int, seconds: float) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        address: str = await stack.enter_async_context(run_server([])) if url is None else url
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await wait_until_ready(address)
        async with session.get(f"{address}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        chance = random.Random(0)
        until = time.monotonic() + RAMP_UP_S + seconds
        streams = [
            asyncio.create_task(stream(session, address, model, until, chance)) for _ in range(num_clients)
        ]
        await asyncio.sleep(RAMP_UP_S)
        before = await read_lag(session, address)
        counts = await asyncio.gather(*streams)
        after = await read_lag(session, address)
    quantiles = ", ".join(
        f"p{share * 100:g} at most {find_quantile(before, after, share) * 1000:g} ms"
        for share in (0.5, 0.9, 0.99)
    )
    print(
        f"{num_clients} clients, {sum(counts) / (seconds + RAMP_UP_S / 2):.0f} events/s: event-loop lag {quantiles}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64, help="concurrent streams")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they stream")
    parser.add_argument("--url", help="a running server; default: one is started")
    args = parser.parse_args()
    asyncio.run(run(args.url, args.clients, args.seconds))


if __name__ == "__main__":
    main()
