"""StepImages: the features of images whose tokens a step computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepImages:
    """Features in the place of the embeddings of M tokens."""

    places: Tensor  # [M] int64, index of each token in the step
    features: Tensor  # [M, D * (1 + k)], dtype of the model: embeddings, and what k first layers add to their outputs
