"""`bench sweep`: throughput against latency at growing concurrency, the best balance, and settings for it.

python -m app bench sweep
python -m app bench sweep --concurrency 1,4,16,64 --batched-tokens 256,1024 --server-flags='--model PATH'
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.bench.client import Load, Target, drive
from app.bench.own_server import run_server
from app.bench.serve import find_model, summarise
from app.bench.settings import write_json
from app.bench.workload import add_number, make_random
from app.config import UsageError


@dataclass(frozen=True, slots=True)
class Point:
    """One run: number of concurrent requests, and tokens of a step at most."""

    concurrency: int
    batched_tokens: int
    output_tokens_per_s: float
    tpot_ms: float  # median
    ttft_ms: float  # p99


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the grid and the work of each point."""
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="requests open at a time")
    parser.add_argument(
        "--batched-tokens", default="256,512,1024,2048", help="values of max_num_batched_tokens to try"
    )
    add_number(parser, "--requests-per-client", 2, 1, 10**5, "requests of each client")
    add_number(parser, "--input-len", 256, 1, 10**5, "tokens of a prompt")
    add_number(parser, "--output-len", 64, 1, 10**5, "tokens of an answer")
    add_number(parser, "--vocab-size", 1000, 1, 2**31 - 1, "prompts use token ids below this number")
    parser.add_argument("--server-flags", default="", help="flags of the server: --server-flags='--model PATH'")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there, too")


def run(arguments: argparse.Namespace, start: float) -> int:
    """Measure, print, and propose settings.

    Raises UsageError: a flag outside its range, or a server that does not come up.
    """
    concurrency = read_counts("--concurrency", arguments.concurrency)
    tokens = read_counts("--batched-tokens", arguments.batched_tokens)
    points = asyncio.run(measure_all(arguments, concurrency, tokens))
    frontier = [point for point in points if point.batched_tokens == points[0].batched_tokens]
    knee = find_knee(frontier)
    best = choose_batched_tokens([point for point in points if point.concurrency == knee.concurrency])
    print(
        f"best balance: {knee.concurrency} requests at a time, {knee.output_tokens_per_s:.1f} tok/s, "
        f"TPOT {knee.tpot_ms:.1f} ms"
    )
    print(f"proposed: --max-num-seqs {knee.concurrency} --max-num-batched-tokens {best.batched_tokens}")
    proposal = {"max_num_seqs": knee.concurrency, "max_num_batched_tokens": best.batched_tokens}
    write_json(arguments.output_json, None, {"points": [asdict(p) for p in points], "proposal": proposal})
    return 0


def read_counts(flag: str, text: str) -> list[int]:
    """Read numbers from "1,2,4", ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) <= 2**16 for part in parts):
        raise UsageError(f"{flag} {text!r} must be numbers from 1 to {2**16} with commas between them")
    return sorted({int(part) for part in parts})


async def measure_all(arguments: argparse.Namespace, concurrency: list[int], tokens: list[int]) -> list[Point]:
    """Measure the frontier at the middle token budget, then the other budgets at the best balance."""
    middle = next((count for count in tokens if count >= 1024), tokens[-1])
    middle = max(middle, concurrency[-1])
    points = await measure_server(arguments, concurrency, middle)
    knee = find_knee(points)
    for budget in tokens:
        if budget != middle and budget >= knee.concurrency:
            points += await measure_server(arguments, [knee.concurrency], budget)
    return points


async def measure_server(arguments: argparse.Namespace, concurrency: Sequence[int], budget: int) -> list[Point]:
    """Measure one server with a token budget at each concurrency in turn."""
    flags = ["--no-ui", "--max-num-seqs", str(concurrency[-1]), "--max-num-batched-tokens", str(budget)]
    points = []
    async with run_server([*flags, "--no-enable-prefix-caching", *arguments.server_flags.split()]) as url:
        target = Target(url, await find_model(url, None))
        # The first concurrency runs twice, because its first run warms up.
        for count in (concurrency[0], *concurrency):
            num_jobs = count * arguments.requests_per_client
            jobs = make_random(num_jobs, arguments.input_len, arguments.output_len, 0.2, arguments.vocab_size, count)
            records, elapsed = await drive(target, jobs, Load(max_concurrency=count))
            figures = summarise(records, elapsed, (50, 99), {})
            if figures["num_failed"]:
                raise UsageError(f"a request failed: {figures['errors'][0]}")
            point = Point(
                count, budget, figures["output_tokens_per_s"], figures["tpot"]["p50"], figures["ttft"]["p99"]
            )
            points.append(point)
            print(
                f"{count:5} at a time, {budget:5} tokens a step: {point.output_tokens_per_s:9.1f} tok/s, "
                f"TPOT p50 {point.tpot_ms:8.2f} ms, TTFT p99 {point.ttft_ms:9.1f} ms",
                flush=True,
            )
    return points[1:]


def find_knee(points: Sequence[Point]) -> Point:
    """Return the point farthest above the line from the first to the last, both axes scaled to their range.

    Source: Satopaa et al., 2011 (Kneedle).
    """
    first, last = points[0], max(points, key=lambda point: point.tpot_ms)
    span_x = last.tpot_ms - first.tpot_ms
    top = max(points, key=lambda point: point.output_tokens_per_s)
    span_y = top.output_tokens_per_s - first.output_tokens_per_s
    if span_x <= 0 or span_y <= 0:
        return top

    def height(point: Point) -> float:
        x = (point.tpot_ms - first.tpot_ms) / span_x
        return (point.output_tokens_per_s - first.output_tokens_per_s) / span_y - x

    return max(points, key=height)


def choose_batched_tokens(points: Sequence[Point]) -> Point:
    """Return the budget with the shortest time to first token among those within 3 % of the best throughput."""
    best = max(point.output_tokens_per_s for point in points)
    close = [point for point in points if point.output_tokens_per_s >= 0.97 * best]
    return min(close, key=lambda point: point.ttft_ms)
