"""MXFP4: 4-bit numbers in blocks of 32 with a power of two as scale, decoded while a checkpoint is loaded.

Source: OCP Microscaling Formats (MX) Specification v1.0, E2M1 elements and E8M0 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_SIZE = 32
_EXPONENT_BIAS = 127


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of one matrix, [out, in] float32.

    Args:
        blocks: [out, in / 32, 16] uint8, two numbers each, the first one in the lower half.
        scales: [out, in / 32] uint8, exponents of 2 plus 127.
    """
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    numbers = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(1)


class Mxfp4Experts:
    """Joins the two tensors of all experts' matrices, which a checkpoint may store in any order.

    Args:
        shape: [E, out, in] of the matrices.
        write: receives the number of an expert and its matrix, [out, in] float32.
    """

    def __init__(self, shape: tuple[int, int, int], write: Callable[[int, Tensor], None]) -> None:
        num_experts, num_outputs, num_inputs = shape
        scales = (num_experts, num_outputs, num_inputs // BLOCK_SIZE)
        self._write = write
        self._waiting: dict[str, Tensor] = {}
        self.targets = {
            "blocks": EncodedTarget(self, "blocks", torch.Size((*scales, BLOCK_SIZE // 2))),
            "scales": EncodedTarget(self, "scales", torch.Size(scales)),
        }

    def put(self, part: str, tensor: Tensor) -> None:
        """Take one of the two tensors; the second one starts the decoding, one expert at a time."""
        self._waiting[part] = tensor
        if len(self._waiting) == len(self.targets):
            pairs = zip(self._waiting.pop("blocks"), self._waiting.pop("scales"), strict=True)
            for expert, (blocks, scales) in enumerate(pairs):
                self._write(expert, decode_mxfp4(blocks, scales))


@dataclass(frozen=True, slots=True)
class EncodedTarget:
    """One of the two tensors, for the loader."""

    experts: Mxfp4Experts
    part: str
    shape: torch.Size
    dtype: torch.dtype = torch.uint8
    owner: nn.Module | None = None

    def copy(self, tensor: Tensor) -> None:
        """Take the tensor."""
        self.experts.put(self.part, tensor)
