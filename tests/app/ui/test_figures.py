"""The line under an answer or a record."""

import pytest

from app.ui.figures import describe_output, format_seconds
from engine import CompletionOutput, GrammarInfo, RequestMetrics, RequestOutput


def test_the_figures_of_an_answer_fit_one_line() -> None:
    metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.25, last_token_time=3.25)
    completion = CompletionOutput(0, "hi", list(range(101)), finish_reason="length")
    output = RequestOutput("r", None, [0] * 200, [completion], True, 50, None, metrics, GrammarInfo("xgrammar", 0.1))
    assert describe_output(output) == (
        "first token 250 ms · 50 tok/s · 101 tokens · prompt 200, 25% cached · grammar by xgrammar"
        " · cut off at the token limit"
    )


def test_an_output_without_tokens_has_figures_too() -> None:
    output = RequestOutput("r", None, [], [CompletionOutput(0, "", [], finish_reason="abort")], True)
    assert describe_output(output) == "0 tokens · stopped"


@pytest.mark.parametrize(("seconds", "text"), [(0.0004, "0 ms"), (0.25, "250 ms"), (2.04, "2.0 s")])
def test_seconds_are_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
