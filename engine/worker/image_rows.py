"""ImageRows: the features of images by row of the batch, and which of them a step needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.messages import NewRow
from engine.model.vision.step_images import StepImages
from engine.worker.input_batch import ModelInput
from engine.worker.sampling.transfer import upload


class ImageRows:
    """The worker's images. A row keeps its features until its last image is computed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._by_row: dict[int, tuple[np.ndarray, Tensor]] = {}  # places in the prompt, features

    def add(self, new_row: NewRow) -> None:
        """Take the images of a new row."""
        self.remove(new_row.row)
        if new_row.images:
            places = np.concatenate([image.places for image in new_row.images])
            found = [image.features for image in new_row.images if image.features is not None]
            features = upload(np.concatenate(found), self._device).to(self._dtype)
            assert len(places) == len(features), "every image is encoded before its request is scheduled"
            self._by_row[new_row.row] = (places, features)

    def remove(self, row: int) -> None:
        self._by_row.pop(row, None)

    def mark(self, step: ModelInput, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> ModelInput:
        """Return the step with its images; a step without any is left as it is."""
        if not self._by_row:
            return step
        places, features = [], []
        firsts = np.cumsum(counts) - counts
        numbers = zip(rows.tolist(), starts.tolist(), counts.tolist(), firsts.tolist(), strict=True)
        for row, start, count, first in numbers:
            if (found := self._by_row.get(row)) is None:
                continue
            begin, end = np.searchsorted(found[0], (start, start + count)).tolist()
            if begin < end:
                places.append(found[0][begin:end] - start + first)
                features.append(found[1][begin:end])
            if start + count > found[0][-1]:
                self.remove(row)
        if not places:
            return step
        index = upload(np.concatenate(places), self._device)
        return replace(step, images=StepImages(index, torch.cat(features)))
