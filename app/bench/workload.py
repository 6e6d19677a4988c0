"""Requests of the benchmarks. They are token ids, so that engines are compared without their tokenizers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from app.config import UsageError

NANO_REQUESTS, NANO_MIN, NANO_MAX, NANO_IDS = 256, 100, 1024, 10000


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and exactly how many tokens are to follow."""

    prompt_token_ids: list[int]
    max_tokens: int


def count_tokens(jobs: Sequence[Job]) -> tuple[int, int]:
    """Tokens (in, out) of the whole work."""
    return sum(len(job.prompt_token_ids) for job in jobs), sum(job.max_tokens for job in jobs)


def find_lengths(jobs: Sequence[Job], peer: str) -> tuple[int, int]:
    lengths = {(len(job.prompt_token_ids), job.max_tokens) for job in jobs}
    if len(lengths) != 1:
        raise UsageError(f"--peer {peer} needs prompts and answers of one length (--range-ratio 0)")
    return lengths.pop()


def make_random(
    num_jobs: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, seed: int
) -> list[Job]:
    """Random prompts; lengths are drawn evenly from `length * (1 - range_ratio)` to `length * (1 + range_ratio)`."""
    rng = Random(seed)

    def draw(length: int) -> int:
        return max(1, rng.randint(round(length * (1 - range_ratio)), round(length * (1 + range_ratio))))

    return [
        Job([rng.randrange(vocab_size) for _ in range(draw(input_len))], draw(output_len)) for _ in range(num_jobs)
    ]


def make_nano(scale: float, vocab_size: int) -> list[Job]:
    """The work that small engines are compared by: 256 requests, 100 to 1024 tokens in and out, seed 0.

    Args:
        scale: factor of all lengths, for machines on which the whole work takes hours; 1 is the work itself.
    """
    rng = Random(0)
    prompts = [
        [rng.randint(0, NANO_IDS) for _ in range(rng.randint(NANO_MIN, NANO_MAX))] for _ in range(NANO_REQUESTS)
    ]
    jobs = [Job(prompt, rng.randint(NANO_MIN, NANO_MAX)) for prompt in prompts]
    return [shrink(job, scale, vocab_size) for job in jobs]


def shrink(job: Job, scale: float, vocab_size: int) -> Job:
    """A job with lengths times `scale`, and ids that a small vocabulary has."""
    length = max(1, round(len(job.prompt_token_ids) * scale))
    ids = [token_id % vocab_size for token_id in job.prompt_token_ids[:length]]
    return replace(job, prompt_token_ids=ids, max_tokens=max(1, round(job.max_tokens * scale)))


def add_random_flags(parser: argparse.ArgumentParser, num: int, input_len: int, output_len: int) -> None:
    """The flags that shape random work, under vLLM's names."""
    group = parser.add_argument_group("work")
    group.add_argument(
        "--work", choices=("random", "nano"), default="random", help="kind of requests (default: random)"
    )
    add_number(group, "--scale", 1.0, 0.001, 1, "factor for all lengths of --work nano")
    add_number(group, "--num-prompts", num, 1, 10**7, "requests")
    inputs, outputs = "--input-len --random-input-len --input-tokens", "--output-len --random-output-len"
    add_number(group, inputs, input_len, 1, 10**6, "tokens of a prompt")
    add_number(group, f"{outputs} --output-tokens", output_len, 1, 10**6, "tokens of an answer")
    add_number(group, "--range-ratio --random-range-ratio", 0.0, 0, 0.999, "lengths vary by this share")
    group.add_argument("--work-seed", type=int, default=0, help="seed of the requests (0)")


def read_work(arguments: argparse.Namespace, vocab_size: int) -> list[Job]:
    """The work that the flags of `add_random_flags` describe."""
    if arguments.work == "nano":
        return make_nano(arguments.scale, vocab_size)
    return make_random(
        arguments.num_prompts, arguments.input_len, arguments.output_len, arguments.range_ratio, vocab_size,
        arguments.work_seed,
    )


class _InRange(argparse.Action):
    """Stores a number, or raises a UsageError that names the flag, its value and what is allowed."""

    def __init__(self, low: float, high: float, **options: Any) -> None:
        super().__init__(**options)
        self.low, self.high = low, high

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        if not self.low <= values <= self.high:
            raise UsageError(f"{option_string}={values} must be from {self.low} to {self.high}")
        setattr(namespace, self.dest, values)


def add_number(
    parser: argparse._ActionsContainer, names: str, default: float | None, low: float, high: float, text: str
) -> None:
    """Add a flag that takes a number within a range; its type is that of the default, an integer if that is None.

    Args:
        names: the flag and its other names, separated by spaces.
    """
    kind, shown = (int, text) if default is None else (type(default), f"{text} ({default:g})")
    flags, dest = names.split(), names.split()[0].removeprefix("--").replace("-", "_")
    parser.add_argument(*flags, dest=dest, type=kind, default=default, action=_InRange, low=low, high=high, help=shown)
