"""Logits of every family of the registry against transformers, beyond its windows, however the prompt is cut."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from engine import LLM, SamplingParams
from engine.kv_cache_spec import group_layers
from engine.model import DecoderModel, ModelConfig, load_model
from kernels.cpu import make_native_ops
from tests.engine.model.drive import (
    HYBRIDS,
    Driver,
    compute_expected,
    make_prompt,
    make_transformers_model,
    save,
)
from tests.kernels.cpu.conftest import require_library

MAX_LEN = 120
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5e3}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 5e3, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 31.0],
}
WINDOW = {"sliding_window": 40, "num_hidden_layers": 4}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False}),
    "granite": ("granite", GRANITE | {"attention_multiplier": 0.1}),
    "granite4": ("granitemoehybrid", {"residual_multiplier": 0.3}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "phi3-longrope": (
        "phi3",
        {
            "hidden_size": 64, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
        },
    ),
    "ministral3": ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        WINDOW
        | {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
            }
        },
    ),
    "exaone4": ("exaone4", WINDOW),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gemma2": ("gemma2", WINDOW | {"attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3", WINDOW | {"num_hidden_layers": 6, "query_pre_attn_scalar": 20}),
    "cohere2": ("cohere2", WINDOW | {"hidden_size": 64}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 40}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-dense-layers": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_moe-every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 40}),
    "olmoe": ("olmoe", {"norm_topk_prob": True}),
    "granitemoe": ("granitemoe", GRANITE | {"attention_multiplier": 0.1}),
    "minimax_m2": ("minimax_m2", {}),
    "glm4_moe": ("glm4_moe", {"routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 40, "rope_parameters": YARN}),
    "glm4_moe-groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
}
MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": None, "rope_parameters": MSCALE}),
    "deepseek_v2-groups": (
        "deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": MSCALE}),
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False, "kv_lora_rank": 52}),
    "glm4_moe_lite": ("glm4_moe_lite", {"rms_norm_eps": 1e-2}),
    "minicpm3": ("minicpm3", {"dim_model_base": 16}),
}
VARIANTS = DENSE | EXPERTS | LATENT | {family: (family, {}) for family in HYBRIDS}
FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the checkpoint of a variant."""

    @functools.cache
    def find(variant: str) -> Path:
        return save(make_model(variant), tmp_path_factory.mktemp(variant))

    return find


@functools.cache
def make_model(variant: str) -> PreTrainedModel:
    family, overrides = VARIANTS[variant]
    return make_transformers_model(family, **overrides)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = max(4e-5, 2e-5 * float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("variant", DENSE | EXPERTS | LATENT)
def test_prefill_chunks_decode_and_prefix_hit(variant: str, folders: Callable[[str], Path]) -> None:
    prompt = make_prompt(MAX_LEN)
    expected, model = compute_expected(make_model(variant), prompt), load_model(folders(variant))
    assert isinstance(model, DecoderModel)
    for ops in (None, make_native_ops(require_library(), 2)):
        if ops is not None:
            for _ in model.repack(ops):
                pass
        driver = Driver(model)
        assert_near(driver.step({"a": prompt})["a"], expected)
        cuts = (prompt[:50], prompt[50:67], *([token] for token in prompt[67:75]))
        parts = [driver.step({"b": part})["b"] for part in cuts]
        assert_near(torch.cat(parts), expected[:75])
        driver.block_tables["hit"], driver.num_computed["hit"] = (
            driver.block_tables["a"][: 4 * driver.num_groups],
            64,
        )
        assert_near(driver.step({"hit": prompt[64:], "other": make_prompt(9, 1)})["hit"], expected[64:])


@pytest.mark.parametrize("kind", [(torch.bfloat16, None), (torch.float32, "int8")], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["phi3-longrope", "olmo3", "gemma2", "cohere2", "starcoder2", "deepseek_v2"])
def test_lower_precisions_stay_near(variant: str, kind: Any, folders: Callable[[str], Path]) -> None:
    ops = make_native_ops(require_library(), 1)
    model = load_model(folders(variant), dtype=kind[0], ops=ops, quantization=kind[1])
    assert isinstance(model, DecoderModel)
    prompt = make_prompt(MAX_LEN)
    logits, expected = Driver(model).step({"a": prompt})["a"], compute_expected(make_model(variant), prompt)
    # One token of a random model may differ more by chance.
    assert torch.cosine_similarity(logits, expected, dim=-1).median() > 0.998


@pytest.mark.parametrize("variant", ["phi3-longrope", "olmo3", "deepseek_v3"])
def test_texts_do_not_depend_on_batch_chunks_or_cache(variant: str, folders: Callable[[str], Path]) -> None:
    prompts = [make_prompt(length) for length in (3, 70, 75, 100)]
    params = [SamplingParams(temperature=n % 2, seed=n, max_tokens=16, ignore_eos=True) for n in range(4)]
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 128}
    plain = settings | {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    with LLM(str(folders(variant)), num_blocks=60, **plain) as llm:
        alone = [llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params, strict=True)]
    layers = ModelConfig.from_pretrained(folders(variant)).layer_specs
    num_blocks = 20 * len(group_layers([layer.kv_spec for layer in layers]))
    with LLM(
        str(folders(variant)), num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=30, **settings
    ) as llm:
        runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        assert llm.stats().prefix_cache_hits > 0
    expected = [output.outputs[0].token_ids for output in alone]
    assert [[output.outputs[0].token_ids for output in run] for run in runs] == [expected, expected]


KINDS = [(FLOAT, None), (BRAIN, None), (BRAIN, "int8")]


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        *itertools.product(["qwen3_moe", "deepseek_v3"], KINDS),
        *((variant, KINDS[2]) for variant in ("qwen2_moe", "glm4_moe-groups", "granitemoe")),
        *((family, KINDS[0]) for family in HYBRIDS),
    ],
)
def test_native_bits_do_not_depend_on_batch_or_chunks(
    variant: str, kind: Any, folders: Callable[[str], Path]
) -> None:
    ops = make_native_ops(require_library(), 2)
    model = load_model(folders(variant), dtype=kind[0], ops=ops, quantization=kind[1])
    assert isinstance(model, DecoderModel)
    prompt = make_prompt(90)
    alone = Driver(model).step({"a": prompt})["a"]
    driver, parts, done = Driver(model), [], 0
    for number, count in enumerate((1, 40, 3, 1, 17, 28)):
        neighbours = {f"b{number}": make_prompt(1 + 7 * number, number), "c": make_prompt(1, number)}
        parts.append(driver.step(neighbours | {"a": prompt[done : done + count]})["a"])
        done += count
    assert torch.equal(torch.cat(parts), alone)


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
# Family -> names of the whole model and of its vision part, and the config of that part.
WITH_IMAGES: dict[str, tuple[str, str, dict[str, int]]] = {
    "gemma3": ("Gemma3", "SiglipVision", SMALL), "ministral3": ("Mistral3", "PixtralVision", SMALL),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Vision", QWEN), "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeVision", QWEN),
}


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_the_text_part_of_a_model_for_images_is_run(family: str, tmp_path: Path) -> None:
    outer, vision, small = WITH_IMAGES[family]
    changes: dict[str, Any] = {} if family in HYBRIDS else {"num_hidden_layers": 2, "sliding_window": 40}
    model = make_transformers_model(family, **changes)
    config = getattr(transformers, f"{outer}Config")(
        text_config=model.config.to_dict(),
        vision_config=getattr(transformers, f"{vision}Config")(**small).to_dict(),
        tie_word_embeddings=model.config.tie_word_embeddings,
    )
    whole = getattr(transformers, f"{outer}ForConditionalGeneration")(config).eval()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    ours = load_model(save(whole, tmp_path))
    assert isinstance(ours, DecoderModel)
    prompt = make_prompt(90)
    assert_near(Driver(ours).step({"a": prompt})["a"], compute_expected(model, prompt))
    data = json.loads((tmp_path / "config.json").read_text())
    coded = ModelConfig.from_dict(data | {"quantization_config": {"quant_method": "fp8"}}).weight_format
    assert coded is not None and coded.method == "fp8"
