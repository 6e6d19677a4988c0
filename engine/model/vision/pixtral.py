"""The vision tower of Mistral 3: Pixtral over patches of an image of any size, which are merged in squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel


class Tower(nn.Module):
    """Names of its weights are those of the checkpoint."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = PixtralVisionModel._from_config(config.vision_config)
        self.multi_modal_projector = Mistral3MultiModalProjector(config)
        layers = config.vision_feature_layer
        self._layers = [layers] if isinstance(layers, int) else layers

    def forward(self, pixels: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the features of an image, [rows * columns, D].

        Args:
            pixels: [1, 3, height, width], normalised.
            grid: rows and columns of features.
        """
        size = [tuple(pixels.shape[-2:])]
        states = self.vision_tower(pixels, image_sizes=size, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in self._layers], dim=-1)[0]
        return self.multi_modal_projector(features, torch.tensor(size))  # type: ignore[no-any-return]
