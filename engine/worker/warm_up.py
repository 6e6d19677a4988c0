"""The steps that a worker runs before its first request, all in the null block.

The warm-up keeps compilation out of the first requests. On a GPU it launches every kernel that a step can launch,
because each is compiled at its first launch:

    runs of 20, 2 and 1 tokens, at the start of a context and at its end (where long contexts are split)
    draws: greedy, full, with min-p, with top-k and top-p, from logits and from hidden states, with a mask

The largest steps are run to measure their memory before the KV cache gets the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from engine.core.actor_messages import NewRow, StepMasks, StepPlan
from engine.core.step import MAX_SCORED_TOKENS
from engine.device.device_link import wait_for
from engine.resolved_config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.model_runner import ModelRunner

FILTERED = SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9, seed=0)
# One for each kind of draw.
DRAWS = (
    SamplingParams(max_tokens=2, temperature=0.0, logprobs=0),
    SamplingParams(max_tokens=2, temperature=0.7, logprobs=0, seed=0),
    SamplingParams(max_tokens=2, temperature=0.7, min_p=0.1, seed=0),
    SamplingParams(max_tokens=2, temperature=0.7, seed=0),
)
MEASURED = SamplingParams(max_tokens=2, temperature=0.7, seed=0)
# The time may not suffice for all; two close sizes alone would say nothing about larger steps.
MEASURED_SIZES = (1, 8, 4, 16, 2, 64, 3, 6, 5, 32, 128, 256)
MEASURED_WIDTH = 8  # tokens of a row
# Attention treats runs of up to 16 tokens as drafts, longer ones as prompts.
DRAFT_LEN, PROMPT_LEN = 16, 20
# These options need the most copies of the logits.
HEAVY = SamplingParams(
    max_tokens=2, temperature=0.7, top_p=0.9, min_p=0.1, presence_penalty=0.5, logprobs=20, seed=0
)
SCORED = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=20)


def list_warm_up(max_model_len: int, vocab_size: int, *, is_thorough: bool) -> Iterator[StepPlan | StepMasks]:
    """Yield the warm-up steps in order, with the masks that some of them need.

    Args:
        is_thorough: launch all kernels; otherwise one prompt and one decode.
    """
    # Leave a position for the decode's token.
    count = min(2, max_model_len - 1)
    yield _make_plan(0, FILTERED, 0, count)
    yield _make_plan(1, None, count, 1)
    if not is_thorough:
        return
    for params in DRAWS:
        yield _make_plan(2, params, 0, min(PROMPT_LEN, max_model_len))
    for count in (1, 2):
        yield _make_plan(3, FILTERED, max_model_len - count, count)
    yield _make_plan(4, FILTERED, 0, 2, is_gated=True)
    yield _make_masks(4, 1, vocab_size)


def list_largest_steps(
    scheduler: SchedulerConfig, num_context_tokens: int, vocab_size: int
) -> Iterator[StepPlan | StepMasks]:
    """Yield the steps that need the most memory: all tokens and rows, all rows with masks, prompt logprobs.

    Args:
        num_context_tokens: tokens of all contexts together, as many as the cache may contain.
    """
    max_len = scheduler.max_model_len
    num_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    rest = (num_context_tokens - max_len) // max(1, num_rows - 1)
    ends = np.full(num_rows, min(max(rest, 1), max_len))
    ends[0] = max_len
    # Every row gets drafts, since attention needs scratch for each; the first rows get the remaining tokens.
    counts = np.minimum(ends, min(DRAFT_LEN, scheduler.max_num_batched_tokens // num_rows))
    room = ends - counts
    counts += np.clip(scheduler.max_num_batched_tokens - counts.sum() - (np.cumsum(room) - room), 0, room)
    new_rows = [NewRow(row, np.zeros(1, np.int64), 1, [], HEAVY, 0) for row in range(num_rows)]
    yield _make_step(0, new_rows, ends - counts, counts)
    yield _make_step(1, [], ends - 1, np.ones_like(ends), is_gated=True)
    yield _make_masks(1, num_rows, vocab_size)
    prompt = np.zeros(min(MAX_SCORED_TOKENS + 1, max_len), np.int64)
    scored = NewRow(0, prompt, len(prompt), [], SCORED, 0)
    yield _make_step(2, [scored], np.zeros(1, np.int64), np.array([len(prompt)]))


def run_steps(runner: ModelRunner, steps: Iterable[StepPlan | StepMasks]) -> None:
    """Launch the steps and drop their results."""
    for step in steps:
        answer = runner.execute(step) if isinstance(step, StepPlan) else runner.sample_gated(step)
        if runner.has_stages:  # the next step needs the tokens of this one
            wait_for(answer)


def list_measured_steps(scheduler: SchedulerConfig, vocab_size: int) -> Iterator[list[StepPlan]]:
    """Yield groups of equal steps, each of rows with a few tokens that are all sampled."""
    for size in MEASURED_SIZES:
        num_rows = -(-size // MEASURED_WIDTH)
        if num_rows > scheduler.max_num_seqs or size > scheduler.max_num_batched_tokens:
            continue
        counts = np.full(num_rows, size // num_rows)
        if counts[0] > scheduler.max_model_len:
            continue
        new_rows = [NewRow(row, np.zeros(1, np.int64), 1, [], MEASURED, 0) for row in range(num_rows)]
        steps = [
            _make_step(number, new_rows if number == 0 else [], 0 * counts, counts) for number in range(4)
        ]
        drafts = np.zeros(int((counts - 1).sum()), dtype=np.int64)
        yield [msgspec.structs.replace(step, num_samples=counts, draft_token_ids=drafts) for step in steps]


def run_timed(runner: ModelRunner, steps: Iterable[StepPlan]) -> list[float]:
    """Run steps one after the other. Returns their times in seconds."""
    times = []
    for step in steps:
        start = time.perf_counter()
        wait_for(runner.execute(step))
        times.append(time.perf_counter() - start)
    return times


def record_first(graphs: DecodeGraphs | None) -> None:
    """Record the first graphs, which compile every kernel that recorded steps launch."""
    while graphs is not None and graphs.is_cold:
        graphs.record_next()


def _make_plan(
    step_id: int, params: SamplingParams | None, start: int, count: int, *, is_gated: bool = False
) -> StepPlan:
    """Return a plan with one row without blocks; with `params` it is a new row."""
    prompt = np.zeros(start + count, dtype=np.int64)
    new_rows = [] if params is None else [NewRow(0, prompt, len(prompt), [], params, 0)]
    return _make_step(step_id, new_rows, np.array([start]), np.array([count]), is_gated=is_gated)


def _make_step(
    step_id: int, new_rows: list[NewRow], starts: np.ndarray, counts: np.ndarray, *, is_gated: bool = False
) -> StepPlan:
    """Return a plan of rows 0 to len(starts) - 1, all sampled."""
    return StepPlan(
        step_id=step_id, removed_rows=[], new_rows=new_rows, new_blocks=[], rows=np.arange(len(starts)),
        starts=starts, num_scheduled_tokens=counts, num_samples=np.ones(len(starts), dtype=np.int64),
        is_gated=np.full(len(starts), is_gated), draft_token_ids=np.zeros(0, dtype=np.int64),
    )


def _make_masks(step_id: int, num_rows: int, vocab_size: int) -> StepMasks:
    words = np.full((num_rows, -(-vocab_size // 32)), -1, dtype=np.int32)
    return StepMasks(step_id, np.arange(num_rows), np.ones(num_rows, dtype=np.int64), words)
