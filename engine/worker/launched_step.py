"""LaunchedStep: what a step left on the device, and how it becomes the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.messages import StepDone
from engine.worker.sampling.logprobs import SampledLogprobs
from engine.worker.sampling.sampler import SampledTokens


@dataclass(slots=True)
class LaunchedStep:
    """One step, or the gated rows of one. Nothing here has been waited for."""

    step_id: int
    is_last: bool = True
    skipped: tuple[int, ...] = ()
    indices: np.ndarray | None = None  # [R] in the step, of the sampled rows
    sampled: SampledTokens | None = None
    prompt_logprobs: dict[int, SampledLogprobs] = field(default_factory=dict)  # by index in the step

    def list_tensors(self) -> list[Tensor]:
        """What `finish` wants on the host, in this order."""
        tensors = [found.packed for found in self.prompt_logprobs.values()]
        if self.sampled is not None:
            tensors.append(self.sampled.token_ids)
            if self.sampled.logprobs is not None:
                tensors.append(self.sampled.logprobs.packed)
        return tensors

    def finish(self, arrays: list[np.ndarray]) -> StepDone:
        """Make the answer of the tensors' values."""
        values = iter(arrays)
        prompt_logprobs = {}
        for index, found in self.prompt_logprobs.items():
            by_place = found.to_lists(next(values))
            prompt_logprobs[index] = [by_place[place] for place in range(len(by_place))]
        if self.sampled is None or self.indices is None:
            return StepDone(
                self.step_id, [], [], self.is_last, prompt_logprobs=prompt_logprobs, skipped=self.skipped
            )
        token_ids, logprobs = next(values).tolist(), {}
        if self.sampled.logprobs is not None:
            by_row = self.sampled.logprobs.to_lists(next(values))
            logprobs = {int(self.indices[at]): entries for at, entries in by_row.items()}
        return StepDone(
            self.step_id,
            self.indices.tolist(),
            token_ids,
            self.is_last,
            logprobs,
            prompt_logprobs,
            self.skipped,
        )
