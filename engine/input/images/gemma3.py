"""The image processor of Gemma 3: every image becomes a square of one size, whose tokens attend to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil


class Processor:
    """Prepares images as transformers does without crops, and writes the text that stands for one.

    Attributes:
        slot, whole_size: see `engine.input.images.intake.Processor`.
    """

    slot = "<start_of_image>"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._processor: Any = Gemma3ImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self.whole_size = config.get("mm_tokens_per_image", 256)

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """Return the pixels, [1, 3, H, W] uint8, and the rows and columns of features."""
        prepared = self._processor([image], do_rescale=False, do_normalize=False, do_pan_and_scan=False)
        return np.stack(prepared["pixel_values"]).astype(np.uint8), [math.isqrt(self.whole_size)] * 2

    def write(self, grid: Sequence[int]) -> str:
        """Return the text of an image in a prompt, with a token for each feature."""
        return f"\n\n{self.slot}{'<image_soft_token>' * (grid[0] * grid[1])}<end_of_image>\n\n"
