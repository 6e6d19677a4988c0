"""Reads the keys of mixture-of-experts families from a config.json."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.layer_spec import LayerStyle
from engine.model.moe_spec import MoENames, MoESpec
from kernels.ops import GatedActivation

# Keys that matter for training only.
TRAINING_KEYS = frozenset(
    [
        *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise"),
    ]
)
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_MIXTRAL_NAMES = MoENames(
    block="block_sparse_moe", correction_bias="e_score_correction_bias", experts=("w1", "w3", "w2")
)
_GRANITE_NAMES = MoENames(
    block="block_sparse_moe",
    router="router.layer",
    layout="stacked",
    experts=("input_linear", "output_linear"),
    shared="shared_mlp",
)


def read_mixtral(reader: ConfigReader) -> dict[str, Any]:
    """Mixtral: weights are normalized."""
    spec = _read_spec(reader, "intermediate_size", is_normalized=True, names=_MIXTRAL_NAMES)
    return _in_all_layers(reader, spec)


def read_olmoe(reader: ConfigReader) -> dict[str, Any]:
    """OLMoE: softmax weights, normalized if the config says so."""
    is_normalized = reader.boolean("norm_topk_prob", False)
    return _in_all_layers(reader, _read_spec(reader, "intermediate_size", is_normalized=is_normalized))


def read_qwen3_moe(reader: ConfigReader) -> dict[str, Any]:
    """Qwen3-MoE: as OLMoE, with dense layers at listed places or in regular distances."""
    is_normalized = reader.boolean("norm_topk_prob", False)
    spec = _read_spec(reader, "moe_intermediate_size", is_normalized=is_normalized)
    return _in_sparse_layers(reader, spec)


def read_qwen2_moe(reader: ConfigReader) -> dict[str, Any]:
    """Qwen2-MoE: as Qwen3-MoE, with a gated shared expert."""
    spec = _read_spec(
        reader,
        "moe_intermediate_size",
        is_normalized=reader.boolean("norm_topk_prob", False),
        shared_size=reader.integer("shared_expert_intermediate_size"),
        is_shared_gated=True,
        names=MoENames(shared="shared_expert"),
    )
    return _in_sparse_layers(reader, spec)


def read_granite_moe(reader: ConfigReader, shared_size: int = 0) -> dict[str, Any]:
    """Granite-MoE: softmax over the chosen experts."""
    spec = _read_spec(
        reader, "intermediate_size", score="topk_softmax", names=_GRANITE_NAMES, shared_size=shared_size
    )
    return _in_all_layers(reader, spec)


def read_lfm2_moe(reader: ConfigReader) -> dict[str, Any]:
    """LFM2-MoE: sigmoids, chosen with a correction; dense layers first."""
    spec = _read_spec(
        reader,
        "moe_intermediate_size",
        score="sigmoid",
        is_normalized=reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
        has_correction_bias=reader.boolean("use_expert_bias", True),
        names=MoENames(correction_bias="expert_bias", experts=("w1", "w3", "w2")),
    )
    num_dense = reader.integer("num_dense_layers", 2, minimum=0)
    num_layers = reader.integer("num_hidden_layers")
    return {"layer_moes": tuple(None if layer < num_dense else spec for layer in range(num_layers))}


def read_minimax_m2(reader: ConfigReader) -> dict[str, Any]:
    """MiniMax M2: normalized sigmoids, chosen with a correction."""
    spec = _read_spec(
        reader,
        "intermediate_size",
        score="sigmoid",
        is_normalized=True,
        has_correction_bias=True,
        names=_MIXTRAL_NAMES,
    )
    return _in_all_layers(reader, spec)


def read_glm4_moe(reader: ConfigReader) -> dict[str, Any]:
    """GLM-4.5 to 4.7: sigmoids chosen with a correction in the best groups, and a shared expert; dense layers first."""
    inner_size = reader.integer("moe_intermediate_size")
    num_shared = reader.integer("n_shared_experts", 1, minimum=0)
    num_groups = reader.integer("n_group", 1)
    num_chosen = reader.integer("topk_group", 1)
    spec = _read_spec(
        reader,
        "moe_intermediate_size",
        score="sigmoid",
        is_normalized=reader.boolean("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen,
        has_correction_bias=True,
        shared_size=num_shared * inner_size,
    )
    if spec.num_experts % num_groups or spec.num_experts < 2 * num_groups:
        raise reader.error(
            "n_group", num_groups, f"must divide {spec.num_experts} experts into groups of at least 2"
        )
    if num_chosen > num_groups or spec.top_k > num_chosen * (spec.num_experts // num_groups):
        raise reader.error(
            "topk_group", num_chosen, f"must leave {spec.top_k} experts in at most {num_groups} groups"
        )
    num_dense = reader.integer("first_k_dense_replace", 1, minimum=0)
    num_layers = reader.integer("num_hidden_layers")
    style = LayerStyle(qk_norm="head") if reader.boolean("use_qk_norm", False) else LayerStyle()
    moes = tuple(None if layer < num_dense else spec for layer in range(num_layers))
    num_mtp_layers = reader.integer("num_nextn_predict_layers", 0, minimum=0)
    return {"style": style, "layer_moes": moes, "num_mtp_layers": num_mtp_layers}


def read_gpt_oss(reader: ConfigReader) -> dict[str, Any]:
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
    spec = _read_spec(
        reader,
        "intermediate_size",
        score="topk_softmax",
        has_bias=True,
        activation=GatedActivation(reader.number("swiglu_alpha", 1.702), limit),
        names=names,
    )
    reader.constant("experts_per_token", spec.top_k)
    if method is not None:
        for key in ("hidden_size", "intermediate_size"):
            if (size := reader.integer(key)) % 32:
                raise reader.error(key, size, "must be a multiple of 32, the block size of mxfp4")
    return _in_all_layers(reader, spec)


def _read_spec(reader: ConfigReader, inner_key: str, **fields: Any) -> MoESpec:
    """Read the sizes; `fields` are further fields of MoESpec."""
    counts = {key: reader.integer(key) for key in _COUNT_KEYS if reader.take(key) is not None}
    # Families use different names, and transformers writes its own.
    num_experts = next(iter(counts.values())) if counts else reader.integer(_COUNT_KEYS[0])
    for key, count in counts.items():
        if count != num_experts:
            raise reader.error(key, count, f"contradicts {next(iter(counts))}={num_experts}")
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error(
            "num_experts_per_tok", top_k, f"must be at most {num_experts}, the number of experts"
        )
    return MoESpec(num_experts, top_k, reader.integer(inner_key), **fields)


def _in_all_layers(reader: ConfigReader, spec: MoESpec) -> dict[str, Any]:
    return {"layer_moes": (spec,) * reader.integer("num_hidden_layers")}


def _in_sparse_layers(reader: ConfigReader, spec: MoESpec) -> dict[str, Any]:
    """Read which layers are dense: those of `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    num_layers = reader.integer("num_hidden_layers")
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise reader.error("mlp_only_layers", dense, "must be a list of layer numbers")
    moes = (None if layer in dense or (layer + 1) % step else spec for layer in range(num_layers))
    return {"layer_moes": tuple(moes)}
