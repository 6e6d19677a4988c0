"""The least time of a decode step on this CPU: what a model must read and compute, by the limits of the machine.

python -m tests.measure.roofline --shape qwen3-0.6b --dtype bfloat16 --batch-size 16 --context 144
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.bench.runners import DTYPES
from app.bench.shapes import SHAPES, Json

BUFFER_BYTES = 512 * 2**20
GEMM_SIZE = 2048
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Footprint:
    """The least that one step of a model must read and compute.

    Attributes:
        num_weights: of all matrices that a token passes, the output embedding included.
        kv_per_token: keys and values of one token over all layers, in elements.
        hidden_size, num_layers: for the attention's own arithmetic.
    """

    num_weights: int
    kv_per_token: int
    num_layers: int
    attention_width: int

    @classmethod
    def from_config(cls, config: Json) -> Footprint:
        """Read the sizes of a Hugging Face config."""
        width, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or width // heads
        attention = width * (heads + 2 * kv_heads) * head_dim + heads * head_dim * width
        layer = attention + 3 * width * config["intermediate_size"]
        if "num_experts" in config:
            inner = config["num_experts_per_tok"] * config["moe_intermediate_size"]
            layer = attention + 3 * width * inner + width * config["num_experts"]
        return cls(
            layers * layer + config["vocab_size"] * width,
            2 * layers * kv_heads * head_dim,
            layers,
            heads * head_dim,
        )

    def step_bytes(self, num_rows: int, context: int, weight_bytes: float, kv_bytes: float) -> float:
        """Bytes that one decode step reads: all weights once, and every row's keys and values."""
        return self.num_weights * weight_bytes + num_rows * context * self.kv_per_token * kv_bytes

    def step_flops(self, num_rows: int, context: int) -> float:
        """Floating-point operations of one decode step."""
        return num_rows * (2 * self.num_weights + 4 * self.num_layers * context * self.attention_width)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes a second read by one thread and by all, and operations a second of a product of the dtype.

    Measured in the same run as the figures that they bound, because the load of a shared machine changes.
    """

    one_thread: float
    all_threads: float
    flops: float

    def step_time(self, footprint: Footprint, num_rows: int, context: int, bytes_per_value: float) -> float:
        """Seconds that a decode step takes at least."""
        reading = footprint.step_bytes(num_rows, context, bytes_per_value, bytes_per_value) / self.all_threads
        return max(reading, footprint.step_flops(num_rows, context) / self.flops)

    def describe(self) -> str:
        """One line for the report."""
        return (
            f"bandwidth {self.one_thread / 1e9:.1f} GB/s by one thread, {self.all_threads / 1e9:.1f} by all; "
            f"products {self.flops / 1e9:.0f} GFLOP/s"
        )


def measure_roofline(dtype: torch.dtype, num_threads: int) -> Roofline:
    """Measure the CPU; takes about a second."""
    before = torch.get_num_threads()
    buffer = torch.ones(BUFFER_BYTES // 4)
    try:
        torch.set_num_threads(1)
        one = BUFFER_BYTES / _best(buffer.sum)
        torch.set_num_threads(num_threads)
        every = BUFFER_BYTES / _best(buffer.sum)
        left = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        right = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
        flops = 2 * GEMM_SIZE**3 / _best(lambda: torch.mm(left, right))
    finally:
        torch.set_num_threads(before)
    return Roofline(one, max(one, every), flops)


def _best(work: Callable[[], object]) -> float:
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="The least time of a decode step on this CPU.")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=144, help="tokens of a row, on average")
    given = parser.parse_args()
    dtype, threads = DTYPES[given.dtype], torch.get_num_threads()
    roof = measure_roofline(dtype, threads)
    footprint = Footprint.from_config(SHAPES[given.shape])
    step_s = roof.step_time(footprint, given.batch_size, given.context, dtype.itemsize)
    print(f"{roof.describe()}: a step takes {step_s * 1000:.2f} ms at least, {given.batch_size / step_s:.1f} tok/s")


if __name__ == "__main__":
    main()
