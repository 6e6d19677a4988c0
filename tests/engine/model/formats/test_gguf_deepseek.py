"""GGUF files of DeepSeek V2 and V3, newer and older ones, against the logits of transformers.

The keys and the layout of tensors are those of llama.cpp's converter. Newer files have the halves of kv_b_proj apart,
the one of the keys transposed, and the sizes of the cache; older ones have kv_b_proj and the sizes of the heads.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.model import load_model
from tests.engine.model.drive import Driver, compute_expected, make_transformers_model
from tests.engine.model.formats.gguf_files import add_value

PROMPT = [(7 * position + 3) % 130 + 1 for position in range(70)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e3}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.7}
SIZES = {"qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64, "hidden_size": 64, "qk_rope_head_dim": 12}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("deepseek_v2", {"q_lora_rank": None, "rope_parameters": YARN}),
    "v2-groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "v3": ("deepseek_v3", {"rope_parameters": YARN, "routed_scaling_factor": 2.5}),
}
NAMES = {
    "embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b",
    "q_a_layernorm": "attn_q_a_norm", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm",
    "o_proj": "attn_output", "mlp.gate": "ffn_gate_inp", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "shared_experts.gate_proj": "ffn_gate_shexp", "experts.down_proj": "ffn_down_exps",
    "shared_experts.up_proj": "ffn_up_shexp", "shared_experts.down_proj": "ffn_down_shexp",
}


def list_keys(config: Any, is_new: bool) -> dict[str, Any]:
    keys = config.kv_lora_rank + config.qk_rope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.head_count_kv": 1 if is_new else config.num_attention_heads, "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": keys[0 if is_new else 1],
        "attention.value_length": config.kv_lora_rank if is_new else config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim, "rope.freq_base": config.rope_parameters["rope_theta"],
        "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size, "leading_dense_block_count": 1,
        "expert_shared_count": config.n_shared_experts, "expert_weights_scale": float(config.routed_scaling_factor),
    }
    if is_new:
        found |= {"attention.key_length_mla": keys[1], "attention.value_length_mla": config.v_head_dim}
    if config.q_lora_rank:
        found["attention.q_lora_rank"] = config.q_lora_rank
    if (config.n_group or 1) > 1:
        found |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.model_type == "deepseek_v3":
        found |= {"expert_gating_func": 2, "expert_weights_norm": True}
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        entries = {"type": "yarn", "factor": rope["factor"], "yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}
        entries["original_context_length"] = rope["original_max_position_embeddings"]
        found |= {f"rope.scaling.{key}": value for key, value in entries.items()}
    return found


def list_tensors(model: PreTrainedModel, is_new: bool) -> dict[str, torch.Tensor]:
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        stem = name.removesuffix(".weight")
        if stem.endswith("kv_b_proj") and is_new:
            heads = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank)
            found[f"{layer}attn_k_b.weight"] = heads[:, : config.qk_nope_head_dim].transpose(1, 2)
            found[f"{layer}attn_v_b.weight"] = heads[:, config.qk_nope_head_dim :]
        elif stem.endswith("kv_b_proj"):
            found[f"{layer}attn_kv_b.weight"] = tensor
        elif stem.endswith("gate_up_proj"):
            found[f"{layer}ffn_gate_exps.weight"], found[f"{layer}ffn_up_exps.weight"] = tensor.chunk(2, dim=1)
        elif stem.endswith("e_score_correction_bias"):
            found[f"{layer}exp_probs_b.bias"] = tensor
        else:
            parts = stem.split(".")
            key = next(each for each in (".".join(parts[-2:]), parts[-1]) if each in NAMES)
            found[f"{layer}{NAMES[key]}.weight"] = tensor
    return found


def write(model: PreTrainedModel, target: Path, is_new: bool, kind: Type = Type.F32, **keys: Any) -> None:
    writer = gguf.GGUFWriter(target, "deepseek2")
    for key, value in (list_keys(model.config, is_new) | keys).items():
        add_value(writer, f"deepseek2.{key}", value)
    add_value(writer, "tokenizer.ggml.eos_token_id", 2)
    for name, tensor in list_tensors(model, is_new).items():
        values = tensor.float().contiguous().numpy()
        if values.ndim > 1 and values.shape[-1] % 32 == 0 and kind != Type.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values.astype(np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, is_new: bool, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    model = make_transformers_model(family, **SIZES | changes)
    write(model, tmp_path / "model.gguf", is_new)
    found = Driver(load_model(tmp_path / "model.gguf")).step({"a": PROMPT})["a"]
    torch.testing.assert_close(found, compute_expected(model, PROMPT), atol=1e-4, rtol=0)


def test_both_layouts_of_a_rounded_file_are_decoded(tmp_path: Path) -> None:
    """Keys are transposed before they are rounded, so the layouts differ by the rounding alone."""
    model = make_transformers_model("deepseek_v3", **SIZES)
    expected = compute_expected(model, PROMPT)
    for is_new in (True, False):
        write(model, tmp_path / f"{is_new}.gguf", is_new, Type.Q8_0)
        found = Driver(load_model(tmp_path / f"{is_new}.gguf")).step({"a": PROMPT})["a"]
        assert torch.cosine_similarity(found, expected, dim=-1).median() > 0.99


def test_another_gating_function_is_refused(tmp_path: Path) -> None:
    model = make_transformers_model("deepseek_v2", **SIZES)
    write(model, tmp_path / "model.gguf", True, expert_gating_func=3)
    with pytest.raises(ConfigError, match="expert_gating_func=3 is not supported; supported: 1, 2"):
        load_model(tmp_path / "model.gguf")
