"""The image processor of Idefics3 and SmolVLM: an image is cut into tiles, and a small copy of it follows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

_CLASSES = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}


class Processor:
    """Prepares images as transformers does, and writes the text that stands for one.

    Attributes:
        slot, whole_size: see `engine.input.images.intake.Processor`.
    """

    slot, whole_size = "<image>", 0

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        found: Any = _CLASSES[config["model_type"]].from_pretrained(folder, local_files_only=True)
        self._processor = found
        self._patch_size = config["vision_config"]["patch_size"] * config.get("scale_factor", 2)

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """Return the tiles, [n, 3, H, W] uint8, and their grid: rows, columns, tokens of one tile."""
        # The encoder normalises: bytes need a quarter of the memory.
        prepared = self._processor(
            [image], do_rescale=False, do_normalize=False, do_pad=False, return_row_col_info=True
        )
        tiles = np.stack(prepared["pixel_values"][0])
        height, width = tiles.shape[-2:]
        num_tokens = (height // self._patch_size) * (width // self._patch_size)
        return tiles, [prepared["rows"][0][0], prepared["cols"][0][0], num_tokens]

    def write(self, grid: Sequence[int]) -> str:
        """Return the text of an image in a prompt, with the slot for each feature."""
        num_rows, num_columns, num_tokens = grid
        fake, tile = "<fake_token_around_image>", self.slot * num_tokens
        rows = [
            "".join(f"{fake}<row_{row}_col_{column}>{tile}" for column in range(1, num_columns + 1)) + "\n"
            for row in range(1, num_rows + 1)
        ]
        return "".join(rows) + "\n" * bool(rows) + f"{fake}<global-img>{tile}{fake}"
