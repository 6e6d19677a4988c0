"""Shapes of well-known models, for work with random weights: the same arithmetic without the download."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Json = dict[str, Any]
BUFFER_BYTES = 512 * 2**20
GEMM_SIZE = 2048
REPEATS = 5


def _make(model_type: str, architecture: str, **fields: Any) -> Json:
    return {
        "architectures": [architecture], "model_type": model_type, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "max_position_embeddings": 40960,
        "rope_theta": 1000000.0, "dtype": "bfloat16", "eos_token_id": 0, "bos_token_id": 0, **fields,
    }


def _qwen3(layers: int, width: int, heads: int, inner: int, is_tied: bool) -> Json:
    return _make(
        "qwen3", "Qwen3ForCausalLM", num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, intermediate_size=inner, vocab_size=151936,
        tie_word_embeddings=is_tied,
    )


SHAPES: dict[str, Json] = {
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    # The layers of Qwen3-30B-A3B, 4 of 48.
    "qwen3-30b-a3b-4l": _make(
        "qwen3_moe", "Qwen3MoeForCausalLM", num_hidden_layers=4, hidden_size=2048, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, tie_word_embeddings=False,
    ),
    "smollm2-135m": _make(
        "llama", "LlamaForCausalLM", num_hidden_layers=30, hidden_size=576, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, intermediate_size=1536, vocab_size=49152,
        tie_word_embeddings=True, max_position_embeddings=8192, rope_theta=100000.0,
    ),
}


def write_shape(name: str, folder: Path) -> Path:
    """Write the shape's config.json into `folder` and return it; there are no weights and no tokenizer."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    return target


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
