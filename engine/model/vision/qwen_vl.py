"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of an image of any size.

Qwen2.5-VL attends in windows; Qwen3-VL gives features of several depths (deepstack).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

_CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
}


class Tower(nn.Module):
    """Names of its weights are those of the checkpoint without the prefix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.visual: Any = _CLASSES[config.model_type]._from_config(config.vision_config)
        self._merge_size = config.vision_config.spatial_merge_size
        self._num_frames = config.vision_config.temporal_patch_size

    def forward(self, pixels: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the features of an image.

        Args:
            pixels: [patches, 3, numbers of a patch], normalised.
            grid: rows and columns of features.

        Returns [rows * columns, D * (1 + number of deep features)].
        """
        # An image is a film of equal frames.
        frames = pixels.unsqueeze(2).expand(-1, -1, self._num_frames, -1).flatten(1)
        size = torch.tensor([[1, *(count * self._merge_size for count in grid)]], device=pixels.device)
        found = self.visual(frames, grid_thw=size)
        return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=-1)
