"""The steps a worker runs before its first request, all in the null block, so that no request pays for set-up.

On a GPU they go through every kernel that a step can launch, because each is compiled at its first launch:

    prompts of 20 tokens, 2 tokens and 1, at the start of a context and at its end (where contexts are split)
    draws: greedy, full, with min-p, with top-k and top-p, from logits and straight from hidden states, under a mask
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.messages import NewRow, StepMasks, StepPlan
from engine.sampling_params import SamplingParams

FILTERED = SamplingParams(max_tokens=2, temperature=0.7, top_p=0.9, seed=0)
# One for every way to draw; logprobs keep the step from being sampled without its logits.
DRAWS = (
    SamplingParams(max_tokens=2, temperature=0.0, logprobs=0),
    SamplingParams(max_tokens=2, temperature=0.7, logprobs=0, seed=0),
    SamplingParams(max_tokens=2, temperature=0.7, min_p=0.1, seed=0),
    SamplingParams(max_tokens=2, temperature=0.7, seed=0),
)
# Longer than a draft, so that it counts as a prompt.
PROMPT_LEN = 20


def list_warm_up(max_model_len: int, vocab_size: int, *, is_thorough: bool) -> Iterator[StepPlan | StepMasks]:
    """The steps, in order, with the masks that some of them wait for.

    Args:
        is_thorough: go through all kernels; else one prompt and one decode.
    """
    # The decode's token must have room, too.
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
    one = np.ones(1, dtype=np.int64)
    words = np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32)
    yield StepMasks(4, np.zeros(1, dtype=np.int64), one, words)


def _make_plan(
    step_id: int, params: SamplingParams | None, start: int, count: int, *, is_gated: bool = False
) -> StepPlan:
    """One row without blocks; with params it is a new one."""
    prompt = np.zeros(start + count, dtype=np.int64)
    return StepPlan(
        step_id=step_id,
        removed_rows=[],
        new_rows=[] if params is None else [NewRow(0, prompt, len(prompt), [], params, 0)],
        new_blocks=[],
        rows=np.zeros(1, dtype=np.int64),
        starts=np.array([start], dtype=np.int64),
        num_scheduled_tokens=np.array([count], dtype=np.int64),
        num_samples=np.ones(1, dtype=np.int64),
        is_gated=np.array([is_gated]),
        draft_token_ids=np.zeros(0, dtype=np.int64),
    )
