"""`bench serve`: drive an OpenAI-compatible server, ours or another, and report what its clients saw.

python -m app bench serve --num-prompts 200 --request-rate 8        # a server of its own, with the demo model
python -m app bench serve --base-url http://127.0.0.1:8000 --model NAME --goodput ttft:500 tpot:50
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from app.bench.client import NEVER, Load, Record, Target, drive
from app.bench.own_server import run_server, wait_until_ready
from app.bench.settings import write_json
from app.bench.spread import percentiles
from app.bench.workload import Job, add_number, add_random_flags, read_work
from app.config import UsageError, check_key, read_url

METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags."""
    parser.add_argument("--base-url", help="address of a running server; without it one is started")
    parser.add_argument("--server-flags", default="", help="flags of that server: --server-flags='--max-num-seqs 8'")
    parser.add_argument("--model", help="name of the model on the server (default: the first that it lists)")
    parser.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help="route to call (openai)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    add_number(parser, "--request-rate", NEVER, 0.001, NEVER, "requests a second; inf: all at once")
    add_number(parser, "--burstiness", 1.0, 0.01, 1000, "1: Poisson; less: burstier")
    add_number(parser, "--max-concurrency", None, 1, 10**6, "requests open at a time (any number)")
    add_number(parser, "--num-warmups", 1, 0, 10**6, "warm-up requests, which are not measured")
    parser.add_argument("--metric-percentiles", default="50,90,99", help="percentiles to print (50,90,99)")
    parser.add_argument(
        "--goodput", nargs="*", default=[], metavar="NAME:MS",
        help="limits that a good request keeps, such as ttft:500",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (0)")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="every token counts")
    add_number(parser, "--vocab-size", 1000, 1, 2**31 - 1, "prompts use token ids below this number")
    parser.add_argument(
        "--output-json", "--result-filename", type=Path, metavar="FILE", help="write the figures there, too"
    )
    add_random_flags(parser, num=100, input_len=128, output_len=128)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Measure and print; 1 when a request failed.

    Raises UsageError: a flag cannot be used, or there is no server.
    """
    if arguments.api_key:
        check_key("--api-key", arguments.api_key)
    points = read_points(arguments.metric_percentiles)
    limits = read_goodput(arguments.goodput)
    jobs = read_work(arguments, arguments.vocab_size)
    records, elapsed = asyncio.run(measure(arguments, jobs))
    figures = summarise(records, elapsed, points, limits)
    print("\n".join(report(figures)))
    write_json(arguments.output_json, None, figures)
    return 1 if figures["num_failed"] else 0


async def measure(arguments: argparse.Namespace, jobs: Sequence[Job]) -> tuple[list[Record], float]:
    """Find or start the server, warm it up, drive it."""
    async with AsyncExitStack() as stack:
        url = arguments.base_url
        if url is None:
            url = await stack.enter_async_context(run_server(["--no-ui", *arguments.server_flags.split()]))
        else:
            url = read_url("--base-url", url)
            await wait_until_ready(url)
        model = arguments.model or await find_model(url, arguments.api_key)
        target = Target(
            url, model, ENDPOINTS[arguments.backend], arguments.api_key, arguments.ignore_eos, arguments.temperature
        )
        await drive(target, [*jobs[: arguments.num_warmups]], Load())
        load = Load(arguments.request_rate, arguments.burstiness, arguments.max_concurrency, arguments.work_seed)
        with tqdm(total=len(jobs), unit="request", leave=False) as bar:
            return await drive(target, jobs, load, lambda: bar.update() and None)


async def find_model(url: str, api_key: str | None) -> str:
    """The first model of /v1/models."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/models") as response:
        body = await response.json() if response.status == 200 else {}
    listed = body.get("data", [])
    if not listed:
        raise UsageError(f"{url}/v1/models answered {response.status} and lists no model: name one with --model")
    return str(listed[0]["id"])


def read_points(text: str) -> list[float]:
    """Percentiles from "50,99"."""
    try:
        points = [float(part) for part in text.split(",")]
    except ValueError:
        points = [-1.0]
    if not all(0 <= point <= 100 for point in points):
        raise UsageError(f"--metric-percentiles {text!r} must be numbers from 0 to 100 with commas between them")
    return points


def read_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Limits in seconds from ["ttft:500", ...]."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in METRICS or not (value.isascii() and value.replace(".", "", 1).isdigit()):
            raise UsageError(f"--goodput {pair!r} must be one of {', '.join(METRICS)}, a colon and milliseconds")
        limits[name] = float(value) / 1000
    return limits


def summarise(
    records: Sequence[Record], elapsed: float, points: Sequence[float], limits: dict[str, float]
) -> dict[str, Any]:
    """Every figure of a run, times in milliseconds."""
    good = [record for record in records if not record.error]
    values = {
        "ttft": [record.ttft for record in good], "tpot": [record.tpot for record in good if record.num_output > 1],
        "itl": [gap for record in good for gap in record.itls], "e2el": [record.e2e for record in good],
    }
    figures: dict[str, Any] = {
        "num_requests": len(records), "num_failed": len(records) - len(good),
        "errors": sorted({record.error for record in records if record.error})[:5], "elapsed_s": elapsed,
        "requests_per_s": len(good) / elapsed,
        "output_tokens_per_s": sum(record.num_output for record in good) / elapsed,
        "total_tokens_per_s": sum(record.num_input + record.num_output for record in good) / elapsed,
    }
    for name, found in values.items():
        mean = sum(found) / len(found) if found else 0.0
        figures[name] = {"mean": mean * 1000} | {
            key: value * 1000 for key, value in percentiles(found, points).items()
        }
    if limits:
        figures["goodput_requests_per_s"] = sum(is_good(record, limits) for record in good) / elapsed
    return figures


def is_good(record: Record, limits: dict[str, float]) -> bool:
    """Return whether a request kept all limits; for ITL, its longest gap counts."""
    found = {"ttft": record.ttft, "tpot": record.tpot, "itl": max(record.itls, default=0.0), "e2el": record.e2e}
    return all(found[name] <= limit for name, limit in limits.items())


def report(figures: dict[str, Any]) -> Iterator[str]:
    """The table, line by line."""
    yield (
        f"{figures['num_requests']} requests in {figures['elapsed_s']:.2f} s, {figures['num_failed']} failed: "
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output tok/s, "
        f"{figures['total_tokens_per_s']:.1f} total tok/s"
    )
    yield from (f"  {error}" for error in figures["errors"])
    for name in METRICS:
        row = "  ".join(f"{key} {value:10.2f}" for key, value in figures[name].items())
        yield f"{name.upper():5} ms   {row}"
    if "goodput_requests_per_s" in figures:
        yield f"goodput {figures['goodput_requests_per_s']:.2f} requests/s"
