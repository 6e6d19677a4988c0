"""Measures how fast native decodes read a KV cache in each dtype, beside the rate at which weights are read (1.00).

    python -m tests.kernels.cpu.measure_kv --batch 8 --context 4096 --heads 9 3 64 --num-threads 2

All run in turn. Blocks lie in random order. The table shows the best turn and the median. Of one thread, the CPU time
counts, so that other work on the machine matters little; of several, the time by the clock.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.native_ops import NativeOps
from kernels.cpu.panel_memory import map_large_pages
from kernels.ops import INT8_SCALE_BYTES
from tests.kernels.cpu.conftest import require_library

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}  # name -> dtype of the model
BLOCK_SIZE, NUM_LAYERS, NUM_TURNS = 16, 4, 15


def make_cache(ops: NativeOps, kind: str, num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    dtype = torch.int8 if kind == "int8" else KINDS[kind]
    shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim + (INT8_SCALE_BYTES if kind == "int8" else 0))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    k_cache, v_cache = (map_large_pages(num_bytes).view(dtype).view(shape) for _ in range(2))
    for slots in torch.arange(num_blocks * BLOCK_SIZE).split(4096):
        heads = torch.randn(2, len(slots), num_kv_heads, head_dim).to(KINDS[kind])
        ops.store_kv(heads[0], heads[1], k_cache, v_cache, slots)
    return k_cache, v_cache


def make_jobs(
    batch: int, context: int, sizes: tuple[int, int, int], num_threads: int
) -> dict[str, Callable[[], int]]:
    """Return what is measured; each call returns how many bytes it read."""
    ops = NativeOps(require_library(), num_threads=num_threads)
    num_heads, num_kv_heads, head_dim = sizes
    blocks = random.Random(0).sample(range(1, batch * context // BLOCK_SIZE + 1), batch * context // BLOCK_SIZE)
    tables = torch.tensor(blocks).int().view(batch, -1)
    starts, lens = torch.arange(batch + 1).int(), torch.full((batch,), context).int()
    weight = ops.pack_linear(torch.randn(49152, 1024).bfloat16(), None, None)
    row = torch.randn(1, 1024).bfloat16()

    def read_weights() -> int:
        ops.linear(row, weight, None)
        return weight.num_bytes

    def make_attend(kind: str) -> Callable[[], int]:
        caches = [make_cache(ops, kind, len(blocks) + 1, num_kv_heads, head_dim) for _ in range(NUM_LAYERS)]
        q = torch.randn(batch, num_heads, head_dim).to(KINDS[kind])

        def attend() -> int:
            for k_cache, v_cache in caches:
                ops.paged_attention(q, k_cache, v_cache, tables, starts, lens, scale=head_dim**-0.5)
            return sum(cache.nbytes for pair in caches for cache in pair)

        return attend

    return {"weights": read_weights} | {kind: make_attend(kind) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--heads", type=int, nargs=3, default=(9, 3, 64), help="query heads, KV heads, head size")
    parser.add_argument("--num-threads", type=int, default=1)
    arguments = parser.parse_args()
    num_threads = arguments.num_threads
    jobs = make_jobs(arguments.batch, arguments.context, tuple(arguments.heads), num_threads)
    read_clock = time.thread_time if num_threads == 1 else time.perf_counter
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in jobs}
    for _ in range(NUM_TURNS):
        for name, job in jobs.items():
            start = read_clock()
            num_bytes = job()
            found[name].append((read_clock() - start, num_bytes))
    for name, turns in found.items():
        turns.sort()
        rates = [turns[at][1] / turns[at][0] / 1e9 for at in (0, NUM_TURNS // 2)]
        base = [found["weights"][at][1] / found["weights"][at][0] / 1e9 for at in (0, NUM_TURNS // 2)]
        print(
            f"{name:9} best {turns[0][0] * 1e3:7.2f} ms {rates[0]:6.2f} GB/s ({rates[0] / base[0]:.2f}), "
            f"median {turns[NUM_TURNS // 2][0] * 1e3:7.2f} ms {rates[1]:6.2f} GB/s ({rates[1] / base[1]:.2f})"
        )


if __name__ == "__main__":
    main()
