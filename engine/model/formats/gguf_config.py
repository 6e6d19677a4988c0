"""The config.json that the metadata of a GGUF file stands for, by architecture.

Names of keys and what they mean: the `gguf` package of the ggml project, and llama.cpp's converters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import ConfigError

# Metadata below the architecture's name -> field of config.json. Other keys are refused by name.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Keys that repeat others, or that inform only.
_UNUSED = ("vocab_size", "attention.value_length", "rope.scaling.finetuned", "rope.dimension_sections", "pooling_type")
_SOFTMAX, _SIGMOID = 1, 2  # values of expert_gating_func


class Metadata:
    """The metadata of a file's architecture; `take_rest` returns what was not read."""

    def __init__(
        self, name: str, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
    ) -> None:
        prefix = f"{name}."
        self.name, self.shapes, self.where = name, shapes, where
        self.values = {
            key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)
        }
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default when the key is absent."""
        self._taken.add(key)
        return self.values.get(key, default)

    def take_rest(self) -> dict[str, Any]:
        """Return the values that were not taken, by their whole names."""
        return {f"{self.name}.{key}": value for key, value in self.values.items() if key not in self._taken}

    def require(self, key: str) -> Any:
        """Return a value."""
        if key not in self.values:
            raise ConfigError(f"{self.where}: {self.name}.{key} is missing")
        return self.take(key)

    def has(self, tensor: str) -> bool:
        """Whether some layer, or the file, has a tensor of this name."""
        return any(name == tensor or name.split(".", 2)[-1] == tensor for name in self.shapes)

    def list_layers(self, tensor: str) -> list[int]:
        parts = [name.split(".", 2) for name in self.shapes if name.startswith("blk.")]
        return sorted(int(layer) for _, layer, name in parts if name == tensor)


Complete = Callable[[Metadata, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How the files of one general.architecture are read."""

    name: str  # in config.json
    # Rows of queries and keys are stored with the two values that RoPE rotates side by side.
    is_interleaved: bool = False
    has_partial_rope: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)  # in addition to those of all architectures
    implied: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that no file contains
    # Takes the metadata and the fields so far, and returns further fields.
    complete: Complete | None = None


def make_config(architecture: GGUFArchitecture, metadata: Metadata) -> dict[str, Any]:
    """Return what config.json would contain; unknown keys keep their names, so that they are refused."""
    names = {**_FIELDS, **architecture.fields}
    for key in ("context_length", "embedding_length", "attention.head_count"):
        metadata.require(key)
    config = {name: metadata.take(key) for key, name in names.items() if key in metadata.values}
    num_layers = int(metadata.require("block_count")) - int(metadata.take("nextn_predict_layers", 0))
    config |= {"architectures": [architecture.name], "num_hidden_layers": num_layers, **architecture.implied}
    config["vocab_size"] = metadata.shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in metadata.shapes
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if isinstance(config.get(key), list):
            config[key] = _find_single(metadata, key, config[key])
    if config.get("sliding_window") == 0:  # stands for none
        del config["sliding_window"]
    _read_pattern(metadata, config)
    if architecture.complete is not None:
        config |= architecture.complete(metadata, config)
    config |= _read_rope(metadata, config, architecture.has_partial_rope)
    for key in _UNUSED:
        metadata.take(key)
    return config | metadata.take_rest()


def _find_single(metadata: Metadata, key: str, values: list[Any]) -> Any:
    """Return the only value of all layers; 0 stands for layers without it."""
    found = set(values) - {0}
    if len(found) > 1:
        raise ConfigError(
            f"{metadata.where}: {key}={values!r} differs between layers, which is not supported"
        )
    return found.pop() if found else None


def _read_pattern(metadata: Metadata, config: dict[str, Any]) -> None:
    pattern = metadata.take("attention.sliding_window_pattern")
    if isinstance(pattern, list) and "sliding_window" in config:
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[bool(each)] for each in pattern[: config["num_hidden_layers"]]]
    elif pattern is not None and not isinstance(pattern, list):
        config["sliding_window_pattern"] = pattern


def _read_rope(metadata: Metadata, config: dict[str, Any], has_partial: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    size, head_dim = metadata.take("rope.dimension_count"), config.get("head_dim")
    if head_dim is None and config.get("num_attention_heads"):
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    if size not in (None, 0, head_dim):
        if not has_partial:
            raise ConfigError(
                f"{metadata.where}: {metadata.name}.rope.dimension_count={size} must be {head_dim}, the size of a head"
            )
        found["partial_rotary_factor"] = size / head_dim
    if scaling := _read_scaling(metadata):
        found["rope_scaling"] = config.get("rope_scaling", {}) | scaling
    return found


def _read_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Read rope.scaling.*; keys that the type does not use are left, so that they are refused."""

    def take(key: str, default: Any = None) -> Any:
        return metadata.take(f"rope.scaling.{key}", default)

    if "rope_factors_long.weight" in metadata.shapes:
        take("type")
        return {"rope_type": "longrope", "attention_factor": take("attn_factor")} | {
            "original_max_position_embeddings": take("original_context_length")
        }
    old_factor = metadata.take("rope.scale_linear")  # in old files
    kind = take("type", "none" if old_factor in (None, 1.0) else "linear")
    if kind == "none":
        take("original_context_length")  # says nothing without a scaling
        return None
    found = {"rope_type": kind, "factor": take("factor", old_factor)}
    if kind == "yarn":
        found["original_max_position_embeddings"] = take("original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if (value := take(f"yarn_{key}")) is not None:
                found[key] = value
        share = take("yarn_attn_factor", take("attn_factor", 1.0))
        if share != 1.0:  # multiplies what YaRN prescribes
            found["attention_factor"] = share * (0.1 * math.log(found["factor"]) + 1.0)
    return found


def _complete_llama(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    if "num_experts" in config:
        return {"architectures": ["MixtralForCausalLM"]}
    return {"attention_bias": metadata.has("attn_q.bias"), "mlp_bias": metadata.has("ffn_up.bias")}


def _complete_biases(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": metadata.has("attn_q.bias"),
        "attention_out_bias": metadata.has("attn_output.bias"),
    }


def _complete_starcoder2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": metadata.has("attn_q.bias")}


def _complete_gemma(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The scale of the scores is in no key: the two models of 27B divide the hidden size by the heads."""
    is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[metadata.name]
    whole = config["hidden_size"] // config["num_attention_heads"]
    fields: dict[str, Any] = {"query_pre_attn_scalar": whole if is_27b else config["head_dim"]}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields[name] = metadata.take(name)
    return fields


def _complete_olmo2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3 has OLMo 2's architecture and a window."""
    if "sliding_window" not in config:
        return {}
    return {"architectures": ["Olmo3ForCausalLM"]} | _take_local_base(metadata)


def _complete_gemma3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _complete_gemma(metadata, config) | _take_local_base(metadata)


def _take_local_base(metadata: Metadata) -> dict[str, Any]:
    base = metadata.take("rope.freq_base_swa")
    return {} if base is None else {"rope_local_base_freq": base}


def _complete_ministral3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Further RoPE settings; those of `_read_rope` are added to them."""
    scale = metadata.take("rope.scaling.yarn_log_multiplier")
    return {
        "rope_scaling": {
            "mscale": scale,
            "mscale_all_dim": scale,
            "llama_4_scaling_beta": metadata.take("attention.temperature_scale"),
        }
    }


def _complete_moe(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Read what mixtures with shared experts, dense layers and corrections have."""
    pairs = {
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    }
    return {field: metadata.take(key) for key, field in pairs.items() if key in metadata.values}


def _expect_gating(metadata: Metadata, wanted: int) -> None:
    found = metadata.take("expert_gating_func", wanted)
    if found != wanted:
        raise ConfigError(
            f"{metadata.where}: {metadata.name}.expert_gating_func={found} is not supported; supported: {wanted}"
        )


def _complete_glm4_moe(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    _expect_gating(metadata, _SIGMOID)
    fields = {
        "attention_bias": metadata.has("attn_q.bias"),
        "use_qk_norm": metadata.has("attn_q_norm.weight"),
        "num_nextn_predict_layers": metadata.take("nextn_predict_layers", 0),
    }
    return _complete_moe(metadata, config) | fields


def _complete_deepseek2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek V2, or V3 and its relatives, whose experts have sigmoids. Newer files have a key length of the cache.

    The number of key heads is 1 in newer files, and that of the queries in older ones.
    """
    gating = metadata.take("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise ConfigError(
            f"{metadata.where}: {metadata.name}.expert_gating_func={gating} is not supported; supported: 1, 2"
        )
    is_v3 = gating == _SIGMOID
    rope_size = metadata.require("rope.dimension_count")
    fields = _complete_moe(metadata, config) | {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_size,
        "kv_lora_rank": metadata.require("attention.kv_lora_rank"),
        "q_lora_rank": metadata.take("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": metadata.take("attention.key_length_mla", config.get("head_dim")) - rope_size,
        "v_head_dim": metadata.take("attention.value_length_mla", metadata.take("attention.value_length")),
    }
    fields.setdefault("norm_topk_prob", False)
    if not is_v3 and fields.get("n_group", 1) > 1:
        fields["topk_method"] = "group_limited_greedy"
    # A tenth of the factor is stored, since YaRN multiplies it with a tenth of the logarithm.
    if (scale := metadata.take("rope.scaling.yarn_log_multiplier")) is not None:
        fields["rope_scaling"] = {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
    return fields


def _complete_gpt_oss(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The file does not say that the borders of YaRN's range are not rounded."""
    return _complete_inner(metadata, config) | {"rope_scaling": {"truncate": False}}


def _complete_inner(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Experts with the size of the family's only MLP."""
    size = config.pop("moe_intermediate_size", None)
    return {} if size is None else {"intermediate_size": size}


def _complete_minimax(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    _expect_gating(metadata, _SIGMOID)
    return _complete_inner(metadata, config)


def _complete_granite(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Granite 3 and 4, and Bamba, which llama.cpp takes for one of them. Names of states stand in dense files, too."""
    with_states = metadata.list_layers("ssm_in.weight")
    heads = metadata.take("ssm.time_step_rank", 1)
    inner = metadata.take("ssm.inner_size", 0)
    states = {
        "mamba_n_heads": heads, "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"], "mamba_d_conv": metadata.take("ssm.conv_kernel"),
        "mamba_d_state": metadata.take("ssm.state_size"), "mamba_n_groups": metadata.take("ssm.group_count"),
        "mamba_conv_bias": metadata.has("ssm_conv1d.bias"), "mamba_proj_bias": metadata.has("ssm_in.bias"),
    }
    shared = metadata.take("expert_shared_feed_forward_length")
    layers = range(config["num_hidden_layers"])
    if with_states and "attention_multiplier" not in config:
        full = [layer for layer in layers if layer not in with_states]
        return states | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": full}
    has_experts = config.get("num_experts", 0) > 0
    if not with_states and not (has_experts and shared):
        return {"attention_bias": metadata.has("attn_q.bias"), "mlp_bias": metadata.has("ffn_up.bias")}
    types = ["mamba" if layer in with_states else "attention" for layer in layers]
    fields = {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": types}
    fields["num_local_experts"] = config.pop("num_experts", 0)
    fields["shared_intermediate_size"] = shared or config["intermediate_size"]
    if not with_states:
        return fields | {"position_embedding_type": "rope"}
    return fields | states


def _complete_lfm2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    with_conv = metadata.list_layers("shortconv.conv.weight")
    types = ["conv" if each in with_conv else "full_attention" for each in range(config["num_hidden_layers"])]
    fields = {
        "layer_types": types,
        "norm_eps": config.pop("rms_norm_eps"),
        "conv_L_cache": metadata.take("shortconv.l_cache"),
        "conv_bias": metadata.has("shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,  # the size is the final one
    }
    if metadata.name == "lfm2moe":
        _expect_gating(metadata, _SIGMOID)
        del fields["block_auto_adjust_ff_dim"]
        fields |= {
            "num_dense_layers": metadata.take("leading_dense_block_count", 0),
            "use_expert_bias": metadata.has("exp_probs_b.bias"),
        }
    return fields


def _complete_qwen_delta(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    heads = metadata.require("ssm.time_step_rank")
    fields = {
        "linear_conv_kernel_dim": metadata.take("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.take("ssm.state_size"),
        "linear_num_key_heads": metadata.take("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata.require("ssm.inner_size") // heads,
        "full_attention_interval": metadata.take("full_attention_interval", 4),
    }
    recurrent = metadata.take("attention.recurrent_layers")
    if recurrent is not None:
        kinds = ("full_attention", "linear_attention")
        fields["layer_types"] = [kinds[bool(each)] for each in recurrent[: config["num_hidden_layers"]]]
    return fields | _complete_moe(metadata, config)


_GRANITE = GGUFArchitecture(
    "GraniteForCausalLM",
    is_interleaved=True,
    has_partial_rope=True,
    fields=_EXPERTS
    | {
        "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    },
    complete=_complete_granite,
)
_QWEN3_NEXT = GGUFArchitecture(
    "Qwen3NextForCausalLM", has_partial_rope=True, fields=_EXPERTS, complete=_complete_qwen_delta
)
ARCHITECTURES = {
    "llama": GGUFArchitecture(
        "LlamaForCausalLM", is_interleaved=True, fields=_EXPERTS, complete=_complete_llama
    ),
    "mistral3": GGUFArchitecture("Ministral3ForCausalLM", is_interleaved=True, complete=_complete_ministral3),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM"),
    "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM", fields=_EXPERTS, complete=_complete_moe),
    "qwen3moe": GGUFArchitecture(
        "Qwen3MoeForCausalLM", fields=_EXPERTS, implied={"norm_topk_prob": True}, complete=_complete_moe,
    ),
    "qwen3next": _QWEN3_NEXT,
    "qwen35": replace(_QWEN3_NEXT, name="Qwen3_5ForCausalLM"),
    "qwen35moe": replace(_QWEN3_NEXT, name="Qwen3_5MoeForCausalLM"),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", is_interleaved=True),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, name="GraniteMoeForCausalLM"),
    "granitehybrid": replace(_GRANITE, name="GraniteMoeHybridForCausalLM"),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", has_partial_rope=True),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM", complete=_complete_olmo2),
    "olmoe": GGUFArchitecture("OlmoeForCausalLM", fields=_EXPERTS),
    "exaone4": GGUFArchitecture("Exaone4ForCausalLM"),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", complete=_complete_gemma),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", complete=_complete_gemma3),
    "cohere2": GGUFArchitecture(
        "Cohere2ForCausalLM",
        fields={"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
    ),
    "seed_oss": GGUFArchitecture("SeedOssForCausalLM", complete=_complete_biases),
    "starcoder2": GGUFArchitecture(
        "Starcoder2ForCausalLM",
        fields={"attention.layer_norm_epsilon": "norm_epsilon"},
        complete=_complete_starcoder2,
    ),
    "lfm2": GGUFArchitecture("Lfm2ForCausalLM", complete=_complete_lfm2),
    "lfm2moe": GGUFArchitecture("Lfm2MoeForCausalLM", fields=_EXPERTS, complete=_complete_lfm2),
    "gpt-oss": GGUFArchitecture("GptOssForCausalLM", fields=_EXPERTS, complete=_complete_gpt_oss),
    "glm4moe": GGUFArchitecture(
        "Glm4MoeForCausalLM", has_partial_rope=True, fields=_EXPERTS, complete=_complete_glm4_moe
    ),
    "deepseek2": GGUFArchitecture(
        "DeepseekV2ForCausalLM", fields=_EXPERTS, complete=_complete_deepseek2
    ),
    "minimax-m2": GGUFArchitecture(
        "MiniMaxM2ForCausalLM", has_partial_rope=True, fields=_EXPERTS, complete=_complete_minimax
    ),
}
