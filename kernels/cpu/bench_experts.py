"""How fast the native experts are beside transformers' block: `python -m kernels.cpu.bench_experts`.

The shape is a layer of Qwen3-30B-A3B in bfloat16. Both sides have the same matrices and take turns. On one thread the
time is that which the thread had a core; transformers' time includes its router.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kernels.cpu.build import NativeBuild
from kernels.cpu.library import NativeLibrary, ThreadPool, count_cores
from kernels.cpu.native_ops import NativeOps
from kernels.ops import ExpertWeights, GatedActivation

_CONFIG = Qwen3MoeConfig()
_PROBE_BYTES = 512 << 20


def make_block() -> Qwen3MoeSparseMoeBlock:
    """Return transformers' block with random weights, with the products that its models use by default."""
    _CONFIG._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(_CONFIG).to(torch.bfloat16).eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(0.0, 0.02)
    return block


def route(block: Qwen3MoeSparseMoeBlock, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids and weights that the block's router chooses."""
    scores = (hidden.float() @ block.gate.weight.float().t()).softmax(dim=-1)
    weights, ids = scores.topk(_CONFIG.num_experts_per_tok)
    return ids, weights


def measure_read(library: NativeLibrary, pool: ThreadPool, memory: Tensor) -> float:
    """Return the seconds of reading the memory once."""
    start = read_clock()
    library.read(pool.handle, memory.data_ptr(), _PROBE_BYTES)
    return read_clock() - start


def read_clock() -> float:
    """Return the thread's time on one thread, else the time of day, in seconds."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@torch.inference_mode()
def run(num_threads: int, repeats: int) -> None:
    build = NativeBuild()
    build.start()
    library = build.wait()
    print(f"native ops: {build.status}; {num_threads} threads", flush=True)
    if library is None:
        raise SystemExit(1)
    torch.set_num_threads(num_threads)
    native, block, memory = (
        NativeOps(library, num_threads),
        make_block(),
        torch.ones(_PROBE_BYTES, dtype=torch.uint8),
    )
    ops, matrices = native.make_ops(), block.experts
    weights = ExpertWeights(
        matrices.gate_up_proj.data, None, matrices.down_proj.data, None, GatedActivation()
    )
    packed = {"bfloat16": ops.pack_experts(weights, None), "int8": ops.pack_experts(weights, "int8")}
    for num_tokens in (1, 16, 512):
        times: dict[str, list[float]] = {name: [] for name in (*packed, "transformers", "read")}
        for _ in range(repeats):
            hidden = torch.randn(1, num_tokens, _CONFIG.hidden_size).bfloat16()
            ids, factors = route(block, hidden[0])
            for name, experts in packed.items():
                start = read_clock()
                ops.run_experts(hidden[0], ids, factors, experts)
                times[name].append(read_clock() - start)
            start = read_clock()
            block(hidden)
            times["transformers"].append(read_clock() - start)
            times["read"].append(measure_read(library, native.pool, memory))
        num_bytes = ids.unique().numel() * 6 * _CONFIG.hidden_size * _CONFIG.moe_intermediate_size
        print(f"{num_tokens} tokens, {ids.unique().numel()} experts", end="")
        for name in packed:
            pairs = zip(times["transformers"], times[name], strict=True)
            ratio = statistics.median(peer / own for peer, own in pairs)
            print(f"; {name} {min(times[name]) * 1e3:.1f} ms, {ratio:.2f}x transformers", end="")
        reads = num_bytes / min(times["bfloat16"]) / (_PROBE_BYTES / min(times["read"]))
        print(f"; bfloat16 at {reads:.2f} of a plain read", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Native experts beside transformers' block, interleaved.")
    parser.add_argument("--threads", type=int, default=count_cores())
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    run(arguments.threads, arguments.repeats)
