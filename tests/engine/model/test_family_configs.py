"""Published config.json texts of the families: which keys are read, which are ignored, which are refused."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.device.kv_cache import compute_bytes_per_block
from engine.errors import ConfigError
from engine.kv_cache_spec import KVCacheSpec
from engine.model import ModelConfig, load_model
from engine.model.formats.quant_config import WeightFormat
from engine.model.rope import RotaryEmbedding

# As they are published.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
SMOLLM3, PHI4_MINI, GEMMA2, GEMMA3 = (PUBLISHED[name] for name in ("smollm3", "phi4_mini", "gemma2", "gemma3"))
COHERE2, EXAONE4, GRANITE4 = (PUBLISHED[name] for name in ("cohere2", "exaone4", "granite4"))
GEMMA3_4B, STARCODER2, QWEN3_6 = (PUBLISHED[name] for name in ("gemma3_4b", "starcoder2", "qwen3_6_27b"))
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "dtype": "bfloat16", "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 204800,
    "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
    "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": 64, "use_mtp": True,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_qk_norm": True, "use_routing_bias": True,
    "vocab_size": 200064, "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
QWEN3_6_TEXT = QWEN3_6["text_config"]


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
    assert (gemma3_4b.num_attention_heads, gemma3_4b.max_model_len, gemma3_4b.dtype) == (8, 131072, "bfloat16")
    assert {rope.factor for rope in gemma3_4b.layer_ropes if rope} == {1, 8}
    granite4 = parse(GRANITE4)
    assert (granite4.intermediate_size, granite4.logits_multiplier) == (8192, 0.1)
    cohere2 = parse(COHERE2)
    assert [rope is None for rope in cohere2.layer_ropes] == [False, False, False, True] * 8
    exaone4 = parse(EXAONE4)
    assert exaone4.sliding_windows == (4096, 4096, 4096, None) * 16 and exaone4.max_model_len == 131072
    qwen3_6 = parse(QWEN3_6)
    assert [state is None for state in qwen3_6.layer_states] == [False, False, False, True] * 16
    assert sum(state.cache_spec.num_bytes for state in qwen3_6.layer_states if state) > 48 * 48 * 2**16
    assert (qwen3_6.rope.rotary_dim(qwen3_6.head_dim), qwen3_6.weight_renames[0][0]) == (64, "model.")
    scaling = {"attn_factor": 0.8782488562869419, "factor": 4.0, "rope_type": "yarn"}
    distilled = parse(PUBLISHED["qwen3"], rope_scaling=scaling | {"original_max_position_embeddings": 32768})
    assert distilled.rope.attention_factor == pytest.approx(1.0)
    minimax = parse(MINIMAX_M2)
    assert (minimax.rope.rotary_dim(128), minimax.weight_format) == (64, WeightFormat("fp8", block=(128, 128)))
    starcoder2 = parse(STARCODER2)
    assert starcoder2.mlp_bias and starcoder2.tie_word_embeddings


def test_models_with_latents_have_one_key_per_token_and_their_own_scale() -> None:
    v3, lite = parse(PUBLISHED["deepseek_v3"]), parse(PUBLISHED["deepseek_v2_lite"])
    kimi = parse(PUBLISHED["deepseek_v3"], model_type="kimi_k2", n_group=1, topk_group=1, num_attention_heads=64,
                 num_key_value_heads=64, num_nextn_predict_layers=0)  # fmt: skip
    for config in (v3, lite, kimi):
        (spec,) = {spec.kv_spec for spec in config.layer_specs}
        assert (spec.num_kv_heads, spec.head_size, spec.has_values) == (1, 576, False)
        # Keys and values padded to one size take 2 * 192 numbers for each head.
        padded = [KVCacheSpec(config.num_attention_heads, 192, None)]
        sizes = [compute_bytes_per_block(each, 16, torch.bfloat16) for each in ([spec], padded)]
        assert sizes[0] == 16 * 576 * 2 and sizes[1] > config.num_attention_heads / 2 * sizes[0]
    assert v3.layer_specs[0].scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert lite.layer_specs[0].scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert [spec.moe is None for spec in v3.layer_specs] == [True] * 3 + [False] * 58
    moe = v3.layer_specs[-1].moe
    assert moe is not None and (moe.num_groups, moe.num_chosen_groups, moe.shared_size) == (8, 4, 2048)
    assert v3.num_mtp_layers == 1 and v3.max_model_len == 163840


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 is not supported; supported: 16"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True"), ({"topk_method": "best"}, "topk_method='best'"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"), ({"attention_bias": True}, "attention_bias=True"),
        ({"index_topk": 2048}, "index_topk=2048"), ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ],
)
def test_what_the_latent_families_do_not_compute_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(PUBLISHED["deepseek_v2_lite"], **change)


def test_a_config_of_qwen2_5_vl_may_have_text_and_images_in_one_object() -> None:
    """As published before transformers 5."""
    text = {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "hidden_act": "silu",
        "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 70, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "initializer_range": 0.02, "use_cache": True,
    }  # fmt: skip
    outer = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
        "image_token_id": 151655, "video_token_id": 151656, "tie_word_embeddings": True, "vision_config": {"depth": 32},
        "transformers_version": "4.41.2",
    }  # fmt: skip
    flat = parse(text | outer)
    nested = parse(outer, text_config=text | {"model_type": "qwen2_5_vl_text"})
    assert flat.vision is not None and flat.vision.image_token_id == 151655
    assert (flat.rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24 and flat.sliding_windows == nested.sliding_windows)
    assert replace(flat, vision=None) == replace(nested, vision=None)
    older = {key: value for key, value in outer.items() if key != "image_token_id"} | {"image_token_index": 151655}
    assert parse(older, text_config=text).vision.image_token_id == 151655  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="new_setting"):
        parse(text | outer, new_setting=3)


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
        (GRANITE4, {"layer_types": ["attention"] * 39 + ["rwkv"]}, "layer_types"),
        (GRANITE4, {"layer_types": ["mamba"] * 40}, "at least one attention layer"),
        (GRANITE4, {"layer_types": ["attention", "mamba"] * 20, "mamba_d_conv": 7}, "mamba_d_conv=7"),
        (GRANITE4, {"normalization_function": "layernorm"}, "normalization_function='layernorm'"),
        (QWEN3_6_TEXT, {"linear_num_value_heads": 40}, "linear_num_value_heads=40"),
        (QWEN3_6_TEXT, {"attn_output_gate": False}, "attn_output_gate=False"),
        (QWEN3_6_TEXT, {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        (QWEN3_6_TEXT, {"layer_types": ["linear_attention"] * 64}, "at least one attention layer"),
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
    start = time.thread_time()
    with pytest.raises(ConfigError, match=r"does not support: clip_qkv=8\.0, mtp_heads=2"):
        load_model(tmp_path)
    assert time.thread_time() - start < 1


def test_longrope_takes_long_factors_where_the_context_may_be_long() -> None:
    rope = RotaryEmbedding(parse(PHI4_MINI).rope, 128, torch.device("cpu"))
    factor = math.sqrt(1 + math.log(32) / math.log(4096))
    for max_len, angle in ((None, 1.5), (4096, 3.0), (4097, 1.5)):
        if max_len is not None:
            rope.limit(max_len)
        cos = rope.compute(torch.tensor([3]), [1], [4]).cos[0, 0]
        assert cos[0].item() == pytest.approx(factor * math.cos(angle))
        assert cos[48:64].eq(1).all(), "a quarter of each head is not rotated"
