"""The soak: one server under everything at once for minutes; afterwards nothing is left, and each answer is as alone.

    make soak SEED=1        (or python -m tests.soak --seed 1 [--seconds 180] [--clients 12] [--keep])

Up to 4,800 requests by seed (120 schemas, 40 times each, with tools, regular expressions, hostile grammars, uploads and
images between them; salts that never repeat; five adapters of which two run), clients that leave, adapters that are
replaced, sleeps, and drafts. Odd seeds run the core in the server's process, even ones in its own. It proves:

 same      of the requests, 60 and all that ended with an error are sent to fresh servers, each alone, 20 a server:
           the same status, finish reason and text
 memory    RSS of the server's processes, idle, at the end within 10 % of the idle RSS after a minute or two, when each
           schema has been asked for and caches are full
 left      idle at the end as idle then: threads, descriptors, processes, free blocks, and live objects of requests,
           matchers, tasks and streams, which a probe in each process counts

It costs about five minutes and two cores. Exit code 1, and a line for each failure, if one of them does not hold.
SOAK_DATA names the folder of the vocabulary (tokenizers/cl100k_base.tiktoken) and of real schemas
(maskbench_dev.jsonl); without them it says so, and takes the demo model's vocabulary and made-up schemas.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp

from tests.soak.model import RANKS, make_model
from tests.soak.server import Outcome, Server, State
from tests.soak.work import FIRST, NUM_REQUESTS, Request, Work

DRAFTS = '{"method": ["ngram", "suffix"], "suffix_decoding_max_cached_requests": 100}'
FLAGS = [
    "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8", "--num-blocks", "1024",
    "--max-num-seqs", "8", "--mm-encoder-cache-gb", "0.01", "--speculative-config", DRAFTS, "--shutdown-grace-s", "5",
    "--grammar-timeout-s", "60",  # a busy machine must not decide what is refused
]  # fmt: skip
# The first measurement comes when each schema, file and hostile grammar has been sent, and so many requests more have
# filled the caches of grammars, answers and images; then memory stays as it is.
FIRST_S, NUM_SETTLING = 60.0, 3 * len(FIRST)
NUM_ALONE, NUM_A_SERVER = 60, 20
MEMORY_SHARE = 0.1
# Threads of pools and descriptors that may have come since.
NUM_SPARE = 3
# Objects of these classes live as long as a request does, and the last step holds its requests, at most eight; of
# others, so many may have come since.
LIVE = re.compile(r"Matcher|Request$|^task|Stream|Completion")
NUM_LIVE, NUM_OBJECTS = 8, 4000


class Soak:
    """One run over one server."""

    def __init__(self, server: Server, work: Work, seconds: float, num_clients: int) -> None:
        self.server, self.work, self.seconds, self.num_clients = server, work, seconds, num_clients
        self.outcomes: dict[int, Outcome] = {}
        self.kinds: Counter[str] = Counter()
        self.num_left = self.num_sleeps = self.num_replaced = 0
        self.numbers = iter(range(NUM_REQUESTS))
        self.failures: list[str] = []

    @property
    def num_ended(self) -> int:
        return len(self.outcomes) + self.num_left

    async def run(self) -> None:
        """Send requests in two phases, with a measurement after each."""
        started = time.monotonic()
        await self._phase(lambda: time.monotonic() - started > FIRST_S and self.num_ended >= NUM_SETTLING)
        first = await self._rest("once caches are full")
        begun = time.monotonic()
        await self._phase(lambda: time.monotonic() - begun > self.seconds - FIRST_S)
        last = await self._rest("at the end")
        if first is not None and last is not None:
            self.failures += list(compare(first, last))

    async def _phase(self, is_over: Callable[[], bool]) -> None:
        stop = asyncio.Event()
        chaos = asyncio.create_task(self._disturb(stop))

        async def client() -> None:
            async with aiohttp.ClientSession() as session:
                while not is_over() and (number := next(self.numbers, None)) is not None:
                    request = self.work.make(number)
                    outcome = await self.server.send(session, request)
                    self.kinds[request.kind] += 1
                    if outcome is None:
                        self.num_left += 1
                    else:
                        self.outcomes[number] = outcome

        try:
            await asyncio.gather(*(client() for _ in range(self.num_clients)))
        finally:
            stop.set()
            await chaos

    async def _disturb(self, stop: asyncio.Event) -> None:
        """Put the engine to sleep and wake it, and replace adapters."""
        rng = random.Random(f"chaos {self.work.seed}")
        while True:
            try:
                await asyncio.wait_for(stop.wait(), rng.uniform(5, 15))
                return
            except TimeoutError:
                pass
            number = rng.randrange(len(self.server.adapters))
            name, path = f"a{number}", str(self.server.adapters[number])
            try:
                if rng.random() < 0.4:
                    await self.server.admin(f"/sleep?level={rng.choice((1, 2))}")
                    await asyncio.sleep(rng.uniform(0.1, 1))
                    await self.server.admin("/wake_up")
                    self.num_sleeps += 1
                else:
                    await self.server.admin("/v1/unload_lora_adapter", {"lora_name": name})
                    await self.server.admin("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
                    self.num_replaced += 1
            except RuntimeError as error:
                self.failures.append(f"admin: {error}")

    async def _rest(self, when: str) -> State | None:
        state = await self.server.rest()
        if isinstance(state, str):
            self.failures.append(f"left: {when}, {state}")
            return None
        figures = f"{state.rss_mib:.0f} MiB, {state.num_threads} threads, {state.num_descriptors} descriptors"
        say(f"{when}: {self.num_ended} requests; {figures}")
        return state

    def choose(self) -> list[int]:
        """Return the requests that are sent again: some of each kind, and those that ended with an error."""
        rng = random.Random(f"sample {self.work.seed}")
        odd = [n for n, each in self.outcomes.items() if each.is_odd]
        by_kind: dict[str, list[int]] = {}
        for number in self.outcomes:
            by_kind.setdefault(self.work.make(number).kind, []).append(number)
        few = [n for numbers in by_kind.values() for n in rng.sample(numbers, min(5, len(numbers)))]
        chosen = dict.fromkeys([*few, *rng.sample(odd, min(20, len(odd)))])
        rest = [number for number in self.outcomes if number not in chosen]
        return [*chosen, *rng.sample(rest, min(max(NUM_ALONE - len(chosen), 0), len(rest)))]


def compare(first: State, last: State) -> Iterator[str]:
    """Yield what is left over, and whether memory has grown."""
    if last.rss_mib > first.rss_mib * (1 + MEMORY_SHARE):
        yield f"memory: {first.rss_mib:.0f} MiB once caches were full, {last.rss_mib:.0f} MiB at the end"
    if last.num_free_blocks != last.num_blocks:
        yield f"left: {last.num_blocks - last.num_free_blocks} blocks of the KV cache are owned by nobody's request"
    if last.num_restarts:
        yield f"restarts: the core was restarted {last.num_restarts} times; see the server's log (--keep)"
    if last.num_processes > first.num_processes:
        yield f"left: {last.num_processes - first.num_processes} processes"
    if last.num_threads > first.num_threads + NUM_SPARE:
        new = Counter(last.threads) - Counter(first.threads)
        yield f"left: {last.num_threads - first.num_threads} threads more ({', '.join(new)})"
    if last.num_descriptors > first.num_descriptors + NUM_SPARE:
        yield f"left: {last.num_descriptors - first.num_descriptors} descriptors more"
    for name, count in (last.objects - first.objects).most_common():
        if count > (NUM_LIVE if LIVE.search(name) else NUM_OBJECTS):
            yield f"left: {name}: {first.objects[name]} objects before, {last.objects[name]} now"


async def send_alone(server: Server, requests: list[Request]) -> dict[int, Outcome | None]:
    async with aiohttp.ClientSession() as session:
        return {each.number: await server.send(session, each, leaves=False) for each in requests}


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


async def main(args: argparse.Namespace, folder: Path) -> int:
    base, adapters, size = await asyncio.to_thread(make_model, folder / "model")
    where = RANKS.name if RANKS.exists() else f"the demo model's, because {RANKS} is missing"
    core = "local" if args.seed % 2 else "process"
    say(f"seed {args.seed}; vocabulary of {size:,} tokens ({where}); core {core}")
    flags = [*FLAGS, "--core", core]
    work = Work(args.seed)
    async with Server(base, adapters, folder / "server", flags) as server:
        soak = Soak(server, work, args.seconds, args.clients)
        await soak.run()
    ends = Counter(f"{each.status} {each.finish}" for each in soak.outcomes.values())
    events = f"{soak.num_left} clients left, {soak.num_sleeps} sleeps, {soak.num_replaced} adapters replaced"
    say(f"kinds: {dict(soak.kinds)}; {events}")
    say(f"ends: {dict(ends.most_common())}")
    for number, outcome in soak.outcomes.items():
        if outcome.is_odd:
            say(f"odd: {work.make(number).kind} {number}: {outcome}")
    chosen = soak.choose()
    num_same = 0
    for start in range(0, len(chosen), NUM_A_SERVER):
        requests = [work.make(number) for number in chosen[start : start + NUM_A_SERVER]]
        async with Server(base, adapters, folder / f"alone{start}", flags) as server:
            alone = await send_alone(server, requests)
        for request in requests:
            before, after = soak.outcomes[request.number], alone[request.number]
            num_same += before == after
            if before != after:
                what = f"{request.kind} {request.number} {request.body['model']}"
                soak.failures.append(f"same: {what}: in the soak {before}, alone {after}")
    say(f"{num_same} of {len(chosen)} requests ended as alone on a fresh server")
    for failure in soak.failures:
        print(f"FAILED {failure}")
    say("failed" if soak.failures else "passed")
    return 1 if soak.failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=180.0, help="time under load")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--keep", action="store_true", help="keep the folder with the servers' logs")
    given = parser.parse_args()
    name = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        code = asyncio.run(main(given, name))
    finally:
        if given.keep:
            print(f"the servers' logs are in {name}")
        else:
            shutil.rmtree(name)
    sys.exit(code)
