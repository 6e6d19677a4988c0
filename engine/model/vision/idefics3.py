"""The vision tower of Idefics3 and SmolVLM: SigLIP over tiles of one size, then pixel shuffle and a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

_CLASSES: dict[str, tuple[Any, Any]] = {
    "idefics3": (Idefics3VisionTransformer, Idefics3Connector),
    "smolvlm": (SmolVLMVisionTransformer, SmolVLMConnector),
}


class Tower(nn.Module):
    """Names of its weights are those of the checkpoint without the prefix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        transformer, connector = _CLASSES[config.model_type]
        self.vision_model = transformer._from_config(config.vision_config)
        self.connector = connector(config)

    def forward(self, pixels: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the features of the image's tiles, one after another.

        Args:
            pixels: [tiles, 3, height, width], normalised.

        Returns [tiles * tokens of a tile, D].
        """
        # One tile at a time bounds the memory, and the result depends on no other tile.
        found = [self.connector(self.vision_model(tile).last_hidden_state)[0] for tile in pixels.split(1)]
        return torch.cat(found)
