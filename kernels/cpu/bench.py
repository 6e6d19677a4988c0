"""How fast native ops are beside plain torch, and how near the machine's limits: `python -m kernels.cpu.bench`.

    read       GB/s    the weights and caches of a step, over the time of the step
    rate       GFLOP/s the products of a step, over its time
    share      the greater of both, each over what this machine was measured to do just before the cell

Implementations take turns within a cell, so that a busy neighbour slows all of them; the best of the turns counts.
Weights are random: times do not depend on them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import torch_ops
from kernels.cpu.bench_model import SHAPES, BenchModel, Shape, Weights
from kernels.cpu.bench_peer import make_peer_step
from kernels.cpu.build import NativeBuild
from kernels.cpu.library import ThreadPool, count_cores
from kernels.cpu.native_ops import NativeOps
from kernels.int4 import GROUP_SIZE
from kernels.ops import Quantization

_PROBE_BYTES = 256 << 20
_PROBE_SIZE = (960, 1024)  # of a square-ish product whose operands stay in the cache
_BYTES = {torch.bfloat16: 2, torch.float32: 4}
_INT4_BYTES = 0.5 + 4 / GROUP_SIZE  # a code, and its share of a scale and a minimum


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: requests, new tokens of each, tokens in the cache."""

    name: str
    num_requests: int
    query_len: int
    context: int


CELLS = (
    Cell("decode ctx 128 B1", 1, 1, 127),
    Cell("decode ctx 128 B16", 16, 1, 127),
    Cell("decode ctx 128 B32", 32, 1, 127),
    Cell("decode ctx 1024 B16", 16, 1, 1023),
    Cell("prefill 512", 1, 512, 0),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at best, measured with the pool's threads."""

    bandwidth: float  # bytes/s
    rate: float  # bfloat16 operations/s, a multiply-add counting two


class Probe:
    """Measures the machine's limits again and again with the same memory."""

    def __init__(self, native: NativeOps, pool: ThreadPool) -> None:
        self._native, self._pool = native, pool
        self._memory = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
        self._x = torch.randn(_PROBE_SIZE[0], _PROBE_SIZE[1]).bfloat16()
        self._weight = native.pack_linear(torch.randn(_PROBE_SIZE).bfloat16(), None, None)

    def measure(self) -> Limits:
        read = measure_best(
            lambda: self._native.library.read(self._pool.handle, self._memory.data_ptr(), _PROBE_BYTES), 3
        )
        multiply = measure_best(lambda: self._native.linear(self._x, self._weight, None), 5)
        operations = 2 * self._x.shape[0] * _PROBE_SIZE[0] * _PROBE_SIZE[1]
        return Limits(_PROBE_BYTES / read, operations / multiply)


def measure_best(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest of some runs, in seconds.

    On one thread it is the time that the thread had a core, so that neighbours who share it count less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def count_operations(shape: Shape, cell: Cell) -> float:
    """Operations of a step: all products, and attention over what each token sees."""
    tokens = cell.num_requests * cell.query_len
    seen = cell.context + (cell.query_len + 1) / 2
    attention = 4 * tokens * seen * shape.num_heads * shape.head_dim * shape.num_layers
    return 2 * tokens * shape.num_layer_weights + 2 * cell.num_requests * shape.num_head_weights + attention


def count_bytes(shape: Shape, cell: Cell, weight_bytes: float, cache_bytes: int) -> float:
    """Bytes that a step must read: every weight once, and the context of every request."""
    context = cell.num_requests * (cell.context + cell.query_len) * shape.num_kv_heads * shape.head_dim
    weights = shape.num_layer_weights + shape.num_head_weights
    return weights * weight_bytes + 2 * context * shape.num_layers * cache_bytes


def run_cell(
    cell: Cell, steps: dict[str, tuple[Callable[[], object], int]], repeats: int
) -> dict[str, float]:
    """Time each implementation's step in turns; seconds at best. A step is (function, steps it makes)."""
    best = dict.fromkeys(steps, float("inf"))
    for step, _ in steps.values():
        step()
    for _ in range(repeats):
        for name, (step, count) in steps.items():
            best[name] = min(best[name], measure_best(step, 1 if cell.query_len > 1 else 3) / count)
    return best


def print_cell(
    shape: Shape, cell: Cell, best: dict[str, float], limits: tuple[Limits, Limits], dtype: torch.dtype
) -> None:
    tokens = cell.num_requests * cell.query_len
    print(
        f"{cell.name}: read {limits[0].bandwidth / 1e9:.0f} / {limits[1].bandwidth / 1e9:.0f} GB/s, "
        f"products {limits[0].rate / 1e9:.0f} / {limits[1].rate / 1e9:.0f} GFLOP/s on one / all threads"
    )
    for name, seconds in best.items():
        weight_bytes = 1 if "int8" in name else _INT4_BYTES if "int4" in name else _BYTES[dtype]
        read = count_bytes(shape, cell, weight_bytes, _BYTES[dtype]) / seconds
        rate = count_operations(shape, cell) / seconds
        # products of integers run at twice the rate
        peak = limits[1].rate * (2 if "int" in name else 1)
        share = max(read / limits[1].bandwidth, rate / peak)
        ratios = "  ".join(
            f"{best[peer] / seconds:.2f}x {peer}" for peer in best if peer != name and "native" not in peer
        )
        print(
            f"  {name:<12} {seconds * 1e3:9.2f} ms {tokens / seconds:9.1f} tok/s  read {read / 1e9:5.1f}  "
            f"rate {rate / 1e9:6.1f}  share {share:.2f}  {ratios}",
            flush=True,
        )


def make_models(
    shape: Shape, native: NativeOps, arguments: argparse.Namespace, dtype: torch.dtype
) -> dict[str, BenchModel]:
    weights = Weights.make(shape, dtype)
    native_ops, plain = native.make_ops(), torch_ops.make_ops()
    kinds: dict[str, tuple[bool, Quantization | None]] = {
        "native": (True, None),
        "native int8": (True, "int8"),
        "native int4": (True, "int4"),
        "torch": (False, None),
        "torch int8": (False, "int8"),
    }
    return {
        name: BenchModel(shape, weights, native_ops if is_native else plain, quantization)
        for name, (is_native, quantization) in kinds.items()
        if name in arguments.engines
    }


def run(arguments: argparse.Namespace) -> None:
    build = NativeBuild()
    build.start()
    library = build.wait()
    print(f"native ops: {build.status}; {arguments.threads} threads", flush=True)
    if library is None:
        raise SystemExit(1)
    torch.set_num_threads(1)
    native, alone = NativeOps(library, arguments.threads), NativeOps(library, 1)
    probes = Probe(alone, alone.pool), Probe(native, native.pool)
    dtype = getattr(torch, arguments.dtype)
    shape = SHAPES[arguments.shape]
    models = make_models(shape, native, arguments, dtype)
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.shape} {arguments.dtype}", flush=True)
    for cell in CELLS:
        if not any(wanted in cell.name for wanted in arguments.cells):
            continue
        steps: dict[str, tuple[Callable[[], object], int]] = {}
        for name, model in models.items():
            step: Callable[[], Tensor] = model.make_step(cell.num_requests, cell.query_len, cell.context)
            steps[name] = (step, 1)
        if arguments.peer == "transformers":
            sizes = (cell.num_requests, cell.query_len, cell.context)
            steps["transformers"] = make_peer_step(shape, dtype, *sizes)
        limits = (probes[0].measure(), probes[1].measure())
        with torch.inference_mode():
            best = run_cell(cell, steps, arguments.repeats)
        print_cell(shape, cell, best, limits, dtype)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Native ops beside plain torch, interleaved.")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=count_cores())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cells", nargs="+", default=[""], help="parts of the names of the cells to run")
    parser.add_argument("--engines", nargs="+", default=["native", "native int8", "native int4", "torch"])
    parser.add_argument("--peer", choices=("transformers",))
    return parser.parse_args()


if __name__ == "__main__":
    run(parse_arguments())
