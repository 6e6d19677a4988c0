"""VisionSpec: how a model sees images, as far as its config.json says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VisionKind = Literal["gemma3", "idefics3", "lfm2_vl", "pixtral", "qwen_vl"]


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """Which code encodes images.

    Attributes:
        kind: module of this package with the tower, and of `engine.input.images` with the processor.
        image_token_id: token in a prompt that a feature of an image replaces.
        config: the whole config.json as text, for transformers' classes.
        weight_prefix: of the tower's weights in the checkpoint.
    """

    kind: VisionKind
    image_token_id: int
    config: str
    weight_prefix: str = "model."
