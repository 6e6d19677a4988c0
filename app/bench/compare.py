"""Measuring runners side by side: interleaved repeats, with separate times for prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.bench.runners import Runner
from app.bench.spread import Spread
from app.bench.workload import Job, count_tokens

MAX_TRIES = 4  # at one repeat


@dataclass(frozen=True, slots=True)
class Cell:
    """One runner on one work.

    Attributes:
        latency_s: of the whole batch.
        prefill_s: of the same batch with one token of output each.
        prefill_rate, decode_rate: tokens a second; decode is what the rest of the time brought.
    """

    name: str
    latency_s: Spread
    prefill_s: Spread
    prefill_rate: Spread
    decode_rate: Spread


def measure(
    runners: Sequence[Runner],
    jobs: Sequence[Job],
    repeats: int,
    warm_ups: int,
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
        name,
        Spread(tuple(whole for _, whole in times)),
        Spread(tuple(prefill for prefill, _ in times)),
        Spread(tuple(num_in / prefill for prefill, _ in times)),
        Spread(tuple(num_decoded / spent for spent in decode)),
    )
