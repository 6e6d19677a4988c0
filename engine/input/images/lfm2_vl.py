"""The image processor of LFM2-VL: a large image is cut into tiles, and a small copy of it follows them.

That of transformers needs torchvision; this one resizes with PIL, whose pixels differ from it by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.model.vision.encoder import read_processor

_DEFAULTS = {
    "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True,
    "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512,
    "max_pixels_tolerance": 2.0,
}


class Processor:
    """Prepares images as transformers does, and writes the text that stands for one.

    Attributes:
        slot, whole_size: see `engine.input.images.intake.Processor`.
    """

    slot, whole_size = "<image>", 0

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        given = read_processor(folder)
        self._settings: dict[str, Any] = {name: given.get(name, value) for name, value in _DEFAULTS.items()}
        if not config.get("use_image_special_tokens", True):
            raise ValueError("use_image_special_tokens=False is not supported")
        self._side = self._settings["encoder_patch_size"] * self._settings["downsample_factor"]  # pixels of a feature

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """Return the patches, [n, 3, numbers] uint8, and the grid: see the tower."""
        settings, tile = self._settings, self._settings["tile_size"]
        num_rows, num_columns = self._choose_tiles(*image.size)
        width, height = self._fit(*image.size)
        parts = []
        if num_rows:
            large = np.asarray(image.resize((num_columns * tile, num_rows * tile), Image.Resampling.BILINEAR))
            rows = np.split(large, num_rows)
            parts = [self._cut(part) for row in rows for part in np.split(row, num_columns, axis=1)]
        if num_rows and not settings["use_thumbnail"]:
            width = height = 0
        else:
            parts.append(self._cut(np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))))
        sizes = (tile, tile, height, width)
        return np.concatenate(parts), [num_rows, num_columns, *(size // self._side for size in sizes)]

    def write(self, grid: Sequence[int]) -> str:
        """Return the text of an image in a prompt, with the slot for each feature."""
        num_rows, num_columns, *sizes = grid
        tile, small = self.slot * (sizes[0] * sizes[1]), self.slot * (sizes[2] * sizes[3])
        tiles = [
            f"<|img_row_{row}_col_{column}|>{tile}"
            for row in range(1, num_rows + 1)
            for column in range(1, num_columns + 1)
        ]
        mark = "<|img_thumbnail|>" if tiles and small else ""
        return f"<|image_start|>{''.join(tiles)}{mark}{small}<|image_end|>"

    def _cut(self, pixels: np.ndarray) -> np.ndarray:
        """Return the patches of pixels [H, W, 3], row by row."""
        size = self._settings["encoder_patch_size"]
        height, width = pixels.shape[0] // size, pixels.shape[1] // size
        patches = pixels.reshape(height, size, width, size, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(patches.reshape(height * width, 3, size * size))

    def _choose_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tiles whose shape is closest; (0, 0) for an image that is not cut."""
        settings, side = self._settings, self._side
        least, most = settings["min_tiles"], settings["max_tiles"]
        area = math.prod(max(settings["encoder_patch_size"], round(length / side) * side) for length in (width, height))
        is_large = area > settings["max_image_tokens"] * side**2 * settings["max_pixels_tolerance"]
        if not (settings["do_image_splitting"] and is_large and (least, most) != (1, 1)):
            return 0, 0
        grids = [(n, m) for n in range(1, most + 1) for m in range(1, most + 1) if least <= n * m <= most]
        grids.sort(key=math.prod)
        best = min(grids, key=lambda grid: abs(width / height - grid[1] / grid[0]))
        for grid in grids:  # of several with the same shape, the largest that the image fills
            is_equal = grid[0] * best[1] == grid[1] * best[0]
            if is_equal and width * height > 0.5 * settings["tile_size"] ** 2 * math.prod(grid):
                best = grid
        return best

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the small copy: about the same shape, in whole features, not too many and not too few."""
        side = self._side
        least, most = (self._settings[f"{name}_image_tokens"] * side**2 for name in ("min", "max"))
        found = [max(side, round(length / side) * side) for length in (width, height)]
        if math.prod(found) > most:
            scale = math.sqrt(width * height / most)
            found = [max(side, math.floor(length / scale / side) * side) for length in (width, height)]
        elif math.prod(found) < least:
            scale = math.sqrt(least / (width * height))
            found = [math.ceil(length * scale / side) * side for length in (width, height)]
        return found[0], found[1]
