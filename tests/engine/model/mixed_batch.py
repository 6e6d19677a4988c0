"""Steps that mix decode, chunks, whole prompts and drafts, over variants of the oldest families."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.model import DecoderModel, load_model
from kernels import Ops
from kernels import torch as torch_ops
from kernels.cpu import make_native_ops
from kernels.ops import Quantization
from tests.engine.model.drive import Driver, compute_expected, make_prompt, make_transformers_model, save
from tests.kernels.cpu.conftest import require_library

WINDOW = {"use_sliding_window": True, "sliding_window": 33}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-derived": ("llama", {"head_dim": None}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-last-layers": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased-one-kv-head": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-layer-types": (
        "qwen3",
        WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
LENGTHS = {"decode": 90, "short": 3, "chunk": 200, "fresh": 120, "draft": 40, "long": 300}
FIRST = {"decode": 89, "short": 2, "chunk": 100, "draft": 35, "long": 299}


@functools.cache
def find_ops(name: str = "native") -> Ops:
    """Torch's ops, or native ones for an architecture."""
    return torch_ops.make_ops() if name == "torch" else make_native_ops(require_library(name), 2)


@functools.cache
def load_pair(
    variant: str,
    ops: str = "native",
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
) -> tuple[PreTrainedModel, DecoderModel]:
    """Return transformers' model and ours."""
    family, overrides = VARIANTS[variant]
    expected = make_transformers_model(family, **overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = save(expected, Path(folder))
        model = load_model(path, dtype, ops=find_ops(ops), quantization=quantization)
    assert isinstance(model, DecoderModel)
    return expected, model


def run_mixed(model: DecoderModel, kv_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Prefill in part, then one step of decode, a chunk, a fresh prompt and drafts; all logits of each request."""
    prompts = {name: make_prompt(length, seed) for seed, (name, length) in enumerate(LENGTHS.items())}
    driver = Driver(model, kv_dtype=kv_dtype)
    first = driver.step({name: prompts[name][:count] for name, count in FIRST.items()})
    second = driver.step({name: prompts[name][FIRST.get(name, 0) :] for name in prompts})
    return {name: torch.cat([*([first[name]] if name in first else []), second[name]]) for name in prompts}


def compute_all(expected: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: compute_expected(expected, make_prompt(length, seed))
        for seed, (name, length) in enumerate(LENGTHS.items())
    }
