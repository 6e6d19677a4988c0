"""Random low-rank changes of a matrix, for the tests of all implementations."""

import torch

from kernels.lora import LoraMatrix, LoraPart


def make_lora_matrix(
    outputs: int,
    inputs: int,
    sizes: list[tuple[int, int, int]],
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> LoraMatrix:
    """Return a change of a matrix [outputs, inputs]; sizes are (start, width, rank) of its parts.

    Parts have a factor for each output, an offset, both or neither.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    parts, first = [], 0
    for number, (start, width, rank) in enumerate(sizes):
        factor, offset = (draw(width) if (seed + number) & bit else None for bit in (1, 2))
        parts.append(LoraPart(start, first, draw(width, rank, dtype=dtype), 0.5 + number, factor, offset))
        first += rank
    return LoraMatrix(draw(first, inputs, dtype=dtype), tuple(parts), outputs)
