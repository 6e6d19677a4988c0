"""The same requests give the same tokens whatever the engine does meanwhile; and the tokens transformers gives."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from engine import LLM, RequestOutput, SamplingParams
from grammar import GrammarSpec
from tests.engine.model.drive import make_prompt, make_transformers_model, save

PLAIN: dict[str, Any] = {
    "enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 1024,
    "enable_overlap": False, "enable_native_ops": False,
}
FEATURES: dict[str, dict[str, Any]] = {
    "prefix cache": {"enable_prefix_caching": True},
    "chunked prefill": {"enable_chunked_prefill": True, "max_num_batched_tokens": 40},
    "forced preemption": {"num_blocks": 42, "max_model_len": 640},
    "overlap": {"enable_overlap": True},
    # Native ops need a compiler; without one this repeats the plain engine.
    "native ops": {"enable_native_ops": True},
}
PAIRS = [*itertools.combinations(list(FEATURES)[:4], 2)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SHARED = make_prompt(70, seed=1)


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded, short and long, with shared prefixes, n > 1, penalties, and every kind of grammar."""
    requests = []
    for number, length in enumerate([1, 2, 15, 16, 17, 33, 64, 100, 250, 600]):
        shared = (SHARED + make_prompt(length, seed=number))[: max(length, 70)]
        prompt = shared if number % 2 else make_prompt(length)
        greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=number, max_tokens=20, ignore_eos=True)
        requests += [(prompt, greedy), (prompt, seeded)]
    schema = GrammarSpec.json_schema(SCHEMA)
    regex, choice = (
        GrammarSpec.regex(r"[a-f]{3}(-[0-9]{2,4}){1,3}"),
        GrammarSpec.choice(["alpha", "beta", "alphabet"]),
    )
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    params = [
        SamplingParams(n=3, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=24, top_k=20, min_p=0.01, **penalties),
        SamplingParams(seed=5, max_tokens=60, n=2, grammar=schema),
        SamplingParams(temperature=0, max_tokens=60, grammar=schema),
        SamplingParams(seed=6, max_tokens=60, grammar=regex),
        SamplingParams(seed=7, max_tokens=60, grammar=choice),
    ]
    return requests + [([*SHARED, 5, 6], each) for each in params]


def run(llm: LLM) -> list[list[list[int]]]:
    """Token ids of every completion, after checking that all ended well. Twice, so that the cache has hits."""
    requests = make_requests()
    prompts, params = [prompt for prompt, _ in requests], [params for _, params in requests]
    first, second = (llm.generate(prompts, params, use_tqdm=False) for _ in range(2))
    assert tokens_of(first) == tokens_of(second)
    return tokens_of(second)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    assert all(each.finish_reason in ("stop", "length") for output in outputs for each in output.outputs)
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> list[list[list[int]]]:
    with LLM(str(checkpoint), num_blocks=2000, max_num_seqs=32, num_threads=1, **PLAIN) as llm:
        return run(llm)


@pytest.mark.parametrize(
    "features",
    [
        ("native ops",), tuple(FEATURES),
        *(pytest.param(each, marks=pytest.mark.soak) for each in PAIRS),
    ],
    ids=" + ".join,
)
def test_every_pair_of_features_and_all_together_give_identical_tokens(
    features: tuple[str, ...], reference: list[list[list[int]]], make_llm: Callable[..., LLM]
) -> None:
    settings = PLAIN | {"num_blocks": 2000}
    for feature in features:
        settings |= FEATURES[feature]
    with make_llm(**settings) as llm:
        assert run(llm) == reference
        stats = llm.stats()
    if "forced preemption" in features:
        assert stats.num_preemptions > 0
    if "prefix cache" in features:
        assert stats.prefix_cache_hits > 0
    assert stats.num_free_blocks == stats.num_blocks


def compare_with_transformers(
    model: Any, folder: Path, lengths: tuple[int, ...], together: bool = True, **settings: Any
) -> None:
    save(model, folder)
    prompts = [make_prompt(length, seed=length) for length in lengths]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, num_blocks=200, num_threads=1, **settings) as llm:
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        outputs = [output for batch in batches for output in llm.generate(batch, greedy, use_tqdm=False)]
    options = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generation_config.eos_token_id = None  # the default of some families' classes is a token
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist(), len(prompt)


@pytest.mark.parametrize(("rope_type", "max_model_len"), [("linear", None), ("yarn", 256), ("dynamic", None)])
def test_greedy_tokens_beyond_the_original_length_equal_those_of_transformers(
    rope_type: str, max_model_len: int | None, tmp_path: Path
) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 5000.0, "factor": 4.0}
    model = make_transformers_model("llama", max_position_embeddings=64, rope_parameters=rope, eos_token_id=None)
    # Each begins longer than the one before it ended: transformers never goes back to a lesser dynamic scaling.
    compare_with_transformers(model, tmp_path, (30, 60, 80, 128, 240), together=False, max_model_len=max_model_len)


def test_a_long_context_of_dynamic_rope_leaves_short_ones_as_they_are(tmp_path: Path) -> None:
    """Its keys are rotated by its length: a prefix they share must not come from the cache."""
    rope = {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 4.0}
    save(make_transformers_model("llama", max_position_embeddings=64, rope_parameters=rope), tmp_path)
    prompt = make_prompt(200)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    answers = []
    for before in ([], [prompt]):
        settings: dict[str, Any] = {"num_blocks": 200, "num_threads": 1, "enable_native_ops": False}
        with LLM(str(tmp_path), skip_tokenizer_init=True, **settings) as llm:
            outputs = [llm.generate(each, params, use_tqdm=False)[0] for each in [*before, prompt[:40]]]
        answers.append(outputs[-1].outputs[0].logprobs)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "granitemoehybrid"])
def test_greedy_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The logits of every family are compared in `model/test_families.py`."""
    model = make_transformers_model(family, eos_token_id=None)
    compare_with_transformers(model, tmp_path, (1, 17, 333))
