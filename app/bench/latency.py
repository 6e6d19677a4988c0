"""`bench latency`: latency of one batch, repeated, with separate times for prefill and decode.

python -m app bench latency --shape qwen3-0.6b --dtype bfloat16 --input-len 128 --output-len 64 --batch-size 16
python -m app bench latency ... --peer transformers
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from app.bench.runners import PEERS, Runner, TroupeRunner, make_peer
from app.bench.settings import (
    add_engine_flags,
    as_settings,
    engine_settings,
    fit,
    read_model_config,
    write_json,
)
from app.bench.spread import Spread, percentiles, ratio
from app.bench.workload import Job, add_number, count_tokens, make_random
from app.config import UsageError
from engine import EngineConfig

MAX_TRIES = 4  # at one repeat


@dataclass(frozen=True, slots=True)
class Cell:
    """One runner on one work.

    Attributes:
        latency_s: of the whole batch.
        prefill_s: of the same batch with one token of output each.
        prefill_rate, decode_rate: tokens a second; decode is measured over the rest of the time.
    """

    name: str
    latency_s: Spread
    prefill_s: Spread
    prefill_rate: Spread
    decode_rate: Spread


def measure(
    runners: Sequence[Runner], jobs: Sequence[Job], repeats: int, warm_ups: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[Cell]:
    """Run the work on every runner in turn, again and again.

    Args:
        on_round: called after every round over all runners, warm-ups included.
    """
    first = [replace(job, max_tokens=1) for job in jobs]
    times: dict[str, list[tuple[float, float]]] = {runner.name: [] for runner in runners}
    for round_number in range(warm_ups + repeats):
        for runner in runners:
            prefill, whole = _time_both(runner, first, jobs)
            if round_number >= warm_ups:
                times[runner.name].append((prefill, whole))
        on_round()
    num_in, num_out = count_tokens(jobs)
    return [_make_cell(name, found, num_in, num_out - len(jobs)) for name, found in times.items()]


def _time_both(runner: Runner, first: Sequence[Job], jobs: Sequence[Job]) -> tuple[float, float]:
    """Return the seconds of the prefill alone and of the whole. Repeats if noise made the prefill the longer one."""
    for _ in range(MAX_TRIES):
        prefill, whole = runner.run(first), runner.run(jobs)
        if whole > prefill:
            break
    return prefill, whole


def _make_cell(name: str, times: list[tuple[float, float]], num_in: int, num_decoded: int) -> Cell:
    # if every try was disturbed, the floor gives the last one an obviously impossible rate
    decode = [max(whole - prefill, 1e-9) for prefill, whole in times]
    return Cell(
        name, Spread(tuple(whole for _, whole in times)), Spread(tuple(prefill for prefill, _ in times)),
        Spread(tuple(num_in / prefill for prefill, _ in times)),
        Spread(tuple(num_decoded / spent for spent in decode)),
    )


def add_arguments(parser: argparse.ArgumentParser, peers: Sequence[str] = PEERS) -> None:
    """vLLM's flags, and the peers."""
    add_number(parser, "--input-len --input-tokens", 32, 1, 10**6, "tokens of a prompt")
    add_number(parser, "--output-len --output-tokens", 128, 2, 10**6, "tokens of an answer")
    add_number(parser, "--batch-size", 8, 1, 4096, "requests at once")
    add_number(parser, "--num-iters-warmup", 2, 0, 10**6, "warm-up rounds, which are not measured")
    add_number(parser, "--num-iters", 5, 1, 10**6, "rounds")
    parser.add_argument("--peer", action="append", choices=peers, default=[], help="measure this peer, too")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Measure and print."""
    with engine_settings(arguments, enable_prefix_caching=False) as config:
        measure_all(arguments, config)
    return 0


def measure_all(
    arguments: argparse.Namespace,
    config: EngineConfig,
    make_peer: Callable[[str, EngineConfig, int], Runner] = make_peer,
) -> None:
    """Load ours and the peers, run them, print a table and write the figures."""
    model = read_model_config(config)
    num, length = arguments.batch_size, arguments.input_len + arguments.output_len
    if config.enable_prefix_caching:
        raise UsageError("--enable-prefix-caching would make the second round measure the cache: leave it off")
    config = fit(config, num, num * length, length)
    jobs = make_random(num, arguments.input_len, arguments.output_len, 0, model["vocab_size"], 0)
    ours = TroupeRunner(as_settings(config))
    runners: list[Runner] = [ours]
    try:
        worker = ours.llm.resolved.worker
        runners += [make_peer(name, config, worker.num_threads) for name in arguments.peer]
        num_rounds = arguments.num_iters_warmup + arguments.num_iters
        with tqdm(total=num_rounds, unit="round", leave=False) as bar:
            cells = measure(
                runners, jobs, arguments.num_iters, arguments.num_iters_warmup, lambda: bar.update() and None
            )
    finally:
        for runner in runners:
            runner.close()
    print("\n".join(report(cells)))
    write_json(arguments.output_json, config, {"cells": [describe(cell) for cell in cells]})


def report(cells: list[Cell]) -> Iterator[str]:
    """The table, line by line; `?` marks a cell whose repeats lie far apart."""
    yield f"{'':22}{'latency s':>28}{'prefill tok/s':>30}{'decode tok/s':>30}"
    for cell in cells:
        yield f"{cell.name:22}{cell.latency_s!s:>28}{cell.prefill_rate!s:>30}{cell.decode_rate!s:>30}"
    ours = cells[0]
    for cell in cells[1:]:
        prefill = ratio(ours.prefill_rate, cell.prefill_rate)
        decode = ratio(ours.decode_rate, cell.decode_rate)
        yield f"{'over ' + cell.name:22}{'':>28}{prefill!s:>30}{decode!s:>30}"
    points = percentiles(ours.latency_s.values)
    yield "latency " + "  ".join(f"{name} {value:.4f}" for name, value in points.items()) + " s"


def describe(cell: Cell) -> dict[str, Any]:
    """A cell for JSON."""
    return {
        "name": cell.name, "latency_s": cell.latency_s.values,
        "prefill_tokens_per_s": cell.prefill_rate.values, "decode_tokens_per_s": cell.decode_rate.values,
    }
