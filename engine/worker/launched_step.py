"""The stages of a step on the device: StartedStep, LaunchedStep, and ParkedRows, which wait for their masks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import NewRow, StepDone, StepPlan
from engine.outputs import TokenLogprobs
from engine.worker.input_batch import ModelInput
from engine.worker.sampling.drafts import SampleRuns
from engine.worker.sampling.logprobs import SampledLogprobs
from engine.worker.sampling.sampler import SampledTokens

# Values of a step in which no row samples.
NO_RUNS = SampleRuns(*[np.zeros(0, dtype=np.int64)] * 5)
_get_packed = attrgetter("packed")
NO_TOKENS = SampledTokens(torch.zeros(0, dtype=torch.int64))


@dataclass(slots=True)
class LaunchedStep:
    """Results of a step, or of its gated rows, that may still be being computed on the device."""

    step_id: int
    is_last: bool = True
    skipped: list[int] = field(default_factory=list)
    runs: SampleRuns = NO_RUNS  # how the sampled rows are laid out
    sampled: SampledTokens = NO_TOKENS
    prompt_logprobs: dict[int, SampledLogprobs] = field(default_factory=dict)  # by index in the step
    start_time: float = 0.0
    idle_s: float = 0.0
    mask_time_s: float = 0.0
    pooled: dict[int, Tensor] = field(default_factory=dict)  # by index in the step

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors whose values `finish` takes, in the same order."""
        logprobs = map(_get_packed, (*self.prompt_logprobs.values(), *self.sampled.logprobs))
        return [self.sampled.token_ids, *logprobs, *self.pooled.values()]

    def finish(self, arrays: list[np.ndarray]) -> StepDone:
        token_ids, *packed = arrays
        values = iter(packed)
        prompt_logprobs = {}
        for index, found in self.prompt_logprobs.items():
            prompt_logprobs[index] = list(found.to_lists(next(values)).values())
        counts, is_kept = self.runs.verify(token_ids)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for part in self.sampled.logprobs:
            for place, entry in part.to_lists(next(values)).items():
                if is_kept[place]:
                    logprobs.setdefault(self.runs.index_of(place), []).append(entry)
        return StepDone(
            *(self.step_id, self.runs.indices, counts, token_ids[is_kept]),
            *(self.is_last, logprobs, prompt_logprobs, self.skipped),
            time_s=time.perf_counter() - self.start_time, idle_s=self.idle_s, mask_time_s=self.mask_time_s,
            pooled=dict(zip(self.pooled, values, strict=True)),
        )


@dataclass(slots=True)
class StartedStep:
    """A step whose hidden states are computed. Arrays are [R]: one entry for each row that runs."""

    plan: StepPlan
    live: np.ndarray  # indices in the plan
    rows: np.ndarray
    starts: np.ndarray  # first position of the row's run
    counts: np.ndarray  # its tokens
    model_input: ModelInput
    launched: LaunchedStep

    def list_runs(self) -> Iterable[tuple[int, int, int, int, int]]:
        """Return (row, index in the plan, first position, number of tokens, place of the first among all) of each."""
        arrays = (self.rows, self.live, self.starts, self.counts, np.cumsum(self.counts) - self.counts)
        return zip(*(each.tolist() for each in arrays), strict=True)


class RowPart(Protocol):
    """What some models keep for each row beside tokens and blocks: an adapter, images, states."""

    def add(self, new_row: NewRow) -> None:
        """Take over what a row of the batch brings along; what another request left there is gone."""

    def remove(self, row: int) -> None:
        """Forget a row, if it is known."""

    def mark(self, step: StartedStep) -> None:
        """Add to the model's input what the step's rows need. A step without any is left as it is."""


@dataclass(slots=True)
class ParkedRows:
    """Gated rows of one step, waiting for their masks."""

    runs: SampleRuns
    logits: Tensor  # [positions, V] float32
    start_time: float
