"""GroupedInt: a matrix in codes of 4 or 8 bits, the form that quantized checkpoints and `--quantization int4` share.

weight[o, i] = scales[o, g] * codes[o, i] + minimums[o, g],   g = i // group_size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Bits = Literal[4, 8]

GROUP_SIZE = 64  # of matrices that are rounded to 4 bits
_ROWS_AT_ONCE = 4096  # float32 copies of a large matrix are made of so many rows


@dataclass(frozen=True, slots=True)
class GroupedInt:
    """A matrix [out, in] with one scale and one minimum per group of inputs; the last group may be shorter."""

    codes: Tensor  # [out, in] uint8, below 2 ** bits
    scales: Tensor  # [out, groups], a float dtype
    minimums: Tensor  # [out, groups]
    group_size: int  # a multiple of 32
    bits: Bits = 4

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def select_rows(self, order: Tensor) -> GroupedInt:
        """Return the matrix with its rows in another order."""
        return replace(
            self, codes=self.codes[order], scales=self.scales[order], minimums=self.minimums[order]
        )

    def dequantize(self) -> Tensor:
        """Return the matrix [out, in] in float32."""
        weight = torch.empty(self.shape)
        for start in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scales, minimums = (
                each[rows].float().repeat_interleave(self.group_size, dim=1)[:, : self.shape[1]]
                for each in (self.scales, self.minimums)
            )
            torch.addcmul(minimums, self.codes[rows].float(), scales, out=weight[rows])
        return weight


def stack(parts: Sequence[GroupedInt]) -> GroupedInt:
    """Put matrices of one group size above each other; codes of fewer bits are stored in the most bits of a part."""
    (group_size,) = {part.group_size for part in parts}
    codes, scales, minimums = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "minimums")
    )
    return GroupedInt(codes, scales, minimums, group_size, max(part.bits for part in parts))


def round_grouped(weight: Tensor, bits: Bits = 4, group_size: int = GROUP_SIZE) -> GroupedInt:
    """Round a matrix [out, in]: the levels of a group are spread between its least and greatest weight.

    A NaN spoils its group. Scales and minimums are float16, as products store them.
    """
    parts = [_round_rows(rows, bits, group_size) for rows in weight.split(_ROWS_AT_ONCE)]
    return parts[0] if len(parts) == 1 else stack(parts)


def _round_rows(weight: Tensor, bits: Bits, group_size: int) -> GroupedInt:
    width, greatest = weight.shape[1], 2**bits - 1
    # The last weight is repeated to fill the last group: that does not change its range.
    filled = F.pad(weight.float().unsqueeze(0), (0, -width % group_size), mode="replicate")[0]
    groups = filled.unflatten(1, (-1, group_size))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    minimums = low.half()
    scales = ((high - minimums.float()) / greatest).half()
    levels = (groups - minimums.float()) / scales.float().where(scales != 0, 1.0)
    codes = levels.round_().clamp_(0, greatest).nan_to_num_(0).to(torch.uint8)
    return GroupedInt(
        codes.flatten(1)[:, :width].contiguous(), scales.squeeze(-1), minimums.squeeze(-1), group_size, bits
    )
