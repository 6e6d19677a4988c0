"""The supported model families and their differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from engine.model.config_reader import ConfigReader
from engine.model.layer_spec import LLAMA_STYLE, LayerStyle
from engine.model.moe_config import (
    TRAINING_KEYS,
    read_glm4_moe,
    read_gpt_oss,
    read_granite_moe,
    read_lfm2_moe,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from engine.model.rope_config import RopeKeys
from engine.model.state_config import read_conv_states, read_delta_states, read_mamba_states
from engine.model.vision.spec import VisionKind

_PLAIN_ROPE = RopeKeys()
# Returns further fields of ModelConfig.
ReadFields = Callable[[ConfigReader], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of one architecture, and how its config.json is read."""

    model_type: str
    style: LayerStyle = LLAMA_STYLE
    rope: RopeKeys = _PLAIN_ROPE
    # True, false, or the key that decides.
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    # "none": refused; "all": every layer; "layers": `use_sliding_window`, `max_window_layers`, `layer_types`;
    # "types": `layer_types`, or every layer but each `sliding_window_pattern`-th
    sliding_window: Literal["none", "all", "layers", "types"] = "none"
    state_layers: tuple[
        str, ...
    ] = ()  # names in `layer_types` of layers with a state; `read_fields` reads their shape
    # Layers without positions: none, those of `no_rope_layers`, full ones (beside windowed ones), or all without
    # `position_embedding_type` "rope"
    no_rope: Literal["none", "listed", "full", "full if windowed", "without key"] = "none"
    inner_size_key: str = "intermediate_size"
    eps_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that are absent
    constants: Mapping[str, Any] = field(default_factory=dict)  # keys that may have one value only
    inert: frozenset[str] = frozenset()  # keys without influence
    read_fields: ReadFields | None = None


def _read_granite(reader: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_multiplier": reader.number("embedding_multiplier", 1.0),
        "residual_multiplier": reader.number("residual_multiplier", 1.0),
        "attention_scale": reader.number("attention_multiplier", 1.0),
        "logits_multiplier": 1.0 / reader.number("logits_scaling", 1.0),
    }


def _read_granite4(reader: ConfigReader) -> dict[str, Any]:
    fields, prefix = _read_granite(reader), "mlp"
    types = reader.take("layer_types") or []
    if not types or any(kind in _MAMBA_LAYERS for kind in types):
        fields |= read_mamba_states(reader)
    if reader.integer("num_local_experts", 8, minimum=0):
        prefix = "block_sparse_moe.shared_mlp"
        fields |= read_granite_moe(reader, reader.integer("shared_intermediate_size"))
    names = (("gate_up_proj", "input_linear"), ("down_proj", "output_linear"))
    renames = tuple((f"{prefix}.{ours}", f"shared_mlp.{theirs}") for ours, theirs in names)
    return fields | {"weight_renames": renames}


_MAMBA_LAYERS = ("mamba", "linear_attention")
_MAMBA_INERT = frozenset(
    [
        *("time_step_limit", "init_method", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb"),
        *(f"mamba_{name}" for name in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand")),
        *(f"mamba_{name}" for name in ("chunk_size", "conv_bias", "proj_bias")),
    ]
)


def _read_bamba(reader: ConfigReader) -> dict[str, Any]:
    names = (
        ("mlp.", "feed_forward."),
        ("post_attention_layernorm", "pre_ff_layernorm"),
        ("model.norm", "model.final_layernorm"),
    )
    return read_mamba_states(reader) | {"weight_renames": names}


def _read_lfm2(reader: ConfigReader) -> dict[str, Any]:
    size = reader.integer("block_ff_dim", reader.integer("intermediate_size"))
    if reader.boolean("block_auto_adjust_ff_dim", True):
        size = int(reader.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        multiple = reader.integer("block_multiple_of", 256)
        size = -(-size // multiple) * multiple
    return read_conv_states(reader) | {"intermediate_size": size, "weight_renames": _LFM2_NAMES}


def _read_lfm2_moe(reader: ConfigReader) -> dict[str, Any]:
    return read_conv_states(reader) | read_lfm2_moe(reader) | {"weight_renames": _LFM2_NAMES}


_LFM2_NAMES = (
    *(("input_layernorm", "operator_norm"), ("post_attention_layernorm", "ffn_norm")),
    *(("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"), ("self_attn.o_proj", "self_attn.out_proj")),
    *(("mlp.", "feed_forward."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
    ("model.norm", "model.embedding_norm"),
)
_LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
_LFM2_INERT = TRAINING_KEYS | {
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("block_use_swiglu", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
    *("tie_embedding", "theta", "full_attn_idxs", "block_multiple_of", "block_ffn_dim_multiplier"),
}


def _read_gemma2(reader: ConfigReader) -> dict[str, Any]:
    return _read_gemma3(reader) | {"soft_cap": reader.optional_number("attn_logit_softcapping")}


def _read_gemma3(reader: ConfigReader) -> dict[str, Any]:
    return {
        "embedding_multiplier": reader.integer("hidden_size") ** 0.5,
        "attention_scale": reader.number("query_pre_attn_scalar", 256) ** -0.5,
        "logits_cap": reader.optional_number("final_logit_softcapping"),
    }


def _read_cohere2(reader: ConfigReader) -> dict[str, Any]:
    return {"logits_multiplier": reader.number("logit_scale", 0.0625)}


# The last part of the checkpoint predicts several tokens.
_QWEN_INERT = TRAINING_KEYS | {
    *("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"),
}
_QWEN_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
_QWEN_STYLE = LayerStyle(norm_offset=1.0, qk_norm="head", has_output_gate=True)


def _read_qwen3_next(reader: ConfigReader) -> dict[str, Any]:
    states = read_delta_states(reader, has_fused_names=True)
    return states | read_qwen2_moe(reader) | {"ignored_weights": ("mtp.",)}


def _read_qwen3_5(reader: ConfigReader) -> dict[str, Any]:
    return read_delta_states(reader) | {"ignored_weights": ("mtp.",)}


def _read_qwen3_5_moe(reader: ConfigReader) -> dict[str, Any]:
    return _read_qwen3_5(reader) | read_qwen2_moe(reader)


_GEMMA_STYLE = LayerStyle(placement="sandwich", norm_offset=1.0, activation="gelu_tanh")
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        output_bias=False,
        sliding_window="layers",
        defaults={"sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        LayerStyle(qk_norm="head"),
        sliding_window="layers",
        defaults={"sliding_window": 4096, "head_dim": 128},
    ),
    # The text part of Qwen3-VL.
    "Qwen3VLForConditionalGeneration": Family(
        "qwen3_vl_text",
        LayerStyle(qk_norm="head"),
        RopeKeys(has_sections=True),
        output_bias="attention_bias",
        defaults={"rope_theta": 5e5, "head_dim": 128},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        mlp_bias="mlp_bias",
        sliding_window="layers",
        no_rope="listed",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "max_window_layers": 0},
    ),
    "GraniteForCausalLM": Family("granite", mlp_bias="mlp_bias", read_fields=_read_granite),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        LayerStyle(has_fused_names=True),
        inner_size_key="shared_intermediate_size",
        no_rope="without key",
        state_layers=_MAMBA_LAYERS,
        constants={"normalization_function": "rmsnorm"},
        inert=TRAINING_KEYS | _MAMBA_INERT | {"intermediate_size", "num_experts_per_tok"},
        read_fields=_read_granite4,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        LayerStyle(has_fused_qkv=True, has_fused_names=True),
        RopeKeys(has_partial=True, old_longrope_types=("su", "yarn")),
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        constants={"full_attn_mod": 1, "interpolate_factor": 1},
        inert=frozenset(["original_max_position_embeddings"]),
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        rope=RopeKeys(has_query_scaling=True),
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "Olmo2ForCausalLM": Family("olmo2", LayerStyle(placement="post", qk_norm="full")),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        LayerStyle(placement="post", qk_norm="full"),
        RopeKeys(has_layer_types=True),
        sliding_window="types",
        defaults={"rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        LayerStyle(placement="post", qk_norm="head"),
        qkv_bias=False,
        output_bias=False,
        sliding_window="types",
        no_rope="full if windowed",
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _GEMMA_STYLE,
        sliding_window="types",
        activation_key="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "num_key_value_heads": 4,
        },
        inert=frozenset(["hidden_act"]),
        read_fields=_read_gemma2,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        replace(_GEMMA_STYLE, qk_norm="head"),
        RopeKeys(has_layer_types=True),
        sliding_window="types",
        activation_key="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 6,
            "num_attention_heads": 8,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "num_key_value_heads": 4,
        },
        inert=frozenset(["hidden_act"]),
        read_fields=_read_gemma3,
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        LayerStyle(norm="layer", placement="parallel", rope_pairs="interleaved"),
        sliding_window="types",
        no_rope="full",
        eps_key="layer_norm_eps",
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-5,
        },
        constants={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_embedding_sharing": True,
        },
        inert=frozenset(["use_parallel_embedding"]),
        read_fields=_read_cohere2,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        qkv_bias="attention_bias",
        output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        inert=frozenset(["residual_dropout"]),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        LayerStyle(norm="layer", norm_bias=True, activation="gelu_tanh", is_gated=False),
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
        sliding_window="all",
        eps_key="norm_epsilon",
        defaults={
            "use_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
        },
        constants={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
        inert=frozenset(
            [
                *("residual_dropout", "embedding_dropout", "activation_function"),
                *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "layer_norm_epsilon"),
            ]
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias="qkv_bias",
        output_bias=False,
        sliding_window="layers",
        defaults={"qkv_bias": True, "sliding_window": 4096},
        inert=TRAINING_KEYS,
        read_fields=read_qwen2_moe,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        LayerStyle(qk_norm="head"),
        sliding_window="layers",
        constants={"use_sliding_window": False},
        inert=TRAINING_KEYS,
        read_fields=read_qwen3_moe,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        qkv_bias=False,
        output_bias=False,
        sliding_window="all",
        defaults={"num_key_value_heads": 8},
        inert=TRAINING_KEYS,
        read_fields=read_mixtral,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        LayerStyle(has_sinks=True),
        sliding_window="types",
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rope_theta": 150000.0,
        },
        inert=TRAINING_KEYS | {"initial_context_length"},
        read_fields=read_gpt_oss,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        rope=RopeKeys(has_partial=True),
        output_bias=False,
        defaults={"partial_rotary_factor": 0.5},
        inert=TRAINING_KEYS,
        read_fields=read_glm4_moe,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        LayerStyle(qk_norm="full"),
        RopeKeys(has_partial=True),
        qkv_bias=False,
        output_bias=False,
        defaults={"head_dim": 128},
        constants={"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True},
        inert=TRAINING_KEYS,
        read_fields=read_minimax_m2,
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", LayerStyle(qk_norm="full"), inert=TRAINING_KEYS, read_fields=read_olmoe
    ),
    "BambaForCausalLM": Family(
        "bamba",
        rope=RopeKeys(has_partial=True),
        mlp_bias="mlp_bias",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        inert=TRAINING_KEYS | _MAMBA_INERT,
        read_fields=_read_bamba,
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        LayerStyle(qk_norm="head"),
        qkv_bias=False,
        output_bias=False,
        eps_key="norm_eps",
        defaults=_LFM2_DEFAULTS,
        inert=_LFM2_INERT,
        state_layers=("conv",),
        read_fields=_read_lfm2,
    ),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe",
        LayerStyle(qk_norm="head"),
        qkv_bias=False,
        output_bias=False,
        eps_key="norm_eps",
        defaults=_LFM2_DEFAULTS,
        inert=_LFM2_INERT,
        state_layers=("conv",),
        read_fields=_read_lfm2_moe,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        _QWEN_STYLE,
        RopeKeys(has_partial=True),
        defaults=_QWEN_DEFAULTS | {"norm_topk_prob": True},
        inert=_QWEN_INERT,
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_next,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        _QWEN_STYLE,
        RopeKeys(has_partial=True, has_sections=True),
        defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 4},
        constants={"attn_output_gate": True, "output_gate_type": "swish"},
        inert=_QWEN_INERT,
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_5,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        _QWEN_STYLE,
        RopeKeys(has_partial=True, has_sections=True),
        inner_size_key="moe_intermediate_size",
        defaults=_QWEN_DEFAULTS | {"norm_topk_prob": True},
        constants={"attn_output_gate": True, "output_gate_type": "swish", "norm_topk_prob": True},
        inert=_QWEN_INERT | {"intermediate_size"},
        state_layers=("linear_attention",),
        read_fields=_read_qwen3_5_moe,
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        inert=TRAINING_KEYS,
        read_fields=lambda reader: _read_granite(reader) | read_granite_moe(reader),
    ),
}


@dataclass(frozen=True, slots=True)
class TextPart:
    """A model for texts and images, whose text part is one of the families."""

    inert: frozenset[str]  # keys of the other parts
    ignored_weights: tuple[str, ...]
    prefix: str = "language_model."  # of the names of all weights
    renames: tuple[tuple[str, str], ...] = ()  # parts of names, ours and the checkpoint's
    architecture: str = ""  # of the text part; "": as its config says
    text_inert: frozenset[str] = frozenset()  # keys of the text part without influence
    vision: VisionKind | None = None  # None: images are not supported


_IMAGE_WEIGHTS = ("vision_tower.", "multi_modal_projector.")
_IDEFICS3 = TextPart(
    frozenset(["vision_config", "scale_factor", "vocab_size", "use_reentrant_checkpointing"]),
    ("model.vision_model.", "model.connector."),
    prefix="",
    renames=(("model.", "model.text_model."),),
    architecture="LlamaForCausalLM",
    text_inert=frozenset(
        ["perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler", "rope_interleaved"]
    ),
    vision="idefics3",
)
_QWEN3_VL = TextPart(
    frozenset(["vision_config"]),
    ("model.visual.",),
    prefix="",
    renames=(("model.", "model.language_model."),),
    architecture="Qwen3VLForConditionalGeneration",
    vision="qwen3_vl",
)
TEXT_PARTS: dict[str, TextPart] = {
    "qwen3_vl": _QWEN3_VL,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "gemma3": TextPart(
        frozenset(
            [
                *("vision_config", "mm_tokens_per_image", "image_token_index"),
                *("boi_token_index", "eoi_token_index"),
            ]
        ),
        _IMAGE_WEIGHTS,
    ),
    "mistral3": TextPart(
        frozenset(
            [
                *("vision_config", "image_token_index", "multimodal_projector_bias", "projector_hidden_act"),
                *("spatial_merge_size", "vision_feature_layer"),
            ]
        ),
        _IMAGE_WEIGHTS,
    ),
} | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe"),
    TextPart(
        frozenset(["vision_config"]),
        ("model.visual.", "mtp."),
        prefix="",
        renames=(("model.", "model.language_model."),),
    ),
)
