"""Published config.json texts of the families: which keys are read, which are ignored, which are refused."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.model import ModelConfig, load_model
from engine.model.rope import RotaryEmbedding

SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "embd_pdrop": 0.0,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "interpolate_factor": 1,
    "intermediate_size": 8192,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 200064,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "vocab_size": 256000,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": [*(["sliding_attention"] * 3), "full_attention"] * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "vocab_size": 102400,
}
GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 8192,
    "logits_scaling": 10,
    "layer_types": ["attention"] * 40,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 80,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 40,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "output_router_logits": False,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01,
    "vocab_size": 100352,
    "shared_intermediate_size": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "initializer_range": 0.02,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
STARCODER2 = {
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "norm_type": "layer_norm",
    "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "mlp_type": "default",
    "max_position_embeddings": 16384,
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4,
    "residual_dropout": 0.1,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}


def parse(base: dict[str, Any], **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(base | overrides)


def test_published_configs_are_read() -> None:
    smollm3 = parse(SMOLLM3)
    assert smollm3.tie_word_embeddings
    assert [rope is None for rope in smollm3.layer_ropes] == [False, False, False, True] * 9
    phi4 = parse(PHI4_MINI)
    assert (phi4.max_model_len, phi4.rope.factor, phi4.rope.rotary_dim(phi4.head_dim)) == (131072, 32, 96)
    gemma2 = parse(GEMMA2)
    assert (gemma2.soft_cap, gemma2.logits_cap, gemma2.attention_scale) == (50, 30, 1 / 16)
    assert gemma2.sliding_windows == (4096, None) * 13
    gemma3 = parse(GEMMA3)
    assert gemma3.sliding_windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert {rope.theta for rope in gemma3.layer_ropes if rope} == {1e4, 1e6}
    gemma3_4b = parse(GEMMA3_4B)
    assert (gemma3_4b.num_attention_heads, gemma3_4b.max_model_len, gemma3_4b.dtype) == (
        8,
        131072,
        "bfloat16",
    )
    assert {rope.factor for rope in gemma3_4b.layer_ropes if rope} == {1, 8}
    granite4 = parse(GRANITE4)
    assert (granite4.intermediate_size, granite4.logits_multiplier) == (8192, 0.1)
    cohere2 = parse(COHERE2)
    assert [rope is None for rope in cohere2.layer_ropes] == [False, False, False, True] * 8
    exaone4 = parse(EXAONE4)
    assert exaone4.sliding_windows == (4096, 4096, 4096, None) * 16 and exaone4.max_model_len == 131072
    starcoder2 = parse(STARCODER2)
    assert starcoder2.mlp_bias and starcoder2.tie_word_embeddings


@pytest.mark.parametrize(
    ("base", "overrides", "named"),
    [
        (SMOLLM3, {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        (PHI4_MINI, {"partial_rotary_factor": 0.7}, "rotates pairs|long"),
        (PHI4_MINI, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (PHI4_MINI, {"full_attn_mod": 2}, "full_attn_mod=2"),
        (PHI4_MINI, {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor is missing"),
        (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA3_4B, {"audio_config": {"a": 1}}, "audio_config"),
        (GEMMA3_4B, {"text_config": None}, "text_config=None must be an object"),
        (GRANITE4, {"layer_types": ["attention"] * 39 + ["mamba"]}, "layer_types"),
        (GRANITE4, {"num_local_experts": 8}, "num_local_experts=8"),
        (GRANITE4, {"position_embedding_type": "nope"}, "position_embedding_type='nope'"),
        (COHERE2, {"use_qk_norm": True}, "use_qk_norm=True"),
        (COHERE2, {"use_parallel_block": False}, "use_parallel_block=False"),
        (COHERE2, {"order_of_interleaved_layers": "global_first"}, "order_of_interleaved_layers"),
        (EXAONE4, {"layer_types": None}, "sliding_window_pattern='LLLG'"),
        (STARCODER2, {"mlp_type": "gated"}, "mlp_type='gated'"),
        (STARCODER2, {"norm_type": "rms_norm"}, "norm_type='rms_norm'"),
    ],
)
def test_a_value_that_changes_arithmetic_is_refused(
    base: dict[str, Any], overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(base, **overrides)


def test_a_checkpoint_that_no_code_fits_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXAONE4 | {"mtp_heads": 2, "clip_qkv": 8.0}))
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"does not support: clip_qkv=8\.0, mtp_heads=2"):
        load_model(tmp_path)
    assert time.perf_counter() - start < 1


def test_longrope_takes_long_factors_where_the_context_may_be_long() -> None:
    rope = RotaryEmbedding(parse(PHI4_MINI).rope, 128, torch.device("cpu"))
    factor = math.sqrt(1 + math.log(32) / math.log(4096))
    for max_len, angle in ((None, 1.5), (4096, 3.0), (4097, 1.5)):
        if max_len is not None:
            rope.limit(max_len)
        cos = rope.compute(torch.tensor([3]), [1], [4]).cos[0, 0]
        assert cos[0].item() == pytest.approx(factor * math.cos(angle))
        assert cos[48:64].eq(1).all(), "a quarter of each head is not rotated"
