"""The vision tower of LFM2-VL: SigLIP 2 over tiles and a small copy of an image; features are merged in squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlMultiModalProjector
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel


class Tower(nn.Module):
    """Names of its weights are those of the checkpoint without the prefix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower = Siglip2VisionModel._from_config(config.vision_config)
        self.multi_modal_projector = Lfm2VlMultiModalProjector(config)
        self._factor = config.downsample_factor

    def forward(self, pixels: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the features of an image's tiles and of its small copy, one after another, [features, D].

        Args:
            pixels: [patches, 3, numbers of a patch], normalised.
            grid: rows and columns of tiles; rows and columns of features in a tile, and in the small copy.
        """
        patches, found = pixels.transpose(1, 2).flatten(1), []
        sizes = [grid[2:4]] * (grid[0] * grid[1]) + [grid[4:6]] * bool(grid[4])
        for num_rows, num_columns in [(rows * self._factor, columns * self._factor) for rows, columns in sizes]:
            part, patches = patches.tensor_split([num_rows * num_columns])
            shape = torch.tensor([[num_rows, num_columns]])
            mask = torch.ones(1, len(part), dtype=torch.int32, device=part.device)
            states = self.vision_tower(part[None], pixel_attention_mask=mask, spatial_shapes=shape).last_hidden_state
            found.append(self.multi_modal_projector(states.unflatten(1, (num_rows, num_columns))).flatten(0, 2))
        return torch.cat(found)
