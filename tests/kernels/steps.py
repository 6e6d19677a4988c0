"""Random steps for the tests of what gathers their inputs."""

import random
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from kernels.step_buffers import StepBuffers, make_block_tables, make_slot_mapping


def run_gather(gather: Callable[..., None], device: torch.device, seed: int) -> dict[str, Tensor]:
    """Gather a random step with rows that pad and tokens behind the last row; the buffers start at -7."""
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, max_len, block_size, num_requests = 6, 50, source.choice([1, 4, 16]), source.choice([1, 5])
    pool = torch.randint(0, 1000, (num_rows, max_len), generator=generator, dtype=torch.int32)
    num_groups, width = source.choice([1, 3]), -(-max_len // block_size)
    tables = torch.randint(1, 99, (num_groups, num_rows, width), generator=generator).int()
    rows = torch.tensor([*source.sample(range(num_rows), num_requests), -1, -1])
    lens = [source.randint(1, 20) for _ in range(num_requests)] + [1, 0]
    starts = torch.tensor([source.randint(0, 20) for _ in lens])
    bounds = torch.tensor([0, *lens]).cumsum(0).int()

    def fill(*shape: int) -> Tensor:
        return torch.full(shape, -7, device=device)

    num_tokens = sum(lens) + 3
    slots = make_slot_mapping(num_groups, num_tokens, device).fill_(-7)
    out_tables = make_block_tables(num_groups, len(rows), width - 1, device).fill_(-7)
    out = StepBuffers(fill(num_tokens), fill(num_tokens), slots, out_tables, fill(len(rows)).int())
    moved = [each.to(device) for each in (pool, tables, rows, starts, bounds)]
    gather(*moved, block_size, out)
    return {field.name: getattr(out, field.name).cpu() for field in fields(out)}
