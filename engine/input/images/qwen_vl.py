"""The image processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image keeps its shape and is cut into patches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

# Larger images are scaled down to this. The model's own limit of 16 megapixels means 65,536 patches, which attend to
# each other: minutes on a GPU's worth of work that one request could demand.
MAX_PIXELS = 2**22


class Processor:
    """Prepares images as transformers does, and writes the text that stands for one.

    Attributes:
        slot, whole_size: see `engine.input.images.intake.Processor`.
    """

    slot, whole_size = "<|vision_start|><|image_pad|><|vision_end|>", 0

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        found: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        size = {"shortest_edge": found.size["shortest_edge"]}
        self._options = {"size": size | {"longest_edge": min(MAX_PIXELS, found.size["longest_edge"])}}
        self._processor = found

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """Return the patches, [n, 3, numbers] uint8, and the rows and columns of features."""
        processor = self._processor
        prepared = processor([image], do_rescale=False, do_normalize=False, **self._options)
        # All frames of a patch are equal; the tower repeats the first one.
        frames = prepared["pixel_values"].reshape(
            len(prepared["pixel_values"]), 3, processor.temporal_patch_size, -1
        )
        _, rows, columns = prepared["image_grid_thw"][0].tolist()
        return frames[:, :, 0].astype(np.uint8), [
            rows // processor.merge_size,
            columns // processor.merge_size,
        ]

    def write(self, grid: Sequence[int]) -> str:
        """Return the text of an image in a prompt, with a token for each feature."""
        return "<|image_pad|>" * (grid[0] * grid[1])
