"""speculative_config: vLLM's keys, and a clear error for everything else."""

import json
from typing import Any

import pytest

from engine import ConfigError, EngineConfig
from engine.speculative_config import SpeculativeConfig, parse_speculative_config


def parse(**values: Any) -> SpeculativeConfig:
    return parse_speculative_config(json.dumps(values))


def test_defaults_are_those_of_vllm() -> None:
    config = parse(method="ngram")
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
    assert config.suffix_decoding_max_tree_depth == 24
    assert config.method == ("ngram",)


def test_one_bound_of_the_lookup_sets_both() -> None:
    config = parse(method="ngram", prompt_lookup_max=3)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)
    assert parse(method="ngram", prompt_lookup_min=2, prompt_lookup_max=4).prompt_lookup_min == 2


def test_a_model_alone_is_a_draft_model() -> None:
    assert parse(model="folder").method == ("draft_model",)
    assert parse(method=["ngram", "eagle"], model="folder").device_method == "eagle"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "ngrams"}, "method='ngrams' must be one of ngram, suffix"),
        ({"method": "ngram", "k": 3}, "unknown k; known: adaptive"),
        ({"method": "eagle"}, "method='eagle' needs model"),
        ({"method": "ngram", "model": "x"}, "model='x' belongs to the methods draft_model"),
        ({"method": ["eagle", "mtp"], "model": "x"}, "eagle and mtp; one of them"),
        ({"method": []}, "method=.* must be one of"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be an integer from 1"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True must be an integer"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_max=3 .* from 5"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "must be a number from 0 to 1"),
        ({"method": "ngram", "draft_sample_method": "best"}, "must be greedy or probabilistic"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "must start at batch size 1"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4]]}, "first batch size, last"),
        ({"method": "ngram", "adaptive": 1}, "adaptive=1 must be true or false"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(**values)


def test_a_batch_size_without_an_entry_continues_the_one_before() -> None:
    table = [[1, 2, 5], [8, 16, 2], [17, 999, 0]]
    config = parse(method="ngram", num_speculative_tokens=9, num_speculative_tokens_per_batch_size=table)
    assert [config.limit_drafts(size) for size in (1, 2, 4, 8, 16, 17, 5000)] == [5, 5, 5, 2, 2, 0, 0]


def test_the_engine_takes_an_object_or_its_json() -> None:
    for given in ({"method": "suffix"}, '{"method": "suffix"}'):
        config = EngineConfig(speculative_config=given)  # type: ignore[arg-type]
        assert config.read_speculative() == parse(method="suffix")
    for wrong in ("ngram", 3, ["ngram"], "[]"):
        with pytest.raises(ConfigError, match="JSON"):
            EngineConfig(speculative_config=wrong)  # type: ignore[arg-type]
