"""config.json: supported values, refusals and their messages, and the tokens that end a text."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.model import ModelConfig, read_eos_token_ids, read_model_config

# As they are published.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
QWEN3, SMOLLM2 = PUBLISHED["qwen3"], PUBLISHED["smollm2"]
MISTRAL = SMOLLM2 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def parse(base: dict[str, Any], **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(base | overrides)


def test_published_configs_are_read() -> None:
    qwen3 = parse(QWEN3)
    assert (qwen3.head_dim, qwen3.style.qk_norm, qwen3.qkv_bias, qwen3.rope.theta) == (128, "head", False, 1e6)
    assert (qwen3.dtype, qwen3.sliding_windows, qwen3.max_model_len) == ("bfloat16", (), 40960)
    smollm2 = parse(SMOLLM2)
    assert (smollm2.head_dim, smollm2.num_key_value_heads, smollm2.tie_word_embeddings) == (64, 3, True)
    assert parse(SMOLLM2, architectures=None) == smollm2, "the model type names it, too"
    old = {"temperature": 0.7, "max_length": 20, "id2label": {"0": "A"}, "_name_or_path": "x"}
    assert parse(SMOLLM2, **old, unsloth_version="1") == smollm2


@pytest.mark.parametrize("names", [["BertModel"], ["LlamaForCausalLM", "Other"], "LlamaForCausalLM2", [3]])
def test_unsupported_architecture_lists_the_supported_ones(names: Any) -> None:
    supported = "supported: LlamaForCausalLM, MistralForCausalLM, "
    with pytest.raises(ConfigError, match=supported):
        parse(SMOLLM2, architectures=names)


def test_a_decoder_that_classifies_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ConfigError, match="a decoder that classifies is not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("base", "overrides", "named"),
    [
        (SMOLLM2, {"logits_scaling": 8.0, "residual_multiplier": 0.2}, "logits_scaling=8.0, residual_mult"),
        (SMOLLM2, {"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'"),
        (SMOLLM2, {"sliding_window": 128}, "sliding_window=128"),
        (SMOLLM2, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (SMOLLM2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (SMOLLM2, {"model_type": "qwen2"}, "model_type='qwen2'"),
        (SMOLLM2, {"num_key_value_heads": 4}, "num_key_value_heads=4"),
        (SMOLLM2, {"hidden_size": 577}, "hidden_size=577"),
        (SMOLLM2, {"head_dim": 63}, "head_dim=63"),
        (SMOLLM2, {"vocab_size": "many"}, "vocab_size='many'"),
        (SMOLLM2, {"vocab_size": None}, "vocab_size is missing"),
        (SMOLLM2, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (SMOLLM2, {"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        (SMOLLM2, {"rope_theta": 10**400}, "rope_theta=1000"),
        (SMOLLM2, {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        (SMOLLM2, {"torch_dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (MISTRAL, {"layer_types": ["full_attention"] * 30}, "layer_types"),
        (QWEN3, {"layer_types": ["full_attention"] * 3}, "each of 28 layers"),
        (QWEN3, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        (QWEN3, {"layer_types": ["sliding_attention"] * 28}, "no sliding window is set"),
        (QWEN3, {"layer_types": [["full_attention"]] * 28}, "layer_types"),
    ],
)
def test_field_that_would_be_ignored_is_refused_by_name(
    base: dict[str, Any], overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(base, **overrides)


@pytest.mark.parametrize(
    ("base", "overrides", "windows"),
    [
        (MISTRAL, {}, {4096}),
        (MISTRAL, {"sliding_window": None}, set()),
        (MISTRAL, {"sliding_window": 128}, {128}),
        (QWEN3, {"sliding_window": 128}, set()),
        (QWEN3, {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 28}, set()),
        (QWEN3, {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 20}, {None, 128}),
    ],
)
def test_sliding_window_of_each_layer(
    base: dict[str, Any], overrides: dict[str, Any], windows: set[int | None]
) -> None:
    assert set(parse(base, **overrides).sliding_windows) == windows


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, r"no config\.json"), ("", r"config\.json is not valid"), ("[1]", r"config\.json must contain an object")],
)
def test_missing_and_broken_config_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("depth", [65, 900, 100_000])
@pytest.mark.parametrize("key", ["rope_scaling", "unknown", "_inert"])
def test_config_that_is_nested_without_end_is_named(tmp_path: Path, key: str, depth: int) -> None:
    text = json.dumps(QWEN3 | {key: "HERE"}).replace('"HERE"', '{"a":[' * depth + "]}" * depth)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is nested deeper than 64 levels"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, []),
        ({"config": {"eos_token_id": [0, 2]}}, [0, 2]),
        ({"config": {"eos_token_id": 7}}, [7]),
        ({"config": {"eos_token_id": None}}, []),
        ({"generation_config": {"eos_token_id": [2, 7]}, "config": {"eos_token_id": 0}}, [2, 7]),
        ({"generation_config": {"do_sample": False}, "config": {"eos_token_id": 0}}, [0]),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 0}}, [0]),
    ],
)
def test_the_generation_config_counts_and_the_config_where_it_says_nothing(
    tmp_path: Path, files: dict[str, Any], ids: list[int]
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read_eos_token_ids(tmp_path) == tuple(ids)
    assert read_eos_token_ids(tmp_path, own=7) == (7, *[each for each in ids if each != 7])


@pytest.mark.parametrize("name", ["generation_config", "config"])
@pytest.mark.parametrize("value", ["abc", 1.5, {"a": 1}, True, -1, [2, "x"], [[2]]])
def test_end_tokens_that_are_none_are_refused_by_file_and_value(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"{name}\.json: eos_token_id=.* must be an integer of at least 0"):
        read_eos_token_ids(tmp_path)


def test_a_generation_config_that_is_broken_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json must contain an object"):
        read_eos_token_ids(tmp_path)
