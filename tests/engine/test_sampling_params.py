"""SamplingParams: every field's range, and the forms it is accepted in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from engine import InvalidRequest, SamplingParams
from grammar import GrammarSpec

HUGE = 10**400  # an integer that no float can hold

BAD = [
    ("n", 0, "must be an integer from 1 to 64"),
    ("n", 65, "must be an integer from 1 to 64"),
    ("n", True, "n=True must be an integer"),
    ("n", 2.0, "n=2.0 must be an integer"),
    ("max_tokens", 0, "must be an integer from 1"),
    ("max_tokens", HUGE, "must be an integer from 1"),
    ("max_tokens", 1.5, "must be an integer from 1"),
    ("min_tokens", -1, "must be an integer from 0"),
    ("min_tokens", 17, "min_tokens=17 must not exceed max_tokens=16"),
    ("temperature", -0.1, "temperature=-0.1 must be a number from 0 up to 2"),
    ("temperature", 2.1, "must be a number from 0 up to 2"),
    ("temperature", math.nan, "temperature=nan must be a number"),
    ("temperature", True, "temperature=True must be a number"),
    ("temperature", None, "temperature=None must be a number"),
    ("temperature", np.bool_(True), "temperature=True must be a number"),
    ("n", np.array([1, 2]), r"n=\[1, 2\] must be an integer"),
    ("temperature", HUGE, "must be a number from 0 up to 2"),
    ("top_p", 0, "must be a number above 0 up to 1"),
    ("top_p", 1.01, "must be a number above 0 up to 1"),
    ("top_k", -2, "0 or -1 turns it off"),
    ("top_k", HUGE, "must be an integer from 0"),
    ("min_p", -0.01, "must be a number from 0 up to 1"),
    ("min_p", 1.01, "must be a number from 0 up to 1"),
    ("presence_penalty", -2.1, "must be a number from -2 up to 2"),
    ("frequency_penalty", 2.1, "must be a number from -2 up to 2"),
    ("repetition_penalty", 0, "must be a number from 0.01 up to 10"),
    ("repetition_penalty", 1e-40, "repetition_penalty=1e-40 must be a number from 0.01 up to 10"),
    ("repetition_penalty", 10.1, "must be a number from 0.01 up to 10"),
    ("seed", 2**63, "must be an integer from"),
    ("seed", -(2**63) - 1, "must be an integer from"),
    ("seed", True, "seed=True must be an integer"),
    ("stop", ("a", 1), "must be a string or a list of strings"),
    ("stop", {"a"}, "must be a string or a list of strings"),
    ("stop", "", "every string must have 1 to 1024 characters, one has 0"),
    ("stop", ["x" * 1025], "every string must have 1 to 1024 characters, one has 1025"),
    ("stop", [f"{number}" for number in range(17)], "stop has 17 entries; at most 16"),
    ("bad_words", "word", "must be a string or a list of strings"),
    ("bad_words", ["a\ud800"], r"'a\\ud800' is not valid Unicode"),
    ("bad_words", [f"{number}" for number in range(129)], "at most 128"),
    ("stop_token_ids", [-1], "must hold token ids"),
    ("stop_token_ids", [1.0], "must hold token ids"),
    ("stop_token_ids", [2**31], "must hold token ids"),
    ("stop_token_ids", 5, "must hold token ids"),
    ("stop_token_ids", list(range(1025)), "stop_token_ids has 1025 entries; at most 1024"),
    ("allowed_token_ids", [], "must not be empty"),
    ("allowed_token_ids", list(range(1025)), "at most 1024"),
    ("logit_bias", {-1: 1.0}, "must hold token ids"),
    ("logit_bias", {"5": 1.0}, "must hold token ids"),
    ("logit_bias", {5: 100.5}, "must be a number from -100 up to 100"),
    ("logit_bias", {5: HUGE}, "must be a number from -100 up to 100"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "1025 entries; at most 1024"),
    ("logit_bias", [5, 6], "logit_bias must map token ids to numbers"),
    ("logit_bias", 5, "logit_bias must map token ids to numbers"),
    ("logprobs", 21, "must be an integer from 0 to 20"),
    ("logprobs", True, "logprobs=True must be an integer"),
    ("prompt_logprobs", 21, "must be an integer from 0 to 20"),
    ("include_stop_str_in_output", "no", "must be true or false"),
    ("ignore_eos", 1, "must be true or false"),
    ("skip_special_tokens", None, "must be true or false"),
    ("grammar", {"type": "object"}, "grammar must be a GrammarSpec, for example .* not dict"),
    ("grammar", "json", "not str"),
    ("output_kind", "all", "must be one of 'cumulative', 'delta', 'final'"),
    ("output_kind", None, "must be one of 'cumulative', 'delta', 'final'"),
]


def name_case(value: Any) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < HUGE else "huge"
    return text[:20]


@pytest.mark.parametrize(("field", "value", "message"), BAD, ids=name_case)
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(field)


GOOD = [
    ("n", 64), ("max_tokens", None), ("max_tokens", 2**31 - 1), ("min_tokens", 16), ("temperature", 0),
    ("temperature", 2), ("top_p", 1e-9), ("top_p", 1), ("top_k", 1), ("min_p", 0), ("min_p", 1),
    ("presence_penalty", -2), ("frequency_penalty", 2), ("repetition_penalty", 10), ("seed", -(2**63)),
    ("repetition_penalty", 0.01),
    ("seed", 2**63 - 1), ("logprobs", 0), ("prompt_logprobs", 20), ("logit_bias", {0: -100, 7: 100.0}),
    ("allowed_token_ids", (0,)), ("stop_token_ids", (2**31 - 1,)), ("output_kind", "delta"),
    ("grammar", GrammarSpec.choice(["yes"])),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), GOOD, ids=name_case)
def test_the_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


NORMALISED = [
    ("stop", "end", ("end",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop", None, ()),
    ("stop_token_ids", [1, 2], (1, 2)),
    ("stop_token_ids", None, ()),
    ("bad_words", ["a"], ("a",)),
    ("bad_words", None, ()),
    ("allowed_token_ids", [3], (3,)),
    ("allowed_token_ids", None, None),
    ("logit_bias", None, {}),
    ("top_k", -1, 0),
    ("temperature", np.float32(0.5), 0.5),
    ("top_k", np.int64(-1), 0),
    ("seed", np.uint64(2**63 - 1), 2**63 - 1),
    ("ignore_eos", np.bool_(True), True),
    ("stop_token_ids", np.array([1, 2]), (1, 2)),
    ("allowed_token_ids", [np.int32(3)], (3,)),
    ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
]


@pytest.mark.parametrize(("field", "value", "kept"), NORMALISED)
def test_other_forms_are_brought_into_one(field: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{field: value}), field)
    assert found == kept
    assert repr(found) == repr(kept), "of Python's own types"


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_min_tokens_has_no_limit_without_max_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (0.0, True), (1e-3, False)])
def test_temperature_zero_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_a_callers_list_stays_the_callers() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)  # type: ignore[arg-type]
    stop.append("b")
    assert params.stop == ("a",)


def test_a_callers_logit_bias_stays_the_callers() -> None:
    bias: dict[Any, float] = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias["unchecked"] = math.nan
    assert params.logit_bias == {5: 1.0}
