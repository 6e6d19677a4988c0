"""Adapters of every kind on every family, all in one batch, against PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, ConfigError, LoRARequest, SamplingParams
from engine.lora.adapter_files import AdapterFiles
from engine.lora.loader import Adapter, load_adapter
from engine.model import load_model
from kernels.cpu import make_native_ops
from tests.engine.lora.peft_adapters import KINDS, PeftTwin
from tests.engine.model.drive import FAMILIES, HYBRIDS, Driver, make_prompt
from tests.kernels.cpu.conftest import require_library

# PEFT calls deprecated functions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
PARTIAL = {"rope_theta": 5e3, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": {"rope_type": "default"} | PARTIAL},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "cohere2": {"hidden_size": 64},
    "seed_oss": {"attention_out_bias": True},
}


def read_adapter(twin: PeftTwin, kind: str, model: Any) -> Adapter:
    return load_adapter(AdapterFiles.read(twin.folder / kind), model, max_rank=8)


# Their layers with states have matrices of their own.
HYBRID_KINDS: dict[str, dict[str, Any]] = {
    kind: {
        "r": 3,
        "target_modules": ["in_proj", "in_proj_qkv", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    }
    | options
    for kind, options in {"lora": {}, "dora": {"use_dora": True}}.items()
}


# Adapters cannot change `kv_b_proj`, whose halves are products of their own.
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3"}
LATENT_KINDS: dict[str, dict[str, Any]] = {
    kind: options | {"target_modules": ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}
    for kind, options in HYBRID_KINDS.items()
}


# One of each set of layers; `make soak` covers the other families.
CHOSEN = {"llama", "phi3", "cohere2", "gemma3", "starcoder2", "qwen2_moe", "gpt_oss"}
CHOSEN |= {"qwen3_next", "granite4h", "lfm2_moe"}
ALL = [pytest.param(each, marks=[] if each in CHOSEN else pytest.mark.soak) for each in FAMILIES | HYBRIDS]


@pytest.mark.parametrize("family", ALL)
def test_logits_of_a_mixed_batch_are_those_of_peft(family: str, tmp_path: Path) -> None:
    kinds = HYBRID_KINDS if family in HYBRIDS else LATENT_KINDS if family in LATENT else KINDS
    twin = PeftTwin(family, tmp_path, kinds, **VARIANTS.get(family, {}))
    model = load_model(twin.checkpoint)
    prompts = {kind: make_prompt(9 + 5 * at, at) for at, kind in enumerate(kinds)} | {"base": make_prompt(21)}
    expected = {kind: twin.compute(ids, None if kind == "base" else kind) for kind, ids in prompts.items()}
    adapters = {kind: read_adapter(twin, kind, model) for kind in kinds}
    for ops in (None, make_native_ops(require_library(), 2)):
        if ops is not None:
            for _ in model.repack(ops):
                pass
        driver = Driver(model)  # type: ignore[arg-type]
        driver.adapters = adapters
        found = driver.step({kind: ids[:-4] for kind, ids in prompts.items()})
        # From the second step of the same adapters on, a tape is used, the last time with other rows.
        for last in (-4, -3, -2, -1):
            order = [*reversed(kinds), "base"] if last == -1 else ["base", *reversed(kinds)]
            more = driver.step({kind: [prompts[kind][last]] for kind in order})
            found = {kind: torch.cat([found[kind], more[kind]]) for kind in prompts}
        for kind, logits in found.items():
            error = (logits - expected[kind]).abs().max().item()
            assert error < 1e-4, f"{kind}: {error}"


def test_what_latent_attention_does_not_do_is_refused_at_start(tmp_path: Path) -> None:
    require_library()
    twin = PeftTwin("deepseek_v2", tmp_path, {"wide": {"r": 2, "target_modules": ["kv_b_proj"]}})
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 64, "num_blocks": 20}
    with pytest.raises(ConfigError, match=r"changes model\.layers\.0\.self_attn\.kv_b_proj, which latent attention"):
        LLM(str(twin.checkpoint), enable_lora=True, lora_modules=(f"wide={tmp_path / 'wide'}",), **options)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8': the model has latent attention.*use auto"):
        LLM(str(twin.checkpoint), kv_cache_dtype="int8", **options)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=pytest.mark.soak)], ids=str
)
def test_texts_of_eight_adapters_in_one_batch_are_those_of_each_alone(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    require_library()
    kinds = KINDS | {"small": {"r": 1}, "large": {"r": 8, "lora_alpha": 3}}
    twin = PeftTwin("qwen3", tmp_path, kinds)
    requests = [None, *(LoRARequest(kind, 1, str(tmp_path / kind)) for kind in kinds)]
    prompts = [make_prompt(20, 7)] * len(requests)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "max_model_len": 64, "num_blocks": 100} | settings
    with LLM(str(twin.checkpoint), enable_lora=True, max_lora_rank=8, **options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        again = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        twice = llm.generate(
            prompts[:2], params, use_tqdm=False, lora_request=LoRARequest("new", 9, str(tmp_path / "lora"))
        )
    with LLM(str(twin.checkpoint), enable_lora=True, max_lora_rank=8, **options) as llm:
        alone = [
            llm.generate([prompts[0]], params, use_tqdm=False, lora_request=each)[0]
            for each in reversed(requests)
        ]
    texts = [output.outputs[0].token_ids for output in together]
    assert texts == [output.outputs[0].token_ids for output in reversed(alone)]
    assert texts == [output.outputs[0].token_ids for output in again]
    assert [output.outputs[0].token_ids for output in twice] == [texts[1]] * 2, "one load serves both"
    assert len({tuple(text) for text in texts}) == len(texts), "each adapter has its own text"
    assert all(output.num_cached_tokens == 16 for output in again), "each finds its own blocks"
    if not settings:
        for kind, text in zip([None, *kinds], texts, strict=True):
            ids = prompts[0] + text
            assert twin.compute(ids, kind)[len(prompts[0]) - 1 : -1].argmax(dim=-1).tolist() == text, kind


@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model.", "model.text_model."])
def test_names_of_the_text_part_of_a_model_for_images_are_known(start: str, tmp_path: Path) -> None:
    twin = PeftTwin("llama", tmp_path, {"tables": KINDS["tables"]})
    model = load_model(twin.checkpoint)
    expected, path = read_adapter(twin, "tables", model), tmp_path / "tables" / "adapter_model.safetensors"
    renamed = {name.replace(".model.model.", f".model.{start}"): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path)
    found = read_adapter(twin, "tables", model)
    assert found.matrices.keys() == expected.matrices.keys()
    assert all(torch.equal(found.matrices[each].a, expected.matrices[each].a) for each in found.matrices)
    assert found.embedding is not None and path.read_bytes().count(start.encode()) > 3
