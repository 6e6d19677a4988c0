"""Traces for the simulator: from a file, or Poisson arrivals with shared prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from app.config import UsageError
from engine import SimulatedRequest

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

    Raises:
        UsageError: the file cannot be read, or a line is not a request.
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
