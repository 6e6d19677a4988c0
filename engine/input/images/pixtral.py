"""The image processor of Mistral 3: an image keeps its shape; its rows end with a token of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil


class Processor:
    """Prepares images as transformers does, and writes the text that stands for one.

    Attributes:
        slot, whole_size: see `engine.input.images.intake.Processor`.
    """

    slot, whole_size = "[IMG]", 0

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._processor: Any = PixtralImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self._size = config["vision_config"].get("patch_size", 14) * config.get("spatial_merge_size", 2)

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """Return the pixels, [1, 3, H, W] uint8, and the rows and columns of features."""
        patch = {"height": self._size, "width": self._size}
        prepared = self._processor([image], do_rescale=False, do_normalize=False, do_pad=False, patch_size=patch)
        pixels = np.stack(prepared["pixel_values"]).astype(np.uint8)
        return pixels, [pixels.shape[-2] // self._size, pixels.shape[-1] // self._size]

    def write(self, grid: Sequence[int]) -> str:
        """Return the text of an image in a prompt, with the slot for each feature."""
        return "[IMG_BREAK]".join([self.slot * grid[1]] * grid[0]) + "[IMG_END]"
