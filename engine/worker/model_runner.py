"""ModelRunner: turns a step plan into a forward pass and sampled tokens.

    apply changes ─▶ forward ─▶ sample plain rows, or a step of gated rows whose masks have arrived ─▶ result
                                  other gated rows ─▶ parked until their masks arrive (StepMasks) ─▶ result

In a pipeline, rank 0 computes the first stage of a step and samples it when the last stage has returned the hidden
states. Other steps begin meanwhile.

A row whose last token is still parked cannot be computed; it is skipped and the scheduler plans it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import NewRow, StepDone, StepMasks, StepPlan
from engine.device.cuda_link import CudaLink
from engine.device.device_link import PendingStep, wait_for
from engine.model import Model
from engine.model.adapters import StepAdapters
from engine.parallel.leader import LeaderDecoder, StagedHidden
from engine.spec.device.drafter import Drafter
from engine.worker.input_batch import InputBatch, ModelInput, StepPlace
from engine.worker.launched_step import LaunchedStep, ParkedRows, RowPart, StartedStep
from engine.worker.pooler import Pooler
from engine.worker.sampling.drafts import SampleRuns, sample_runs
from engine.worker.sampling.logprobs import SampledLogprobs, compute_prompt_logprobs
from engine.worker.sampling.sampler import Sampler
from engine.worker.sampling.state import SamplingState
from engine.worker.state_slots import StateSlots
from kernels.upload import upload

MASK_TIMEOUT_S = 0.002  # how long rows that could run wait for the masks of other rows


class ModelRunner:
    """Runs steps on one model; not thread-safe, one thread owns it.

    Args:
        state: on the device where tokens are drawn.
        link: copies results back from the device; None: they are there at once, or after a wait (MPS).
        drafter: proposes drafts after a step; it has been started on this batch.
        states: that of them which keeps states; None: the model has none.
        place: of the inputs of steps that `forward` has recorded.
    """

    def __init__(
        self,
        model: Model,
        kv_caches: list[tuple[Tensor, Tensor]],
        batch: InputBatch,
        state: SamplingState,
        eos_token_ids: tuple[int, ...],
        link: CudaLink | None = None,
        forward: Callable[[ModelInput], Tensor] | None = None,
        drafter: Drafter | None = None,
        parts: Sequence[RowPart] = (),
        states: StateSlots | None = None,
        place: StepPlace | None = None,
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.batch = batch
        self.state = state
        self.sampler = Sampler(state, model.ops)
        self._eos_token_ids = eos_token_ids
        self._link = link
        self._forward = forward
        self._drafter = drafter
        self._parts = parts
        self._states = states
        self._place = place
        # Rank 0 of a pipeline; None: the model computes whole steps.
        self._pipeline = model if isinstance(model, LeaderDecoder) and model.has_stages else None
        self._staged: dict[int, StagedHidden] = {}  # by step, until they are sampled
        # Takes the masks of these rows of a step, if they have all arrived.
        self.take_masks: Callable[[int, np.ndarray], StepMasks | None] = lambda step_id, indices: None
        self._last_end = 0.0  # time of the last result
        self._parked: dict[int, ParkedRows] = {}
        self.parked_rows: set[int] = set()
        self._fresh_rows: set[int] = set()  # rows parked by the last step
        self._late_rows: set[int] = set()  # rows whose last mask was late
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (prompt length, k)
        self._pooler = Pooler(model.compute_logits, getattr(model, "classify", None), state.device)

    @property
    def has_stages(self) -> bool:
        """Whether a step's tokens are known only after `PendingStep.wait`."""
        return self._pipeline is not None

    def run_model(self, step: ModelInput) -> Tensor:
        """Run the model without graphs. Returns the hidden states, [T, D]."""
        inputs = (step.input_ids, step.positions, self.kv_caches, step.attn_metadata, step.adapters)
        return self.model(*inputs) if step.images is None else self.model(*inputs, step.images)

    def get_mask_timeout(self, plan: StepPlan) -> float:
        """Return how many seconds to wait for masks before the plan: 0 if no row needs one, inf if every row does.

        Masks of an older step, or of a row whose last mask was late, are slow: wait for them only if no row can run.
        """
        rows = set(plan.rows.tolist())
        if rows <= self.parked_rows:
            return math.inf
        return MASK_TIMEOUT_S if rows & self._fresh_rows & self.parked_rows - self._late_rows else 0.0

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        """Launch one step. Returns None if every row waits for its mask; `sample_gated` then returns the results."""
        with nullcontext() if self._link is None else self._link.launch_section():
            started = self._start(plan)
            if isinstance(started, LaunchedStep):
                return self._bring_back(started)
            if self._pipeline is not None:
                return self._begin_stages(self._pipeline, started)
            # `_forward` is not set to the bound `run_model`: the reference cycle would keep device memory alive.
            has_images = started.model_input.images is not None
            forward = self.run_model if self._forward is None or has_images else self._forward
            launched = self._launch(started, forward(started.model_input))
        return None if launched is None else self._bring_back(launched)

    @torch.inference_mode()
    def sample_gated(self, masks: StepMasks) -> StepDone | PendingStep | None:
        """Sample the parked rows of a step under their masks. Returns None if that step parked none."""
        if (staged := self._staged.get(masks.step_id)) is not None:
            return PendingStep(staged, lambda _: wait_for(self.sample_gated(masks)))
        with nullcontext() if self._link is None else self._link.launch_section():
            launched = self._launch_gated(masks)
        return None if launched is None else self._bring_back(launched)

    def _begin_stages(self, pipeline: LeaderDecoder, started: StartedStep) -> PendingStep:
        step, step_id = started.model_input, started.plan.step_id
        staged = pipeline.begin(step.input_ids, step.positions, self.kv_caches, step.attn_metadata)
        self._staged[step_id] = staged

        @torch.inference_mode()
        def finish(_: list[np.ndarray]) -> StepDone | None:
            del self._staged[step_id]
            launched = self._launch(started, staged.hidden)
            return None if launched is None else wait_for(self._bring_back(launched))

        return PendingStep(staged, finish)

    def _start(self, plan: StepPlan) -> StartedStep | LaunchedStep:
        """Apply the plan and make the model's inputs; a step without live rows has its result at once."""
        start_time = time.perf_counter()
        self._apply(plan)
        self._fresh_rows = set()
        live, skipped = self._split_parked(plan) if self.parked_rows else (np.arange(len(plan.rows)), [])
        launched = LaunchedStep(plan.step_id, skipped=skipped, start_time=start_time)
        if self._states is not None and skipped:
            self._states.save_skipped(plan.saves, set(plan.rows[skipped].tolist()))
        if not len(live):
            return launched
        rows, starts, counts = plan.rows[live], plan.starts[live], plan.num_scheduled_tokens[live]
        model_input = self.batch.make_input(rows, starts, counts, self._place)
        started = StartedStep(plan, live, rows, starts, counts, model_input, launched)
        for part in self._parts:
            part.mark(started)
        return started

    def _launch(self, started: StartedStep, hidden: Tensor) -> LaunchedStep | None:
        """Sample the step. Returns None if every row waits for its mask."""
        plan, live, model_input, launched = started.plan, started.live, started.model_input, started.launched
        if self._drafter is not None:
            # Recorded graphs overwrite their hidden states in the next step.
            kept = hidden if self._forward is None else hidden.clone()
            self._drafter.observe(started.rows, started.starts, started.counts, kept)
        if self._prompt_logprobs:
            launched.prompt_logprobs = self._compute_prompt_logprobs(started, hidden)
        if self._pooler.rows:
            launched.pooled = self._pooler.pool(started, hidden)
        num_samples = plan.num_samples[live]
        is_sampled = num_samples > 0
        if not is_sampled.any():
            return launched
        runs = self._list_runs(plan, live[is_sampled])
        places = runs.spread(model_input.last_token_index[is_sampled])
        adapters = None if model_input.adapters is None else model_input.adapters.select_head(places)
        last = self._select(hidden, places)
        is_gated = plan.is_gated[live[is_sampled]]
        logits = self._compute_logits(last, adapters)
        if is_gated.all() and (masks := self.take_masks(plan.step_id, runs.indices)) is not None:
            self._late_rows.difference_update(runs.rows.tolist())
            launched.mask_time_s = masks.time_s
            self._sample(launched, runs, logits, masks.bitmask)
            return launched
        if is_gated.all():
            self._park(plan.step_id, ParkedRows(runs, logits, launched.start_time))
            if is_sampled.all() and not launched.skipped and not launched.prompt_logprobs:
                return None
            launched.is_last = False
            return launched
        if is_gated.any():
            is_parked = np.repeat(is_gated, runs.counts)
            parked_logits = self._select(logits, np.flatnonzero(is_parked))
            self._park(plan.step_id, ParkedRows(runs.select(is_gated), parked_logits, launched.start_time))
            launched.is_last = False
            runs, logits = runs.select(~is_gated), self._select(logits, np.flatnonzero(~is_parked))
        self._sample(launched, runs, logits)
        return launched

    def _launch_gated(self, masks: StepMasks) -> LaunchedStep | None:
        parked = self._parked.pop(masks.step_id, None)
        if parked is None:
            return None
        runs = parked.runs
        if self._late_rows:
            arrived = runs.rows[np.isin(runs.indices, masks.indices)].tolist()
            self._late_rows -= self._fresh_rows.intersection(arrived)
        launched = LaunchedStep(masks.step_id, start_time=parked.start_time, mask_time_s=masks.time_s)
        if np.array_equal(masks.indices, runs.indices):
            self.parked_rows.difference_update(runs.rows.tolist())
            self._sample(launched, runs, parked.logits, masks.bitmask)
            return launched
        is_ready, is_over = np.isin(runs.indices, masks.indices), np.isin(runs.indices, masks.ended)
        is_left = ~(is_ready | is_over)
        self.parked_rows.difference_update(runs.rows[~is_left].tolist())
        if is_left.any():
            launched.is_last = False
            rest = self._select(parked.logits, np.flatnonzero(np.repeat(is_left, runs.counts)))
            self._parked[masks.step_id] = ParkedRows(runs.select(is_left), rest, parked.start_time)
        # Masks of skipped rows are unused: those rows are not parked.
        is_used = np.isin(masks.indices, runs.indices)
        logits = self._select(parked.logits, np.flatnonzero(np.repeat(is_ready, runs.counts)))
        bitmask = masks.bitmask if is_used.all() else masks.bitmask[np.repeat(is_used, masks.counts)]
        self._sample(launched, runs.select(is_ready), logits, bitmask)
        return launched

    def _bring_back(self, launched: LaunchedStep) -> StepDone | PendingStep:
        tensors = launched.list_tensors()
        if self._link is None:
            return self._finish(launched, [tensor.cpu().numpy() for tensor in tensors])
        return PendingStep(self._link.fetch(tensors), partial(self._finish, launched))

    def _finish(self, launched: LaunchedStep, arrays: list[np.ndarray]) -> StepDone:
        """Make the StepDone, and propose drafts after its tokens."""
        # A step that was launched before the last one ended began when that one ended.
        launched.idle_s = max(0.0, launched.start_time - self._last_end)
        launched.start_time = max(launched.start_time, self._last_end)
        done = launched.finish(arrays)
        self._last_end = time.perf_counter()
        runs, drafter = launched.runs, self._drafter
        if self._states is not None and len(runs.draft_token_ids):
            self._states.settle(runs.rows, runs.ends - runs.counts + done.counts)
        if drafter is None or not len(runs.rows):
            return done
        self._settle(drafter, runs, done.counts)
        if runs.wanted is None:
            return done
        last = np.cumsum(done.counts) - 1
        is_asked = (runs.wanted > 0) & (done.token_ids[last] >= 0)
        if not is_asked.any():
            return done
        lengths = runs.ends - runs.counts + done.counts + 1
        found = drafter.propose(runs.rows[is_asked], lengths[is_asked], runs.wanted[is_asked])
        drafts = {
            index: drafts
            for index, drafts in zip(runs.indices[is_asked].tolist(), found, strict=True)
            if drafts
        }
        seconds, self._last_end = time.perf_counter() - self._last_end, time.perf_counter()
        return msgspec.structs.replace(done, drafts=drafts, draft_time_s=seconds)

    def _settle(self, drafter: Drafter, runs: SampleRuns, counts: np.ndarray) -> None:
        """Report the accepted drafts to the drafter."""
        if not len(runs.draft_token_ids):
            return
        end, lengths = 0, runs.ends - runs.counts + 1
        numbers = zip(
            runs.rows.tolist(), lengths.tolist(), (runs.counts - 1).tolist(), counts.tolist(), strict=True
        )
        for row, length, num_drafts, kept in numbers:
            end += num_drafts
            if num_drafts:
                drafter.settle(row, length, runs.draft_token_ids[end - num_drafts : end].tolist(), kept - 1)

    def _apply(self, plan: StepPlan) -> None:
        self._late_rows.difference_update(plan.removed_rows)
        for row in plan.removed_rows:
            self.state.remove(row)
            self._prompt_logprobs.pop(row, None)
            self._pooler.rows.pop(row, None)
            for part in self._parts:
                part.remove(row)
        self.batch.apply(plan)
        if self._drafter is not None:
            self._drafter.take_plan(plan)
        for new_row in plan.new_rows:
            self._add(new_row)

    def _add(self, new_row: NewRow) -> None:
        prompt = new_row.num_prompt_tokens
        self.state.add(
            new_row.row, new_row.params, new_row.seed, new_row.token_ids[:prompt], new_row.token_ids[prompt:],
            eos_token_ids=self._eos_token_ids, bad_word_ids=new_row.bad_word_ids,
        )
        if new_row.params.pooling is not None:
            self._pooler.add(new_row)
        for part in self._parts:
            part.add(new_row)
        self._prompt_logprobs.pop(new_row.row, None)
        if new_row.params.prompt_logprobs is not None:
            self._prompt_logprobs[new_row.row] = (prompt, new_row.params.prompt_logprobs)

    def _split_parked(self, plan: StepPlan) -> tuple[np.ndarray, list[int]]:
        """Return the indices of the rows that can be computed, and of those still parked."""
        is_parked = np.isin(plan.rows, np.fromiter(self.parked_rows, dtype=np.int64))
        self._late_rows.update(plan.rows[is_parked].tolist())
        return np.flatnonzero(~is_parked), np.flatnonzero(is_parked).tolist()

    def _list_runs(self, plan: StepPlan, indices: np.ndarray) -> SampleRuns:
        """Return the runs of the rows that sample, with all drafts of the step. `indices` are their places in it.

        Skipped rows have no drafts: their last token was not known when the step was planned.
        """
        ends = plan.starts[indices] + plan.num_scheduled_tokens[indices]
        wanted = None if plan.num_wanted is None else plan.num_wanted[indices]
        return SampleRuns(
            indices, plan.rows[indices], ends, plan.num_samples[indices], plan.draft_token_ids, wanted
        )

    def _park(self, step_id: int, parked: ParkedRows) -> None:
        self._parked[step_id] = parked
        self._fresh_rows = set(parked.runs.rows.tolist())
        self.parked_rows |= self._fresh_rows

    def _sample(
        self, launched: LaunchedStep, runs: SampleRuns, logits: Tensor, bitmask: np.ndarray | None = None
    ) -> None:
        """Sample every position of these rows, if any, and keep the tokens."""
        if len(runs.rows):
            sampled = sample_runs(self.sampler, runs, logits, bitmask)
            self.batch.append(runs.flat_rows, runs.spread(runs.ends), sampled.token_ids)  # for the next step
            launched.runs, launched.sampled = runs, sampled

    def _compute_prompt_logprobs(self, step: StartedStep, hidden: Tensor) -> dict[int, SampledLogprobs]:
        """Return logprobs of the token after each computed prompt position, for rows with `prompt_logprobs`."""
        found, adapters = {}, step.model_input.adapters
        for row, index, start, count, first in step.list_runs():
            if row not in self._prompt_logprobs:
                continue
            prompt, num_top = self._prompt_logprobs[row]
            count = min(count, prompt - 1 - start)
            if count > 0:
                head = None if adapters is None else adapters.select_head(np.arange(first, first + count))
                logits = self._compute_logits(hidden[first : first + count], head)
                next_ids = self.batch.token_ids(row, start + 1, start + 1 + count).to(logits.device)
                found[index] = compute_prompt_logprobs(logits, next_ids, num_top)
        return found

    def _compute_logits(self, hidden: Tensor, adapters: StepAdapters | None) -> Tensor:
        """Return the logits where tokens are drawn: on the model's device, or on the host."""
        return self.model.compute_logits(hidden, adapters).to(self.state.device)

    def _select(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        if len(index) == len(tensor):
            return tensor
        return tensor.index_select(0, upload(index, tensor.device))
