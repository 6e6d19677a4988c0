"""ModelRunner: turns a step plan into a forward pass and sampled tokens.

    apply changes ─▶ forward ─▶ sample plain rows ─▶ answer
                                  gated rows ─▶ parked until their masks come (SampleGate) ─▶ answer

A row whose last token is still parked cannot be computed; it is skipped and the scheduler plans it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.messages import NewRow, SampleGate, StepDone, StepPlan
from engine.model import DecoderModel
from engine.worker.device_link import DeviceLink, HostLink, PendingStep
from engine.worker.fused_head import FusedHead
from engine.worker.input_batch import InputBatch, ModelInput
from engine.worker.launched_step import LaunchedStep
from engine.worker.prefix_groups import PrefixGroups
from engine.worker.sampling.logprobs import SampledLogprobs, compute_prompt_logprobs
from engine.worker.sampling.sampler import SampledTokens, Sampler
from engine.worker.sampling.state import SamplingState
from engine.worker.sampling.transfer import upload


@dataclass(slots=True)
class ParkedRows:
    """Gated rows of one step, waiting for their masks. Arrays are [M], logits [M, V] float32."""

    indices: np.ndarray  # in the step
    rows: np.ndarray
    positions: np.ndarray
    logits: Tensor


class ModelRunner:
    """Runs steps on one model; not thread-safe, one thread owns it.

    Args:
        link: how results come back; default: the CPU's.
        forward: runs a step through the model; default: plainly.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: list[tuple[Tensor, Tensor]],
        batch: InputBatch,
        state: SamplingState,
        eos_token_ids: tuple[int, ...],
        link: DeviceLink | None = None,
        forward: Callable[[ModelInput], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.batch = batch
        self.state = state
        self.sampler = Sampler(state)
        self._head = FusedHead(model, state)
        self._groups = None
        if model.ops.share_prefixes:
            self._groups = PrefixGroups.of_cache(batch, kv_caches[0], model.config.num_attention_heads)
        self._eos_token_ids = eos_token_ids
        self._link = link or HostLink()
        self._forward = forward
        self._parked: dict[int, ParkedRows] = {}
        self._parked_rows: set[int] = set()
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # row -> (prompt length, k)

    def run_model(self, step: ModelInput) -> Tensor:
        """The plain way through the model: [T, D]."""
        return self.model(step.input_ids, step.positions, self.kv_caches, step.attn_metadata)

    @property
    def has_parked(self) -> bool:
        return bool(self._parked_rows)

    def can_run(self, plan: StepPlan) -> bool:
        """Whether any row of the plan can be computed now; if not, waiting for a gate costs nobody anything."""
        return any(row not in self._parked_rows for row in plan.rows.tolist())

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        """Launch one step; None when every row waits for its mask and the gate's answer will be the only one."""
        with self._link.launch_section():
            launched = self._launch(plan)
        return None if launched is None else self._bring_back(launched)

    @torch.inference_mode()
    def sample_gated(self, gate: SampleGate) -> StepDone | PendingStep | None:
        """Sample the parked rows of a step under their masks; None when that step parked none."""
        with self._link.launch_section():
            launched = self._launch_gated(gate)
        return None if launched is None else self._bring_back(launched)

    def _launch(self, plan: StepPlan) -> LaunchedStep | None:
        self._apply(plan)
        live, skipped = self._split_parked(plan)
        launched = LaunchedStep(plan.step_id, skipped=skipped)
        if not len(live):
            return launched
        rows, starts = plan.rows[live], plan.starts[live]
        counts = plan.num_scheduled_tokens[live]
        model_input = self.batch.make_input(rows, starts, counts)
        if self._groups is not None:
            model_input = self._groups.mark(model_input, rows, starts, counts)
        # A method of its own kept here would be a cycle, and the rows outlive the runner.
        hidden = self.run_model(model_input) if self._forward is None else self._forward(model_input)
        launched.prompt_logprobs = self._compute_prompt_logprobs(live, rows, starts, counts, hidden)
        sampled, gated = plan.is_sampled[live], plan.is_gated[live]
        if not sampled.any():
            return launched
        picked = np.flatnonzero(sampled)
        if not gated[picked].any() and self._head.takes(rows[picked]):
            last = self._select(hidden, model_input.last_token_index[picked])
            tokens = self._head.sample(last, rows[picked], (starts + counts)[picked])
            self._keep(launched, live[picked], rows[picked], (starts + counts)[picked], tokens)
            return launched
        logits = self.model.compute_logits(self._select(hidden, model_input.last_token_index[picked]))
        is_plain = ~gated[picked]
        if not is_plain.all():
            parked = np.flatnonzero(~is_plain)
            self._park(
                plan.step_id, live, rows, starts + counts, picked[parked], self._select(logits, parked)
            )
            if not is_plain.any() and not skipped and not launched.prompt_logprobs and bool(sampled.all()):
                return None
            logits = self._select(logits, np.flatnonzero(is_plain))
            picked = picked[is_plain]
        launched.is_last = bool(is_plain.all())
        self._sample(launched, live[picked], rows[picked], (starts + counts)[picked], logits)
        return launched

    def _launch_gated(self, gate: SampleGate) -> LaunchedStep | None:
        parked = self._parked.pop(gate.step_id, None)
        if parked is None:
            return None
        self._parked_rows.difference_update(parked.rows.tolist())
        place = {index: at for at, index in enumerate(parked.indices.tolist())}
        mask_rows = np.array(
            [at for at, index in enumerate(gate.indices.tolist()) if index in place], dtype=np.int64
        )
        kept = np.array([place[index] for index in gate.indices[mask_rows].tolist()], dtype=np.int64)
        launched = LaunchedStep(gate.step_id)
        if len(kept):
            self._sample(
                launched,
                parked.indices[kept],
                parked.rows[kept],
                parked.positions[kept],
                self._select(parked.logits, kept),
                np.ascontiguousarray(gate.bitmask[mask_rows]),
            )
        return launched

    def _bring_back(self, launched: LaunchedStep) -> StepDone | PendingStep:
        pending = PendingStep(self._link.fetch(launched.list_tensors()), launched.finish)
        return pending.wait() if self._link.is_immediate else pending

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.removed_rows:
            self.state.remove(row)
            self._prompt_logprobs.pop(row, None)
        self.batch.apply(plan)
        for new_row in plan.new_rows:
            self._add(new_row)

    def _add(self, new_row: NewRow) -> None:
        prompt = new_row.num_prompt_tokens
        self.state.add(
            new_row.row,
            new_row.params,
            new_row.seed,
            new_row.token_ids[:prompt],
            new_row.token_ids[prompt:],
            eos_token_ids=self._eos_token_ids,
            bad_word_ids=new_row.bad_word_ids,
        )
        self._prompt_logprobs.pop(new_row.row, None)
        if new_row.params.prompt_logprobs is not None:
            self._prompt_logprobs[new_row.row] = (prompt, new_row.params.prompt_logprobs)

    def _split_parked(self, plan: StepPlan) -> tuple[np.ndarray, tuple[int, ...]]:
        """Indices of the rows that can be computed, and of those that cannot yet."""
        if not self._parked_rows:
            return np.arange(len(plan.rows)), ()
        is_parked = np.isin(plan.rows, np.fromiter(self._parked_rows, dtype=np.int64))
        return np.flatnonzero(~is_parked), tuple(np.flatnonzero(is_parked).tolist())

    def _park(
        self,
        step_id: int,
        live: np.ndarray,
        rows: np.ndarray,
        ends: np.ndarray,
        picked: np.ndarray,
        logits: Tensor,
    ) -> None:
        self._parked[step_id] = ParkedRows(live[picked], rows[picked], ends[picked], logits)
        self._parked_rows.update(rows[picked].tolist())

    def _sample(
        self,
        launched: LaunchedStep,
        indices: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        logits: Tensor,
        bitmask: np.ndarray | None = None,
    ) -> None:
        """Sample one token a row; `positions` are where the new tokens will stand."""
        if not len(rows):
            return
        sampled = self.sampler.sample(logits, rows, positions, bitmask)
        self._keep(launched, indices, rows, positions, sampled)

    def _keep(
        self,
        launched: LaunchedStep,
        indices: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        sampled: SampledTokens,
    ) -> None:
        """Put the tokens where the next step finds them, and into the answer."""
        self.batch.append(rows, positions, sampled.token_ids)
        launched.indices, launched.sampled = indices, sampled

    def _compute_prompt_logprobs(
        self, live: np.ndarray, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, hidden: Tensor
    ) -> dict[int, SampledLogprobs]:
        """Logprobs of the prompt tokens that follow each computed prompt position, for the rows that asked."""
        if not self._prompt_logprobs:
            return {}
        found = {}
        bounds = np.concatenate(([0], np.cumsum(counts)))
        for at, row in enumerate(rows.tolist()):
            if row not in self._prompt_logprobs:
                continue
            prompt, num_top = self._prompt_logprobs[row]
            start = int(starts[at])
            count = min(int(counts[at]), prompt - 1 - start)
            if count > 0:
                logits = self.model.compute_logits(hidden[int(bounds[at]) : int(bounds[at]) + count])
                next_ids = self.batch.token_ids(row, start + 1, start + 1 + count)
                found[int(live[at])] = compute_prompt_logprobs(logits, next_ids, num_top)
        return found

    def _select(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        if len(index) == len(tensor):
            return tensor
        return tensor.index_select(0, upload(index, tensor.device))
