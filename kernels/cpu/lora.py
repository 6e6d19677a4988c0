"""NativeLora: an adapter's change of a matrix as the native op reads it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.structs import LoraPartStruct, LoraStruct
from kernels.cpu.weights import DTYPES, address
from kernels.lora import LoraMatrix

PANEL_WIDTH = 32  # kLoraPanelWidth of `src/lora.h`


class NativeLora:
    """Keeps the memory alive that `struct` points to."""

    def __init__(self, matrix: LoraMatrix) -> None:
        dtypes = {matrix.a.dtype, *(part.b.dtype for part in matrix.parts)}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self.in_features, self.out_features = matrix.a.shape[1], matrix.out_features
        scales = torch.empty(len(matrix.a))
        self._kept: list[Tensor] = [matrix.a.to(dtype).contiguous(), scales]
        self._parts = (LoraPartStruct * len(matrix.parts))()
        for at, part in enumerate(matrix.parts):
            scales[part.first_rank : part.first_rank + part.rank] = part.scale
            padded = F.pad(part.b.to(dtype), (0, 0, 0, -part.width % PANEL_WIDTH))
            panels = padded.view(-1, PANEL_WIDTH, part.rank).transpose(1, 2).contiguous()
            self._kept.append(panels)
            for vector in (part.factor, part.offset):
                if vector is not None:
                    assert vector.dtype == torch.float32 and vector.is_contiguous(), "factors are float32"
                    self._kept.append(vector)
            self._parts[at] = LoraPartStruct(
                *(panels.data_ptr(), address(part.factor), address(part.offset)),
                *(part.start, part.width, part.first_rank, part.rank),
            )
        self.struct = LoraStruct(
            *(self._kept[0].data_ptr(), scales.data_ptr(), self._parts, len(matrix.parts)),
            *(len(matrix.a), self.in_features, self.out_features, DTYPES[dtype], 0),
        )


def pack_lora(matrix: LoraMatrix) -> NativeLora:
    """Lay an adapter's change of a matrix out for the native op."""
    return NativeLora(matrix)
