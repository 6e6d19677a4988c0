"""Confidence comes from a value's own tokens, and not from those the grammar forced."""

import math
from typing import Any

import pytest

from app.extraction.confidence import field_confidence, score_tokens
from app.extraction.json_spans import scan
from engine import Logprob, TokenLogprobs


def position(text: str, logprob: float, masked: float | None = None) -> TokenLogprobs:
    return TokenLogprobs(Logprob(0, logprob, 1, text, masked))


HALF, OPEN = math.log(0.5), ('{"a": ', 0.0)


@pytest.mark.parametrize(
    ("tokens", "confidence"),
    [
        # only tokens of the value count, and the mean is over them
        ([('{"a": ', -9.0), ("12", HALF), (', "b": ', -9.0), ("7", 0.0), ("}", -9.0)], {"/a": 0.5, "/b": 1.0}),
        ([OPEN, ('"x', math.log(0.9)), ('y"', math.log(0.4)), ("}", 0.0)], {"/a": 0.65}),
        # forced tokens do not, unless the model was sure of them; a value that the schema decided alone has none
        ([OPEN, ('"U', math.log(0.8), -0.1), ('SD"', -5.0, 0.0), ("}", 0.0)], {"/a": 0.8}),
        ([OPEN, ("true", -3.0, 0.0), ("}", 0.0)], {}), ([OPEN, ("true", -1e-6, 0.0), ("}", 0.0)], {"/a": 1.0}),
    ],
)
def test_confidence_is_that_of_the_values_own_tokens(tokens: list[Any], confidence: dict[str, float]) -> None:
    text = "".join(token[0] for token in tokens)
    scored = score_tokens(text, [0] * len(tokens), [position(*token) for token in tokens], lambda token_id: "")
    assert field_confidence(scan(text).leaves, scored) == pytest.approx(confidence, abs=0.06)


def test_characters_of_several_tokens_are_placed_by_decoding_one_after_the_other() -> None:
    text = '{"a": "é!"}'
    pieces = ['{"a": "', "", "é", '!"', "}"]
    logprobs = [
        position(piece, value)
        for piece, value in [('{"a": "', 0.0), ("\ufffd", -1.0), ("\ufffd", -1.0), ('!"', -1.0), ("}", 0.0)]
    ]
    scored = score_tokens(text, range(5), logprobs, pieces.__getitem__)
    assert [(token.start, token.end) for token in scored] == [(0, 7), (7, 7), (7, 8), (8, 10), (10, 11)]


def test_a_last_special_token_has_no_text() -> None:
    logprobs = [position("12", -0.5), position("<|im_end|>", 0.0)]
    scored = score_tokens("12", [1, 2], logprobs, {1: "12", 2: ""}.__getitem__)
    assert [(token.start, token.end) for token in scored] == [(0, 2), (2, 2)]
