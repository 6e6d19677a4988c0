"""Many pages that stream a chat answer at once: updates a second on each, and the event-loop lag meanwhile.

    python -m tests.measure.ui_load --pages 32 --seconds 20

Starts a server of its own with the embedded model (or drives `--url`). A page here is a client that speaks Gradio's
protocol as the browser does: it begins a turn, joins the queue, reads the answer from the page's event stream, ends
the turn, and refreshes the strip on top once a second. Before the crowd one page runs alone, for comparison: on a
machine that does other work, the ratio of the two says more than either.
"""

import argparse
import asyncio
import json
import random
import re
import secrets
import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from app.bench.own_server import run_server, wait_until_ready

LAG = re.compile(r'^troupe:event_loop_lag_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)
ENDLESS = '{"type": "array", "items": {"type": "integer"}, "minItems": 5000}'
# Settings that make the answer long, by their labels on the page.
WANTED = {"Grammar of the answer": "JSON schema", "Grammar": ENDLESS, "Max tokens": 4000}
RAMP_UP_S = 2.0
ALONE_S = 5.0
ENDS_S = 0.2  # before the pages end
STRIP_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Form:
    """The numbers of a page's handlers and of its strip, and the values of its settings, from its own config."""

    send: int
    watch: int
    stop: int
    end: int
    strip: int
    settings: list[Any]


@dataclass(slots=True)
class Seen:
    """When updates came to one page, and what it cost to bring them."""

    times: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def rate(self) -> float:
        """Updates a second from the first to the last."""
        span = self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0
        return (len(self.times) - 1) / span if span else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Update rates of all pages, and the lag of the server's loop meanwhile, in seconds."""

    rates: list[float]
    bytes_per_update: float
    lag_p50_s: float
    lag_p99_s: float
    lag_with_ends_p99_s: float  # with the moment in which all pages end at once

    def describe(self) -> str:
        """The figures in one line."""
        return (
            f"{len(self.rates)} pages: updates {min(self.rates):.1f} to {max(self.rates):.1f} Hz, "
            f"median {statistics.median(self.rates):.1f}, {self.bytes_per_update:.0f} bytes each; "
            f"event-loop lag p50 at most {self.lag_p50_s * 1000:g} ms, p99 at most {self.lag_p99_s * 1000:g} ms, "
            f"with the ends {self.lag_with_ends_p99_s * 1000:g} ms"
        )


async def read_lag(session: aiohttp.ClientSession, url: str) -> dict[float, float]:
    """Cumulative counts of the server's event-loop lag by upper bound in seconds."""
    async with session.get(f"{url}/metrics") as response:
        return {float(bound): float(count) for bound, count in LAG.findall(await response.text())}


def find_quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Upper bound of the bucket that holds this share of what came between the two readings."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counts[max(counts)]
    return next((bound for bound, count in counts.items() if count >= share * total), max(counts))


def read_form(config: dict[str, Any]) -> Form:
    """Find the chat's handlers in the config of a page.

    Raises:
        LookupError: the page has no such chat.
    """
    by_name = {each["api_name"]: each for each in reversed(config["dependencies"])}
    props = {each["id"]: each["props"] for each in config["components"]}
    values = []
    for component_id in by_name["send_entered"]["inputs"][3:]:  # behind text, chat and turn
        setting = props[component_id]
        values.append(WANTED.get(setting.get("label"), setting.get("value")))
    numbers = {name: by_name[name]["id"] for name in ("watch", "stop", "end")}
    strip = next(number for number, each in props.items() if each.get("elem_id") == "strip")
    return Form(settings=values, strip=strip, send=by_name["send_entered"]["id"], **numbers)


ENTERED = {"id": 1}  # what the page's outbox says of a message


class Page:
    """One page: its session, and what it saw."""

    def __init__(self, session: aiohttp.ClientSession, url: str, form: Form) -> None:
        self.session = session
        self.url = f"{url}/gradio_api"
        self.form = form
        self.name = secrets.token_hex(5)
        self.seen = Seen()

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Ask again and again until it is over, and watch the strip meanwhile."""
        strip = asyncio.ensure_future(self._watch_strip())
        try:
            while not is_over():
                typed = {"text": "Count, please.", "files": []}
                await self._call(self.form.send, [typed, None, None, *self.form.settings])
                await self._read_answer(is_over)
                await self._call(self.form.stop, [None])  # the server would write the answer to its end
                await self._call(self.form.end, [None])
        finally:
            strip.cancel()
            await asyncio.gather(strip, return_exceptions=True)

    async def _watch_strip(self) -> None:
        while True:
            body = {"component_id": self.form.strip, "fn_name": "refresh", "session_hash": self.name}
            async with self.session.post(f"{self.url}/component_server/", json=body) as reply:
                reply.raise_for_status()
            await asyncio.sleep(STRIP_INTERVAL_S)

    async def _call(self, number: int, data: list[Any], route: str = "run/predict") -> dict[str, Any]:
        body = {"data": data, "fn_index": number, "session_hash": self.name, "event_data": ENTERED}
        async with self.session.post(f"{self.url}/{route}", json=body) as reply:
            reply.raise_for_status()
            answer: dict[str, Any] = await reply.json()
            return answer

    async def _read_answer(self, is_over: Callable[[], bool]) -> None:
        await self._call(self.form.watch, [None], "queue/join")
        async with self.session.get(f"{self.url}/queue/data", params={"session_hash": self.name}) as stream:
            async for line in stream.content:
                if not line.startswith(b"data:"):
                    continue
                message = json.loads(line[5:])
                if message["msg"] == "process_generating" and message["output"]["data"][0]:
                    self.seen.times.append(time.monotonic())
                    self.seen.num_bytes += len(line)
                if message["msg"] == "process_completed" or is_over():
                    return


async def crowd(
    session: aiohttp.ClientSession, url: str, form: Form, num_pages: int, seconds: float, num_updates: int = 0
) -> Load:
    """Run the pages for some time; the first seconds are left out, and the simultaneous ends are counted separately.

    Args:
        num_updates: the pages go on until each has seen as many, however slow the machine is.
    """
    until = time.monotonic() + RAMP_UP_S + seconds
    chance = random.Random(0)
    pages = [Page(session, url, form) for _ in range(num_pages)]

    def is_over() -> bool:
        return time.monotonic() >= until and all(len(page.seen.times) >= num_updates for page in pages)

    async def open_page(page: Page) -> None:
        await asyncio.sleep(chance.random() * RAMP_UP_S)
        await page.run(is_over)

    running = [asyncio.create_task(open_page(page)) for page in pages]
    await asyncio.sleep(RAMP_UP_S)
    before = await read_lag(session, url)
    await asyncio.sleep(until - ENDS_S - time.monotonic())
    after = await read_lag(session, url)
    await asyncio.gather(*running)
    seen = [page.seen for page in pages]
    ended = await read_lag(session, url)
    total = sum(len(each.times) for each in seen)
    return Load(
        rates=[each.rate() for each in seen],
        bytes_per_update=sum(each.num_bytes for each in seen) / max(total, 1),
        lag_p50_s=find_quantile(before, after, 0.5),
        lag_p99_s=find_quantile(before, after, 0.99),
        lag_with_ends_p99_s=find_quantile(before, ended, 0.99),
    )


async def measure(url: str | None, num_pages: int, seconds: float, num_updates: int = 0) -> tuple[Load, Load]:
    """One page alone, then all of them."""
    async with AsyncExitStack() as stack:
        address: str = await stack.enter_async_context(run_server([])) if url is None else url
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await wait_until_ready(address)
        async with session.get(f"{address}/config") as reply:
            form = read_form(await reply.json())
        alone = await crowd(session, address, form, 1, min(ALONE_S, seconds))
        return alone, await crowd(session, address, form, num_pages, seconds, num_updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=32, help="pages that stream at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they stream")
    parser.add_argument("--url", help="a running server; default: one is started")
    args = parser.parse_args()
    for load in asyncio.run(measure(args.url, args.pages, args.seconds)):
        print(load.describe(), flush=True)


if __name__ == "__main__":
    main()
