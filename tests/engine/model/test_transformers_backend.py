"""Models on transformers' code over our KV cache: logits of transformers, refusals with reasons, equal texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.model import DecoderModel, load_model, read_model_config
from engine.model.transformers_backend.leak_probe import TOLERANCE, compare, probe
from engine.model.transformers_backend.model import TransformersModel
from engine.model.transformers_backend.paged_interface import UnsupportedModel
from engine.model.transformers_backend.tiny_config import shrink_config
from tests.engine.model.drive import make_prompt, make_transformers_model, save
from tests.engine.model.fallback_families import make_config, measure, write_checkpoint

# One of each kind: windows, soft caps, sinks, latent attention, experts, learned positions, LayerNorm, several inputs.
FAMILIES = ["gemma2", "gemma4_text", "deepseek_v3", "mixtral", "opt", "gpt2", "qwen3_vl", "gpt_oss"]
# Each is changed so that its config has the layers that carry a state or count tokens of the row.
LEAKY: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {}, "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16}, "llama4_text": {},
}


SIMILAR = [pytest.param(each, marks=pytest.mark.soak) for each in ("qwen3", "gemma3_text", "qwen3_moe")]


@pytest.mark.parametrize("model_type", [*FAMILIES, *SIMILAR])
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Prefill, chunks, decode, beyond the window; the checkpoint is written by save_pretrained."""
    gap, place = measure(make_config(model_type), tmp_path)
    assert gap <= 2e-5, place


def test_experts_with_another_gate_are_not_quantized(tmp_path: Path) -> None:
    write_checkpoint(make_config("gpt_oss"), tmp_path)
    with pytest.raises(ConfigError, match="quantization='int8': GptOssExperts cannot be quantized"):
        load_model(tmp_path, config=read_model_config(tmp_path, "transformers"), quantization="int8")


@pytest.mark.parametrize("model_type", LEAKY)
def test_models_that_leak_are_refused(model_type: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[model_type](**LEAKY[model_type])
    small = shrink_config(config)
    small.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"layer_types has .*; only full_attention and sliding_attention"):
        read_model_config(tmp_path, "transformers")


@pytest.mark.parametrize("model_type", ["gemma3n", "gemma3n_text"])
def test_gemma_3n_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    """Not for a package that its images need."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Gemma 3n is not run"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("model_type", LEAKY)
def test_the_probe_alone_finds_leaks(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match="logits differ by"):
        probe(CONFIG_MAPPING[model_type](**LEAKY[model_type]))


def test_a_window_that_reaches_attention_through_a_mask_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = shrink_config(CONFIG_MAPPING["mistral"](sliding_window=64))
    assert compare(config)[0] <= TOLERANCE
    # Llama's code is Mistral's without the argument.
    monkeypatch.setattr(MistralAttention, "forward", LlamaAttention.forward)
    gap, place = compare(config)
    assert gap > 1e-3, place


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("inkling_text", "calls attention with position_bias"), ("doge", "calls attention with attention_mask"),
        ("diffllama", "calls attention more than once in a step"), ("bloom", "does not take position_ids"),
        ("recurrent_gemma", "does not call attention through"), ("bert", "calls attention with is_causal"),
    ],
)
def test_a_refusal_says_what_the_model_does(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        probe(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"is_encoder_decoder": True}, "it has an encoder"),
    ],
)
def test_a_config_that_transformers_cannot_run_is_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    data = make_config("olmo2").to_dict() | {"model_type": "olmo2"} | change
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=reason):
        read_model_config(tmp_path, "transformers")


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(make_config("olmo2"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.extra.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = read_model_config(tmp_path, "transformers")
    with pytest.raises(ConfigError, match=r"missing_keys: model.layers.0.mlp.up_proj.*unexpected_keys: model.extra"):
        load_model(tmp_path, config=config)


def test_auto_prefers_our_decoder(tmp_path: Path) -> None:
    native, foreign = tmp_path / "native", tmp_path / "foreign"
    save(make_transformers_model("qwen3"), native)
    write_checkpoint(make_config("nemotron"), foreign)
    assert isinstance(load_model(native), DecoderModel)
    assert isinstance(load_model(foreign), TransformersModel)
    with pytest.raises(ConfigError, match="NemotronForCausalLM"):
        read_model_config(foreign, "troupe")


def test_rope_that_depends_on_the_batch_limits_the_length(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = make_config("llama")
    config.max_position_embeddings, config.rope_parameters = 256, rope
    config.save_pretrained(tmp_path)
    found = read_model_config(tmp_path, "transformers")
    assert found.max_model_len == 64


@pytest.mark.parametrize("model_type", ["gemma2", pytest.param("qwen3_moe", marks=pytest.mark.soak)])
def test_texts_do_not_depend_on_batch_chunks_cache_and_preemption(model_type: str, tmp_path: Path) -> None:
    config = make_config(model_type)
    config.eos_token_id = config.pad_token_id = None
    reference = write_checkpoint(config, tmp_path)
    shared = [each % 127 + 1 for each in make_prompt(40)]
    prompts = [shared + [each % 127 + 1 for each in make_prompt(length, length)] for length in (3, 9, 20, 33)]
    params = [SamplingParams(temperature=at % 2, seed=at, max_tokens=40, ignore_eos=True) for at in range(4)]
    settings: dict[str, Any] = {"model_impl": "transformers", "skip_tokenizer_init": True, "num_threads": 1}
    settings |= {"max_model_len": 128, "model": str(tmp_path)}
    with LLM(num_blocks=60, enable_prefix_caching=False, max_num_seqs=1, **settings) as alone:
        expected = [each.outputs[0].token_ids for each in alone.generate(prompts, params, use_tqdm=False)]
    with LLM(num_blocks=12, max_num_batched_tokens=24, max_num_seqs=4, **settings) as together:
        for _ in range(2):  # the second time the prefixes are cached
            found = together.generate(prompts, params, use_tqdm=False)
            assert [each.outputs[0].token_ids for each in found] == expected
        stats = together.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    greedy = GenerationConfig(max_new_tokens=40, do_sample=False)
    wanted = reference.generate(torch.tensor([prompts[0]]), generation_config=greedy)[0, len(prompts[0]) :]
    assert expected[0] == wanted.tolist()
