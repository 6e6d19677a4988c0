"""A streaming client that drives any OpenAI-compatible server, and keeps the times of every token.

TTFT   request sent to first token            ITL   between two chunks with text
TPOT   (E2E - TTFT) / (tokens - 1)            E2E   request sent to last byte
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import aiohttp

from app.bench.workload import Job

NEVER = float("inf")


@dataclass(slots=True)
class Record:
    """One request: times in seconds; `error` says why it failed."""

    num_input: int
    ttft: float = 0.0
    e2e: float = 0.0
    itls: list[float] = field(default_factory=list)
    num_output: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Arrival of requests.

    Attributes:
        rate: requests a second; inf: all at once.
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process, less is burstier.
        max_concurrency: requests open at a time; None: any number.
    """

    rate: float = NEVER
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A server: its address, the model's name there, the route."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    ignore_eos: bool = True
    temperature: float = 0.0

    def make_body(self, job: Job) -> dict[str, object]:
        """Return the request of a job; a chat route gets text, because it cannot take token ids."""
        body: dict[str, object] = {
            "model": self.model, "max_tokens": job.max_tokens, "temperature": self.temperature,
            "stream": True, "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint.endswith("/chat/completions"):
            words = " ".join(str(token_id) for token_id in job.prompt_token_ids)
            return body | {"messages": [{"role": "user", "content": words}]}
        return body | {"prompt": job.prompt_token_ids}


async def drive(
    target: Target, jobs: Sequence[Job], load: Load, on_done: Callable[[], None] = lambda: None
) -> tuple[list[Record], float]:
    """Send every job and wait for all; returns the records in order and the seconds it took."""
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    gate = asyncio.Semaphore(load.max_concurrency or len(jobs))
    rng = Random(load.seed)
    records: list[Record | None] = [None] * len(jobs)
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=600), read_bufsize=2**20,
    ) as session:

        async def work(index: int) -> None:
            async with gate:
                records[index] = await send(session, target, jobs[index])
            on_done()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(len(jobs)):
                group.create_task(work(index))
                if load.rate != NEVER and index + 1 < len(jobs):
                    await asyncio.sleep(rng.gammavariate(load.burstiness, 1 / (load.rate * load.burstiness)))
        elapsed = time.perf_counter() - start
    return [record for record in records if record is not None], elapsed


async def send(session: aiohttp.ClientSession, target: Target, job: Job) -> Record:
    """Stream one job."""
    record = Record(len(job.prompt_token_ids))
    start = last = time.perf_counter()
    try:
        async with session.post(target.base_url + target.endpoint, json=target.make_body(job)) as response:
            if response.status != 200:
                record.error = f"{response.status}: {(await response.text())[:200]}"
                return record
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    record.error = str(event["error"])[:200]
                    return record
                if usage := event.get("usage"):
                    record.num_output = usage["completion_tokens"]
                choices = event.get("choices", ())
                if any(has_text(choice) for choice in choices):
                    if record.ttft:
                        record.itls.append(now - last)
                    else:
                        record.ttft = now - start
                    last = now
                elif not record.ttft and any(choice.get("finish_reason") for choice in choices):
                    record.ttft = now - start  # an answer of special tokens only
    except (aiohttp.ClientError, TimeoutError) as error:
        record.error = f"{type(error).__name__}: {error}"
        return record
    record.e2e = time.perf_counter() - start
    if not record.ttft:
        record.error = "no token came"
    return record


def has_text(choice: dict[str, dict[str, str] | str]) -> bool:
    """Return whether a chunk's choice brings text, in the form of either route."""
    delta = choice.get("delta")
    return bool(delta.get("content") if isinstance(delta, dict) else choice.get("text"))
