"""`bench simulate`: number of replicas for a load, from the real scheduler and router under a virtual clock.

python -m app bench simulate --request-rate 20 --replicas 1,2,4 --ttft-ms 500 --itl-ms 100    # measures the model first
python -m app bench simulate --step-table steps.json --trace trace.jsonl --policy prefix_aware,round_robin
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np

from app.bench.settings import add_engine_flags, engine_settings, write_json
from app.bench.sweep import read_counts
from app.bench.workload import add_number
from app.config import RoutePolicy, UsageError
from engine import (
    ConfigError,
    Crashes,
    EngineConfig,
    InvalidRequest,
    PrefillReplicas,
    SimulatedRequest,
    Simulator,
    StepTable,
    measure_steps,
)

POLICIES = (*get_args(RoutePolicy), "random")
# flag, default, lowest and highest value, help
NUMBERS: tuple[tuple[str, float, float, float, str], ...] = (
    ("--request-rate", 10.0, 0.001, 1e6, "requests a second; the gaps are exponential"),
    ("--num-prompts", 10_000, 1, 10**7, "requests"),
    ("--num-prefixes", 64, 1, 2**19, "different prefixes of prompts"),
    ("--prefix-len", 0, 0, 10**6, "tokens of a prefix"),
    ("--input-len", 256, 1, 10**6, "further tokens of a prompt"),
    ("--output-len", 64, 1, 10**6, "mean of the tokens of an answer"),
    ("--work-seed", 0, 0, 2**63, "seed of the load and of the crashes"),
    ("--ttft-ms", 1000.0, 0, 1e9, "limit of the time to the first token"),
    ("--itl-ms", 200.0, 0, 1e9, "limit of the time between two tokens"),
    ("--percentile", 99.0, 0, 100, "percentile of these times that must be within the limits"),
    ("--crashes-per-hour", 0.0, 0, 3600, "crashes of each replica, at random times"),
    ("--restart-s", 30.0, 0, 86400, "seconds until a crashed replica is ready again"),
    ("--prefill-replicas", 0, 0, 1024, "replicas that compute prompts, beside as many mixed ones"),
    ("--decode-replicas", 1, 1, 1024, "replicas that get their blocks, with --prefill-replicas"),
    ("--transfer-us", 20.0, 0, 1e6, "microseconds that the blocks of a token take from one to the other"),
)
FILES = (
    ("--trace", "JSONL with timestamp, input_length, output_length, hash_ids, instead of random requests"),
    ("--step-table", "measured step times; without it the model is measured now"),
    ("--save-step-table", "write the measured step times"),
)
HEADER = (
    f"{'policy':19}{'replicas':>8}{'TTFT ms mean/p50/{p}':>30}{'ITL ms mean/p50/{p}':>26}{'tok/s':>9}{'hits':>7}"
    f"{'load':>6}{'preempted':>10}{'resumed':>8}{'CPU s':>7}"
)


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation. Times in milliseconds; `ttft` and `itl` have the mean, p50, and the asked percentile."""

    policy: str
    num_replicas: int
    num_prefill_replicas: int  # of these, replicas that only compute prompts
    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]
    output_tokens_per_s: float
    hit_rate: float  # prompt tokens found in the caches, of those that one unlimited cache would contain
    load_ratio: float
    num_preemptions: int
    num_crashes: int
    num_resumed: int
    is_enough: bool
    cpu_s: float  # CPU time of the simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the load, the limits, the replicas and their settings."""
    for number in NUMBERS:
        add_number(parser, *number)
    parser.add_argument("--replicas", default="1,2,4,8", help="numbers of replicas to try (1,2,4,8)")
    parser.add_argument("--policy", default="prefix_aware", help=f"{', '.join(POLICIES)}; several with commas")
    for flag, text in FILES:
        parser.add_argument(flag, type=Path, metavar="FILE", help=text)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Simulate and print; 1 if no number of replicas keeps the limits."""
    shapes = [(0, count) for count in read_counts("--replicas", arguments.replicas)]
    if arguments.prefill_replicas:
        total = arguments.prefill_replicas + arguments.decode_replicas
        shapes = [(0, total), (arguments.prefill_replicas, total)]
    policies = [part.strip() for part in arguments.policy.split(",")]
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise UsageError(f"--policy {unknown[0]!r} is not one of {', '.join(POLICIES)}")
    if arguments.trace is not None:
        requests = read_trace(arguments.trace)
    else:
        requests = make_poisson(
            *(arguments.num_prompts, arguments.request_rate, arguments.num_prefixes, arguments.prefix_len),
            *(arguments.input_len, arguments.output_len, arguments.work_seed),
        )
    with engine_settings(arguments) as config:
        table, config = find_table(arguments, config)
        print(HEADER.format(p=f"p{arguments.percentile:g}"))
        points = []
        for policy in policies:
            for num_prefill, count in shapes:
                points.append(simulate(arguments, requests, config, table, policy, count, num_prefill))
                print(describe(points[-1]), flush=True)
    limits = f"TTFT {arguments.ttft_ms:g} ms and ITL {arguments.itl_ms:g} ms at p{arguments.percentile:g}"
    for policy in policies:
        enough = [point for point in points if point.policy == policy and point.is_enough]
        least = min(enough, key=lambda point: point.num_replicas, default=None)
        found = f"{name_shape(least)} replicas keep" if least else "no number of replicas keeps"
        print(f"{policy}: {found} {limits}")
    write_json(arguments.output_json, config, {"points": [asdict(p) for p in points], "steps": asdict(table)})
    return 0 if any(point.is_enough for point in points) else 1


def describe(point: Point) -> str:
    """Return a line of the table; `*` marks points within the limits."""
    ttft, itl = ("/".join(f"{value:.1f}" for value in values) for values in (point.ttft, point.itl))
    return (
        f"{point.policy:19}{name_shape(point):>7}{'*' if point.is_enough else ' '}{ttft:>28}{itl:>24}"
        f"{point.output_tokens_per_s:>9.0f}{point.hit_rate:>7.3f}{point.load_ratio:>6.2f}{point.num_preemptions:>10}"
        f"{point.num_resumed:>8}{point.cpu_s:>7.1f}"
    )


def name_shape(point: Point) -> str:
    """Return the number of replicas, or those of both kinds, as in 1+2."""
    count = point.num_prefill_replicas
    return f"{count}+{point.num_replicas - count}" if count else str(point.num_replicas)


def simulate(
    arguments: argparse.Namespace, requests: Sequence[SimulatedRequest], config: EngineConfig,
    table: StepTable, policy: str, num_replicas: int, num_prefill: int,
) -> Point:
    """Run one simulation and take the figures of its table row."""
    prefills = PrefillReplicas(num_prefill, arguments.transfer_us / 1e6)
    crashes = Crashes(arguments.crashes_per_hour / 3600, arguments.restart_s)
    start = time.process_time()
    try:
        simulator = Simulator(
            *(config, table, num_replicas, policy, crashes, arguments.work_seed, prefills)  # type: ignore[arg-type]
        )
        result = simulator.run(requests)
    except (ConfigError, InvalidRequest) as error:
        raise UsageError(str(error)) from error
    cpu_s = time.process_time() - start
    ttft, itl = (summarise(values, arguments.percentile) for values in (result.ttfts, result.itls))
    return Point(
        *(policy, num_replicas, num_prefill, ttft, itl, result.num_output_tokens / result.seconds),
        hit_rate=result.num_hit_tokens / result.num_oracle_tokens if result.num_oracle_tokens else 1.0,
        load_ratio=result.load_ratio, num_preemptions=result.num_preemptions, num_crashes=result.num_crashes,
        num_resumed=result.num_resumed,
        is_enough=ttft[2] <= arguments.ttft_ms and itl[2] <= arguments.itl_ms, cpu_s=cpu_s,
    )


def summarise(values: np.ndarray, percentile: float) -> tuple[float, float, float]:
    """Return mean, median and percentile in milliseconds; answers of one token have no ITL, which is then 0."""
    if not len(values):
        return 0.0, 0.0, 0.0
    median, high = np.percentile(values, (50, percentile))
    return float(values.mean()) * 1000, float(median) * 1000, float(high) * 1000


def find_table(arguments: argparse.Namespace, config: EngineConfig) -> tuple[StepTable, EngineConfig]:
    """Return the step times, read or measured, and the config with as many blocks as the measured engine had."""
    if arguments.step_table is not None:
        table, num_blocks = read_table(arguments.step_table)
    else:
        print(f"measuring the steps of {config.model_name} ...", file=sys.stderr)
        try:
            table, resolved = asyncio.run(measure_steps(config))
        except ConfigError as error:
            raise UsageError(str(error)) from error
        num_blocks = resolved.cache.num_blocks
    if arguments.save_step_table is not None:
        described = {"model": config.model_name, "num_blocks": num_blocks} | asdict(table)
        arguments.save_step_table.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return table, config if config.num_blocks else replace(config, num_blocks=num_blocks)


def read_table(path: Path) -> tuple[StepTable, int | None]:
    """Read what `--save-step-table` wrote, or a table from another source with the same keys."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        num_blocks = found.pop("num_blocks", None)
        found.pop("model", None)
        values: dict[str, Any] = found | {name: tuple(found[name]) for name in ("num_tokens", "seconds")}
        return StepTable(**values), num_blocks
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"--step-table {path}: {error}") from error


HASHED_TOKENS = 512  # prompt tokens per entry of the trace's hash_ids
# Prompts are ranges of numbers: a range per prefix, and a range of its own per request.
RANGE = 2**21
FIRST_OWN = 2**40
MAX_TOKENS = 10**6


def make_poisson(
    num: int, rate: float, num_prefixes: int, prefix_len: int, input_len: int, output_len: int, seed: int
) -> list[SimulatedRequest]:
    """Return `num` requests: one of the prefixes, then `input_len` tokens of their own.

    Output lengths are drawn evenly between half and one and a half of `output_len`.
    """
    rng = Random(seed)
    requests, now = [], 0.0
    for number in range(num):
        now += rng.expovariate(rate)
        start = rng.randrange(num_prefixes) * RANGE
        prompt = [*range(start, start + prefix_len), *_own_range(number, input_len)]
        num_tokens = rng.randint(max(1, output_len // 2), output_len + output_len // 2)
        requests.append(SimulatedRequest(now, prompt, num_tokens))
    return requests


def read_trace(path: Path) -> list[SimulatedRequest]:
    """Read a JSONL file in the format of the Mooncake traces.

    Each line has `timestamp` (milliseconds), `input_length`, `output_length`, and optionally `hash_ids`: prompts share
    a prefix of 512 tokens for each of the first ids that they have in common.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --trace {path}: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                requests.append(_read_request(json.loads(line), number))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise UsageError(f"--trace {path} line {number}: {error}") from error
    if not requests:
        raise UsageError(f"--trace {path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    return requests


def _read_request(row: dict[str, Any], number: int) -> SimulatedRequest:
    num_input, num_output = (_read_count(row, name) for name in ("input_length", "output_length"))
    timestamp = row.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise ValueError(f"timestamp={timestamp!r} must be a number of milliseconds, at least 0")
    prompt: list[int] = []
    for hash_id in row.get("hash_ids", ()):
        if isinstance(hash_id, bool) or not isinstance(hash_id, int) or not 0 <= hash_id < 2**31:
            raise ValueError(f"hash_ids has {hash_id!r}, but takes integers from 0")
        prompt += range(hash_id * HASHED_TOKENS, (hash_id + 1) * HASHED_TOKENS)
    prompt = prompt[:num_input]
    prompt += _own_range(number, num_input - len(prompt))
    return SimulatedRequest(timestamp / 1000, prompt, num_output)


def _read_count(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name}={value!r} must be an integer from 1 to {MAX_TOKENS}")
    return value


def _own_range(number: int, length: int) -> range:
    start = FIRST_OWN + number * RANGE
    return range(start, start + length)
