"""Clients that misbehave: a storm of requests that nobody waits for, and a reader who takes a byte a second.

    python -m tests.measure.storm URL MODEL NUM_REQUESTS RATE

is the storm in a process of its own, and prints its seconds: what it costs must not slow down who measures beside it.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

from app.bench.client import Target
from app.bench.workload import Job

FIRST_TOKEN, NUM_TOKENS = 300, 2000  # ids that are neither special nor single bytes
INPUT_TOKENS, OUTPUT_TOKENS = (8, 64), (20, 60)
MAX_ABORT_DELAY_S = 0.5


def make_job(rng: Random) -> Job:
    """Return a request with a random prompt that is in no cache, for a few output tokens."""
    prompt = [FIRST_TOKEN + rng.randrange(NUM_TOKENS) for _ in range(rng.randint(*INPUT_TOKENS))]
    return Job(prompt, rng.randint(*OUTPUT_TOKENS))


async def storm(target: Target, num_requests: int, rate: float) -> float:
    """Send random requests and leave each at a random moment, `rate` a second or as fast as it goes; the seconds."""
    rng = Random(7)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(num_requests):
            group.create_task(leave(target, rng.random() * MAX_ABORT_DELAY_S, make_random_body(target, rng)))
            await asyncio.sleep(max(0.0, start + (number + 1) / rate - time.perf_counter()))
    return time.perf_counter() - start


def make_random_body(target: Target, rng: Random) -> bytes:
    """A completion of any kind: streamed or not, one choice or three, alone or with a shared prefix, with a grammar."""
    job = make_job(rng)
    body: dict[str, object] = target.make_body(Job(job.prompt_token_ids, rng.randint(1, 400)))
    body |= {"temperature": rng.choice([0.0, 1.0]), "n": rng.choice([1, 1, 3])}
    if rng.random() < 0.3:
        body["prompt"] = [FIRST_TOKEN] * 40 + job.prompt_token_ids
    if rng.random() < 0.5:
        del body["stream"], body["stream_options"]
    if rng.random() < 0.1:
        body["structured_outputs"] = {"regex": f"[a-{rng.choice('defgh')}]{{200}}"}
    return json.dumps(body).encode()


async def leave(target: Target, delay_s: float, body: bytes) -> None:
    """Send a request over a connection of its own and close it in the middle, or after the answer."""
    with suppress(OSError):
        async with open_request(target, body) as (reader, _):
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await reader.read()


@asynccontextmanager
async def open_request(
    target: Target, body: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = target.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {target.endpoint} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_slowly(target: Target) -> None:
    """Take one byte a second of a long answer, until cancelled."""
    host, port = target.base_url.removeprefix("http://").split(":")
    body = json.dumps(target.make_body(Job([FIRST_TOKEN] * 4, 1500)) | {"logprobs": 5}).encode()
    loop = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setblocking(False)
        await loop.sock_connect(slow, (host, int(port)))
        head = f"POST {target.endpoint} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        await loop.sock_sendall(slow, f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        is_open = True
        while is_open:
            is_open = bool(await loop.sock_recv(slow, 1))
            await asyncio.sleep(1)


async def run_storm_process(target: Target, num_requests: int, rate: float) -> float:
    """Run `storm` in another process; the seconds it took, its start not counted.

    Raises:
        RuntimeError: the process failed; the message has its last words.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.measure.storm", target.base_url, target.model, str(num_requests), str(rate),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )
    printed, complaints = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the storm failed: {complaints.decode(errors='replace')[-500:]}")
    return float(printed)


if __name__ == "__main__":
    url, model, num_requests, rate = sys.argv[1:]
    print(asyncio.run(storm(Target(url, model), int(num_requests), float(rate))))
