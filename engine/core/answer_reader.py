"""AnswerReader: appends the tokens of a step to its requests and ends those that are finished."""

from __future__ import annotations

import numpy as np

from engine.core.actor_messages import BROKEN_LOGITS, NO_TOKEN_LEFT, StepDone
from engine.core.request import Request
from engine.core.scheduler_state import SchedulerState
from engine.core.step import Batch, StepRecord
from engine.messages import Detail, NewTokens
from engine.outputs import TokenLogprobs


class AnswerReader:
    """Appends sampled tokens to their requests, and ends finished requests."""

    def __init__(self, state: SchedulerState, eos_token_ids: frozenset[int]) -> None:
        self._state = state
        self._table = state.table
        self._eos_token_ids = eos_token_ids

    def read(self, step: StepRecord, done: StepDone) -> NewTokens:
        scored: list[Request] = []
        if not step.is_answered:
            step.is_answered = True
            if done.skipped:
                step.take_back_runs(self._table, done.skipped)
            if done.prompt_logprobs:
                scored = self._take_prompt_logprobs(step, done)
            for index, vector in done.pooled.items():
                step.batch.requests[index].pooled = vector
        news = self._take_tokens(step, done)
        for request in scored:  # prompt logprobs are sent at once, not with the next token: they are long
            if request.pending_prompt_logprobs:
                news.details.append(request.make_detail())
        if len(step.gated):
            step.drop_gated(done.indices)
        return news

    def _take_prompt_logprobs(self, step: StepRecord, done: StepDone) -> list[Request]:
        """Store the prompt logprobs of a step. Returns the requests that got some."""
        scored = []
        for index, logprobs in done.prompt_logprobs.items():
            request = step.batch.requests[index]
            is_same = request.num_preemptions == step.num_preemptions[index]
            if is_same and not request.is_finished:
                request.take_prompt_logprobs(logprobs)
                scored.append(request)
        return scored

    def _take_tokens(self, step: StepRecord, done: StepDone) -> NewTokens:
        details: list[Detail] = []
        table, batch = self._table, step.match(done.indices)
        slots, token_ids, counts = batch.slots, done.token_ids, done.counts
        step.settle_samples(table, done.indices, counts)
        num_tokens = table.num_planned[slots] - table.num_in_flight[slots]
        is_special = (table.needs_detail[slots] > 0) | (num_tokens >= table.max_num_tokens[slots])
        is_end = token_ids < 0
        for eos_token_id in self._eos_token_ids:
            is_end |= token_ids == eos_token_id
        has_many = len(token_ids) > len(slots)
        stops = table.find_stops(np.repeat(slots, counts) if has_many else slots, token_ids)
        if stops is not None:
            is_end |= stops
        is_special |= np.logical_or.reduceat(is_end, np.cumsum(counts) - counts) if has_many else is_end
        plain, plain_ids, plain_counts = batch, token_ids, counts
        if is_special.any():
            is_plain = ~is_special
            plain, plain_ids = batch.select(is_plain), token_ids[np.repeat(is_plain, counts)]
            plain_counts = counts[is_plain]
            kept = self._take_specials(step, batch, np.flatnonzero(is_special).tolist(), done, details)
            if (kept < counts).any():
                places = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
                token_ids = token_ids[places < np.repeat(kept, counts)]
                batch, counts = batch.select(kept > 0), kept[kept > 0]
        told_ids = token_ids.tolist()
        if has_many:
            ends = np.cumsum(plain_counts).tolist()
            for request, count, end in zip(plain.requests, plain_counts.tolist(), ends, strict=True):
                request.token_ids += plain_ids[end - count : end].tolist()
        else:
            new_ids = told_ids if plain is batch else plain_ids.tolist()
            for append, token_id in zip(plain.appends, new_ids, strict=True):
                append(token_id)
        return NewTokens(batch.handles, counts.tolist() if has_many else [], told_ids, details)

    def _take_specials(
        self, step: StepRecord, batch: Batch, places: list[int], done: StepDone, details: list[Detail]
    ) -> np.ndarray:
        """Append the tokens of requests that need a Detail or may end. Returns the number of tokens kept per row."""
        kept = done.counts.copy()
        ends = np.cumsum(kept).tolist()
        for at in places:
            request = batch.requests[at]
            if request.is_finished:
                kept[at] = 0
                continue
            token_ids = done.token_ids[ends[at] - int(kept[at]) : ends[at]].tolist()
            logprobs = done.logprobs.get(int(done.indices[at]))
            if logprobs is not None and (draft := step.drafts.get(request.slot)) is not None:
                num_accepted = int(done.counts[at]) - 1
                for each in logprobs[:num_accepted]:
                    each.draft_source = draft.source
            kept[at], detail = self._take_each(request, token_ids, logprobs)
            details.append(detail)
        return kept

    def _take_each(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> tuple[int, Detail]:
        """Append tokens up to the request's end. Returns their number and the Detail."""
        for count, token_id in enumerate(token_ids):
            if token_id == NO_TOKEN_LEFT:
                error = request.describe_dead_end()
                self._state.dead_ends["no_token"] += 1
                return count, self._state.finish(request, "dead_end", error=error, logprobs=logprobs)
            if token_id == BROKEN_LOGITS:
                self._state.forget(request)
                error = "no token could be sampled: the model's logits were not numbers"
                return count, self._state.finish(request, "error", error=error, logprobs=logprobs)
            request.token_ids.append(token_id)
            told = None if logprobs is None else logprobs[: count + 1]
            if token_id in request.stop_ids:  # the sampler forbids them before min_tokens
                stop_reason = None if token_id in self._eos_token_ids else token_id
                return count + 1, self._state.finish(request, "stop", logprobs=told, stop_reason=stop_reason)
            if request.num_tokens >= request.max_num_tokens:
                return count + 1, self._state.finish(request, "length", logprobs=told)
        self._table.needs_detail[request.slot] = request.needs_detail
        return len(token_ids), request.make_detail(logprobs=logprobs)
