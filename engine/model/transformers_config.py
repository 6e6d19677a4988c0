"""TransformersConfig: a ModelConfig for a model that runs on transformers' own code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """The sizes of the model, as far as the engine needs them, and the objects to build it from.

    `head_dim` and the numbers of heads are the largest of all layers.
    """

    num_parameters: int = 0
    source: Any = None  # transformers' config
    skeleton: Any = field(
        default=None, compare=False, repr=False
    )  # engine.model.transformers_backend.Skeleton
    notices: tuple[str, ...] = ()  # log messages about limits of the backend
