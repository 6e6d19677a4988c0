"""What the scheduler tells of a request that got a first token, a watched one or an end."""

from __future__ import annotations

import numpy as np

from engine.core.batch import Batch
from engine.core.request import Request
from engine.core.step import StepRecord
from engine.messages import RequestTokens, StepDone
from engine.outputs import FinishReason, TokenLogprobs


def match_rows(step: StepRecord, done: StepDone) -> tuple[Batch, np.ndarray, np.ndarray]:
    """The requests that an answer is for, their indices in the step, and their tokens."""
    indices = np.asarray(done.indices, dtype=np.int64)
    batch = step.batch
    if len(indices) < len(batch):
        is_answered = np.zeros(len(batch), dtype=bool)
        is_answered[indices] = True
        batch = batch.select(is_answered)
    return batch, indices, np.asarray(done.token_ids, dtype=np.int64)


def take_prompt_logprobs(step: StepRecord, done: StepDone) -> list[RequestTokens]:
    """What a step tells of prompts, at once: it is long, and to be read bit by bit."""
    items = []
    for index, logprobs in done.prompt_logprobs.items():
        request = step.batch.requests[index]
        is_same = request.num_preemptions == step.num_preemptions[index]
        if is_same and not request.is_finished:
            request.take_prompt_logprobs(logprobs)
            items.append(make_tokens(request, []))
    return items


def make_tokens(
    request: Request,
    token_ids: list[int],
    *,
    logprobs: TokenLogprobs | None = None,
    finish_reason: FinishReason | None = None,
    stop_reason: int | None = None,
    error: str | None = None,
) -> RequestTokens:
    """The general message; it takes along what is known of the prompt."""
    prompt_logprobs, request.pending_prompt_logprobs = request.pending_prompt_logprobs, None
    return RequestTokens(
        request.request_id,
        token_ids,
        None if logprobs is None else [logprobs],
        prompt_logprobs,
        finish_reason,
        stop_reason,
        error,
        request.num_cached_tokens,
        request.first_scheduled_time,
        request.num_preemptions,
    )


def describe_dead_end(request: Request) -> str:
    """Which fields of the request leave it no token."""
    params = request.params
    fields = [name for name in ("grammar", "allowed_token_ids", "bad_words") if getattr(params, name)]
    if request.num_output_tokens < params.min_tokens:
        fields.append("min_tokens")
    return f"after {request.num_output_tokens} tokens of output no token satisfies {' and '.join(fields)}"
