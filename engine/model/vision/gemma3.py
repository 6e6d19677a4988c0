"""The vision tower of Gemma 3: SigLIP over an image of one size, then means of squares and a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
from transformers.models.siglip.modeling_siglip import SiglipVisionModel


class Tower(nn.Module):
    """Names of its weights are those of the checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = SiglipVisionModel._from_config(config.vision_config)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def forward(self, pixels: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the features of an image, [rows * columns, D].

        Args:
            pixels: [1, 3, height, width], normalised.
            grid: rows and columns of features.
        """
        states = self.vision_tower(pixel_values=pixels).last_hidden_state
        return self.multi_modal_projector(states)[0]  # type: ignore[no-any-return]
