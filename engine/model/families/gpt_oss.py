"""gpt-oss: attention sinks, and experts of 4 bits or not."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.family import Family
from engine.model.families.layer_kinds import TRAINING_KEYS, in_all_layers, read_experts
from engine.model.layer_spec import LayerStyle
from engine.model.moe_spec import MoENames
from kernels.ops import GatedActivation


def _read_gpt_oss(reader: ConfigReader) -> dict[str, Any]:
    """gpt-oss: softmax over the chosen experts, biases, a clamped activation, experts of 4 bits or not."""
    quantization = reader.take("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "gguf":
        method = None  # its experts are matrices as any others
    if method not in (None, "mxfp4"):
        raise reader.error(
            "quantization_config", quantization, "is not supported; supported: quant_method mxfp4"
        )
    names = MoENames(
        router="router",
        layout="interleaved" if method is None else "mxfp4",
        experts=("gate_up_proj", "down_proj"),
    )
    limit = reader.number("swiglu_limit", 7.0)
    spec = read_experts(
        reader, "intermediate_size", score="topk_softmax", has_bias=True,
        activation=GatedActivation(reader.number("swiglu_alpha", 1.702), limit), names=names,
    )
    reader.constant("experts_per_token", spec.top_k)
    if method is not None:
        for key in ("hidden_size", "intermediate_size"):
            if (size := reader.integer(key)) % 32:
                raise reader.error(key, size, "must be a multiple of 32, the block size of mxfp4")
    return in_all_layers(reader, spec)


FAMILIES: dict[str, Family] = {
    "GptOssForCausalLM": Family(
        "gpt_oss",
        LayerStyle(has_sinks=True),
        sliding_window="types",
        defaults={
            "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "rope_theta": 150000.0,
        },
        inert=TRAINING_KEYS | {"initial_context_length"},
        read_fields=_read_gpt_oss,
    ),
}
