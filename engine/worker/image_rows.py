"""ImageRows: the features of images by row of the batch, and which of them a step needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.core.actor_messages import NewRow
from engine.messages import ImagePart
from engine.model.attn_metadata import ImageSpan, StepImages
from engine.worker.launched_step import StartedStep
from kernels.upload import upload


@dataclass(frozen=True, slots=True)
class RowPositions:
    """Positions of a row's tokens on the three axes of a model whose images have rows and columns."""

    first: np.ndarray  # [3, n], of the tokens up to the last image
    shift: int  # added to the index of a later token

    @staticmethod
    def lay_out(images: Sequence[ImagePart]) -> RowPositions:
        """Text advances all axes; an image has one time, and text continues after its longer side."""
        parts, index, position = [], 0, 0
        for image in images:
            start, (num_rows, num_columns) = int(image.places[0]), image.grid
            parts.append(np.tile(np.arange(start - index) + position, (3, 1)))
            position += start - index
            rows, columns = np.divmod(np.arange(num_rows * num_columns), num_columns)
            parts.append(np.stack((np.zeros_like(rows), rows, columns)) + position)
            position += max(num_rows, num_columns)
            index = start + num_rows * num_columns
        return RowPositions(np.concatenate(parts, axis=1), position - index)

    def compute(self, start: int, end: int) -> np.ndarray:
        """Return the positions of tokens [start, end), [3, end - start]."""
        later = np.tile(np.arange(max(start, self.first.shape[1]), end) + self.shift, (3, 1))
        return np.concatenate((self.first[:, start:end], later), axis=1)


class ImageRows:
    """The worker's images. A row keeps its features until its last image is computed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, has_axes: bool) -> None:
        self._dtype = dtype
        self._device = device
        self._has_axes = has_axes
        self._positions: dict[int, RowPositions] = {}  # by row
        self._by_row: dict[int, tuple[np.ndarray, Tensor]] = {}  # places in the prompt, features
        self._bounds: dict[int, list[tuple[int, int]]] = {}  # by row, of images whose tokens attend to each other

    def add(self, new_row: NewRow) -> None:
        self.remove(new_row.row)
        if new_row.images:
            places = np.concatenate([image.places for image in new_row.images])
            found = [image.features for image in new_row.images if image.features is not None]
            features = upload(np.concatenate(found), self._device).to(self._dtype)
            assert len(places) == len(features), "every image is encoded before its request is scheduled"
            self._by_row[new_row.row] = (places, features)
            self._bounds[new_row.row] = [
                (int(image.places[0]), int(image.places[-1]) + 1) for image in new_row.images if image.is_whole
            ]
            if self._has_axes:
                self._positions[new_row.row] = RowPositions.lay_out(new_row.images)

    def remove(self, row: int) -> None:
        self._by_row.pop(row, None)
        self._positions.pop(row, None)

    def mark(self, step: StartedStep) -> None:
        if self._positions:
            self._place(step)
        if not self._by_row:
            return
        places, features = [], []
        spans: list[ImageSpan] = []
        for number, (row, _, start, count, first) in enumerate(step.list_runs()):
            if (found := self._by_row.get(row)) is None:
                continue
            begin, end = np.searchsorted(found[0], (start, start + count)).tolist()
            if begin < end:
                places.append(found[0][begin:end] - start + first)
                features.append(found[1][begin:end])
                for low, high in self._bounds[row]:
                    if start < high <= start + count:
                        low = max(low, start)
                        spans.append(ImageSpan(low - start + first, high - low, number, high))
            if start + count > found[0][-1]:
                del self._by_row[row]
        if places:
            index = upload(np.concatenate(places), self._device)
            step.model_input = replace(step.model_input, images=StepImages(index, torch.cat(features), tuple(spans)))

    def _place(self, step: StartedStep) -> None:
        """Set the positions of rows that have images; [3, T] if the step computes images."""
        runs = [(self._positions.get(row), start, start + count) for row, _, start, count, _ in step.list_runs()]
        if not any(each for each, _, _ in runs):
            return
        if all(each is None or start >= each.first.shape[1] for each, start, _ in runs):
            shifts = np.array([0 if each is None else each.shift for each, _, _ in runs]).repeat(step.counts)
            positions = step.model_input.positions + upload(shifts, self._device)
        else:
            parts = [
                np.tile(np.arange(start, end), (3, 1)) if each is None else each.compute(start, end)
                for each, start, end in runs
            ]
            positions = upload(np.concatenate(parts, axis=1), self._device)
        step.model_input = replace(step.model_input, positions=positions)
