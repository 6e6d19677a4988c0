"""SamplingParams: every field's range, and the forms it is accepted in."""

import math
from typing import Any

import numpy as np
import pytest

from engine import InvalidRequest, SamplingParams, StructuredOutputsParams
from grammar import GrammarSpec

HUGE = 10**400  # an integer that no float can hold

WRONG: dict[str, dict[str, list[Any]]] = {
    "n": {"must be an integer from 1 to 256": [0, 257, True, 2.0], r"n=\[1, 2\] must be": [np.array([1, 2])]},
    "max_tokens": {"must be an integer from 1": [0, HUGE, 1.5]},
    "min_tokens": {"must be an integer from 0": [-1], "min_tokens=17 must not exceed max_tokens=16": [17]},
    "temperature": {"must be a number from 0": [-0.1, math.inf, math.nan, True, None, np.bool_(True), HUGE]},
    "top_p": {"must be a number above 0 up to 1": [0, 1.01]},
    "top_k": {"must be an integer from 0 .*0 or -1 disables it": [-2, HUGE]},
    "min_p": {"must be a number from 0 up to 1": [-0.01, 1.01]},
    "presence_penalty": {"must be a number from -2 up to 2": [-2.1]},
    "frequency_penalty": {"must be a number from -2 up to 2": [2.1]},
    "repetition_penalty": {"must be a number from 0.01 up to 10": [0, 1e-40, 10.1]},
    "seed": {"must be an integer from": [2**63, -(2**63) - 1, True]},
    "stop": {
        "must be a string or a list of strings": [("a", 1), {"a"}],
        "each string must have 1 to 1024 characters; one has": ["", ["x" * 1025]],
        "stop has 17 entries; at most 16": [[f"{number}" for number in range(17)]],
    },
    "bad_words": {
        "must be a string or a list of strings": ["word"], r"'a\\ud800' is not valid Unicode": [["a\ud800"]],
        "at most 128": [[f"{number}" for number in range(129)]],
    },
    "stop_token_ids": {
        "must hold token ids": [[-1], [1.0], [2**31], 5],
        "stop_token_ids has 1025 entries; at most 1024": [list(range(1025))],
    },
    "allowed_token_ids": {"must not be empty": [[]], "at most 1024": [list(range(1025))]},
    "logit_bias": {
        "must hold token ids": [{-1: 1.0}, {"5": 1.0}],
        "must be a number from -100 up to 100": [{5: 100.5}, {5: HUGE}],
        "1025 entries; at most 1024": [dict.fromkeys(range(1025), 1.0)],
        "logit_bias must map token ids to numbers": [[5, 6], 5],
    },
    "logprobs": {"must be an integer from -1 to": [-2, True]},
    "prompt_logprobs": {"must be an integer from -1 to": [-2]},
    "truncate_prompt_tokens": {"must be an integer from -1": [-2, 1.5], "leaves no prompt": [0]},
    "structured_outputs": {
        "must be a StructuredOutputsParams, not str": ["a+"],
        "has no field 'pattern'": [{"pattern": "a"}],
        "needs one constraint, not none": [{}],
        "needs one constraint, not regex and choice": [StructuredOutputsParams(regex="a", choice=["a"])],
        "whitespace_pattern is not supported": [StructuredOutputsParams(regex="a", whitespace_pattern=" ")],
    },
    "include_stop_str_in_output": {"must be true or false": ["no"]},
    "ignore_eos": {"must be true or false": [1]},
    "skip_special_tokens": {"must be true or false": [None]},
    "grammar": {"must be a GrammarSpec, for example .* not (dict|str)": [{"type": "object"}, "json"]},
    "output_kind": {"must be one of 'cumulative', 'delta', 'final'": ["all", None]},
}
BAD = [(name, text, value) for name, told in WRONG.items() for text, values in told.items() for value in values]


def name_case(value: Any) -> str:
    text = str(value) if not isinstance(value, int) or abs(value) < HUGE else "huge"
    return text[:20]


@pytest.mark.parametrize(("field", "message", "value"), BAD, ids=name_case)
def test_a_value_outside_its_range_is_refused_by_name(field: str, message: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(field)


GOOD = [
    ("n", 256), ("max_tokens", None), ("max_tokens", 2**31 - 1), ("min_tokens", 16), ("temperature", 0),
    ("temperature", 1e308), ("logprobs", -1),
    ("top_p", 1e-9), ("top_p", 1), ("top_k", 1), ("top_k", 2**31 - 1), ("min_p", 0), ("min_p", 1),
    ("stop", ("x" * 1024,) * 16), ("bad_words", ("word",) * 128),
    ("presence_penalty", -2), ("frequency_penalty", 2), ("repetition_penalty", 10), ("seed", -(2**63)),
    ("seed", 2**63 - 1), ("logprobs", 0), ("prompt_logprobs", 20), ("logit_bias", {0: -100, 7: 100.0}),
    ("allowed_token_ids", (0,)), ("stop_token_ids", (2**31 - 1,)), ("output_kind", "delta"),
    ("grammar", GrammarSpec.choice(["yes"])), ("repetition_penalty", 0.01),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), GOOD, ids=name_case)
def test_the_ends_of_a_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


NORMALISED = [
    ("stop", "end", ("end",)), ("stop", ["a", "b"], ("a", "b")), ("stop", None, ()), ("stop_token_ids", None, ()),
    ("bad_words", ["a"], ("a",)), ("bad_words", None, ()), ("allowed_token_ids", None, None),
    ("logit_bias", None, {}), ("top_k", -1, 0), ("top_k", np.int64(-1), 0),
    ("temperature", np.float32(0.5), 0.5), ("seed", np.uint64(2**63 - 1), 2**63 - 1),
    ("ignore_eos", np.bool_(True), True), ("stop_token_ids", np.array([1, 2]), (1, 2)),
    ("allowed_token_ids", [np.int32(3)], (3,)), ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "kept"), NORMALISED)
def test_other_forms_are_brought_into_one(field: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{field: value}), field)
    assert found == kept
    assert repr(found) == repr(kept), "of Python's own types"


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ({"regex": "a+"}, GrammarSpec.regex("a+")),
        (StructuredOutputsParams(json={"type": "object"}), GrammarSpec.json_schema({"type": "object"})),
        (StructuredOutputsParams(json_object=True), GrammarSpec.json_object()),
        (StructuredOutputsParams(choice=["a", "b"]), GrammarSpec.choice(["a", "b"])),
        (StructuredOutputsParams(grammar='root ::= "a"'), GrammarSpec.ebnf('root ::= "a"')),
        ({"json": {}, "disable_any_whitespace": True}, GrammarSpec.json_schema({}, "compact")),
    ],
)
def test_a_constraint_under_vllms_names_becomes_a_grammar(given: Any, spec: GrammarSpec) -> None:
    params = SamplingParams(structured_outputs=given)
    assert params.grammar == spec and params.clone() == params
    with pytest.raises(InvalidRequest, match="two constraints"):
        SamplingParams(structured_outputs=given, grammar=spec)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_min_tokens_has_no_limit_without_max_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (0.0, True), (1e-3, False)])
def test_temperature_zero_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_a_callers_lists_stay_the_callers() -> None:
    stop, bias = ["a"], {5: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)  # type: ignore[arg-type]
    stop.append("b")
    bias["unchecked"] = math.nan  # type: ignore[index]
    assert (params.stop, params.logit_bias) == (("a",), {5: 1.0})
