"""The supported model families and their differences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Properties that follow from the architecture name, and defaults for optional keys of config.json."""

    model_type: str
    qk_norm: bool = False  # RMS norm of each query and key head before RoPE
    qkv_bias: bool | None = None  # None: the key `attention_bias` decides
    output_bias: bool | None = None
    has_mlp_bias_key: bool = False
    # "none": refused; "all": every layer; "layers": `use_sliding_window`, `max_window_layers`, `layer_types`
    sliding_window: str = "none"
    default_sliding_window: int | None = None
    default_num_key_value_heads: int | None = None  # None: as many as attention heads
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", has_mlp_bias_key=True),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        default_sliding_window=4096,
        default_num_key_value_heads=8,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, output_bias=False, sliding_window="layers", default_sliding_window=4096
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qk_norm=True,
        sliding_window="layers",
        default_sliding_window=4096,
        default_head_dim=128,
    ),
}
