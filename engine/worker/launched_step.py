"""LaunchedStep: what a step left on the device, and how it becomes the answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.messages import StepDone
from engine.outputs import TokenLogprobs
from engine.worker.sampling.drafts import SampleRuns
from engine.worker.sampling.logprobs import SampledLogprobs
from engine.worker.sampling.sampler import SampledTokens


@dataclass(slots=True)
class LaunchedStep:
    """One step, or the gated rows of one. Nothing here has been waited for."""

    step_id: int
    is_last: bool = True
    skipped: list[int] = field(default_factory=list)
    runs: SampleRuns | None = None  # of the sampled rows
    sampled: SampledTokens | None = None
    prompt_logprobs: dict[int, SampledLogprobs] = field(default_factory=dict)  # by index in the step

    def list_tensors(self) -> list[Tensor]:
        """What `finish` wants on the host, in this order."""
        tensors = [found.packed for found in self.prompt_logprobs.values()]
        if self.sampled is not None:
            tensors.append(self.sampled.token_ids)
            tensors += [found.packed for found in self.sampled.logprobs]
        return tensors

    def finish(self, arrays: list[np.ndarray]) -> StepDone:
        """Make the answer of the tensors' values."""
        values = iter(arrays)
        prompt_logprobs = {}
        for index, found in self.prompt_logprobs.items():
            by_place = found.to_lists(next(values))
            prompt_logprobs[index] = [by_place[place] for place in range(len(by_place))]
        if self.sampled is None or self.runs is None:
            nothing = np.zeros(0, dtype=np.int64)
            return StepDone(
                self.step_id,
                nothing,
                nothing,
                nothing,
                self.is_last,
                prompt_logprobs=prompt_logprobs,
                skipped=self.skipped,
            )
        token_ids = next(values)
        counts, is_kept = self.runs.verify(token_ids)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for part in self.sampled.logprobs:
            for place, entry in part.to_lists(next(values)).items():
                if is_kept[place]:
                    logprobs.setdefault(self.runs.index_of(place), []).append(entry)
        return StepDone(
            self.step_id,
            self.runs.indices,
            counts,
            token_ids[is_kept],
            self.is_last,
            logprobs,
            prompt_logprobs,
            self.skipped,
        )
