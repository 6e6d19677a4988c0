"""ScaledTensor: a matrix of 8-bit numbers with scales, which are rounded to 8 bits in groups of 32 inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.grouped import GroupedRows, RoundedRows

_GROUP = 32


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """float8 (e4m3) or int8 values with a scale per matrix, per output or per block of both sides."""

    values: Tensor  # [out, in]
    scales: Tensor  # [], [1], [out, 1] or [row blocks, column blocks]
    block: tuple[int, int] | None = None  # rows and columns of a block; None: as the shape of the scales says

    def __post_init__(self) -> None:
        sizes = self.block or (1, 1)
        blocks = tuple(-(-size // step) for size, step in zip(self.shape, sizes, strict=True))
        if self.scales.dim() == 2 and self.block is not None and self.scales.shape != blocks:
            raise ValueError(f"scales {list(self.scales.shape)} must be {list(blocks)}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        """Return the values in the dtype of the scales; in float32 where the scales are powers of two in a byte."""
        return self._read(slice(None))

    def to_grouped(self) -> GroupedRows:
        return RoundedRows(self._read, self.shape, 8, _GROUP)

    def _read(self, selected: slice | Tensor) -> Tensor:
        scales, values = self.scales, self.values[selected]
        if scales.dtype.itemsize == 1:
            scales = scales.view(torch.float8_e8m0fnu).float()
        if scales.dim() == 2:
            rows, columns = self.block or (
                -(-size // count) for size, count in zip(self.shape, scales.shape, strict=True)
            )
            scales = scales[torch.arange(self.shape[0])[selected] // rows]
            scales = scales.repeat_interleave(columns, 1)[:, : self.shape[1]]
        return values.to(scales.dtype) * scales
