"""vLLM's names and values of settings: each means a setting of ours, asks for nothing, or says what to use instead."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.model.implementation import read_model_config
from engine.vllm_words import REFUSED


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"gpu_memory_utilization": 0.5}, "memory_share", 0.5),
        ({"num_gpu_blocks_override": 64}, "num_blocks", 64),
        ({"enforce_eager": True}, "enable_cuda_graphs", False),
        ({"async_scheduling": False}, "enable_overlap", False),
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype", "fp8"),
        ({"load_format": "safetensors"}, "load_format", "auto"),
        ({"quantization": None, "block_size": None}, "block_size", 16),
        ({"served_model_name": ["a", "b"]}, "served_names", ("a", "b")),
        ({"served_model_name": "a, b"}, "served_names", ("a", "b")),
        ({"model": "org/name", "revision": "v1"}, "model", "org/name@v1"),
        ({"model": "org/name", "revision": "v1"}, "model_name", "name"),
        ({"model": "org/name:x.gguf", "revision": "v1"}, "model", "org/name@v1:x.gguf"),
        ({"revision": "v1"}, "model", EngineConfig().model),
        ({"structured_outputs_config": {"backend": "xgrammar"}, "compilation_config": 3}, "seed", 0),
    ],
)
def test_a_word_of_vllm_means_a_setting(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(EngineConfig(**given), field) == value


def test_a_value_that_asks_for_what_is_not_done_says_what_to_use() -> None:
    for name, (neutral, _) in REFUSED.items():
        for value in (None, *neutral):
            EngineConfig(**{name: value})
    with pytest.raises(ConfigError, match=r"swap_space=4 must be left out .*kv_offload_gb"):
        EngineConfig(swap_space=4)
    with pytest.raises(ConfigError, match="tokenizer_mode='slow'"):
        EngineConfig(tokenizer_mode="slow")
    with pytest.raises(ConfigError, match="gpu_memory_utilization and memory_share are the same setting"):
        EngineConfig(memory_share=0.4, gpu_memory_utilization=0.5)
    with pytest.raises(ConfigError, match="enforce_eager='no' must be true or false"):
        EngineConfig(enforce_eager="no")


@pytest.mark.parametrize(("name", "hint"), [("max_num_sequences", "; did you mean max_num_seqs?"), ("zzz", "")])
def test_an_unknown_setting_is_reported_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: 0.5})
    assert str(caught.value) == f"{name} is not a setting of this engine{hint}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"hf_overrides": "{"}, "hf_overrides='{' is not valid JSON"),
        ({"hf_overrides": [1]}, "must be a JSON object"),
        ({"limit_mm_per_prompt": {"picture": 1}}, "picture=1 must be image, video or audio"),
        ({"limit_mm_per_prompt": {"image": -1}}, "image=-1"),
        ({"long_prefill_token_threshold": 8, "enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
    ],
)
def test_an_object_that_cannot_be_read_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        EngineConfig(**given)


def test_the_number_of_images_is_limited() -> None:
    limits = ({"image": 4, "video": 0}, {"image": {"count": 2}}, {"image": 99}, None)
    assert [EngineConfig(limit_mm_per_prompt=each).read_image_limit() for each in limits] == [4, 2, 32, 32]


@pytest.mark.parametrize("model_impl", ["troupe", "transformers"])
def test_keys_of_the_config_are_overridden(checkpoint: Path, model_impl: Any) -> None:
    overrides = EngineConfig(hf_overrides={"rope_theta": 500.0, "max_position_embeddings": 64}).read_hf_overrides()
    found = read_model_config(checkpoint, model_impl, overrides)
    assert found.max_position_embeddings == 64
    plain = read_model_config(checkpoint, model_impl)
    assert plain.max_position_embeddings != 64
    assert json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"] != 64
