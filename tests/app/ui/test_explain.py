"""Every error says what happened, why, and what to do next."""

import pytest

from app.extraction import TextTooLong
from app.ui.explain import explain
from engine import (
    ConfigError,
    EngineDead,
    EngineOverloaded,
    EngineSleeping,
    InvalidRequest,
    PromptTooLong,
    RequestTimeout,
)
from grammar import InvalidGrammar, UnsupportedGrammar


@pytest.mark.parametrize(
    ("error", "state", "parts"),
    [
        (EngineOverloaded("512 requests wait", 2.0), "ready", ["queue is full", "512 requests wait.", "in 2 s"]),
        (TextTooLong("3,000 tokens of 2,048"), "ready", ["too long", "3,000 tokens of 2,048.", "Shorten it"]),
        (PromptTooLong("9 tokens > 5", "messages"), "ready", ["too long for this model", "longer context"]),
        (UnsupportedGrammar("/a", "not", "no way"), "ready", ["“not” at /a", "No way.", "run again"]),
        (UnsupportedGrammar("", "not", "no way"), "ready", ["“not” at the root"]),
        (InvalidGrammar("line 1"), "ready", ["grammar", "Line 1."]),
        (InvalidRequest("top_p is 2", "top_p"), "ready", ["(top_p)", "Top_p is 2.", "send it again"]),
        (RequestTimeout("after 3 s"), "ready", ["too long", "After 3 s."]),
        (EngineDead("crashed"), "restarting", ["is restarting", "Crashed.", "in a few seconds"]),
        (EngineDead("crashed"), "dead", ["has stopped", "restart the app"]),
        (EngineSleeping("it is sleeping"), "sleeping", ["sleeps", "It is sleeping.", "wake it up"]),
        (ConfigError("odd"), "ready", ["an error", "Odd."]),
    ],
)
def test_an_error_is_put_into_words(error: Exception, state: str, parts: list[str]) -> None:
    text = explain(error, state).as_markdown()
    assert all(part in text for part in parts), text


def test_a_message_that_is_empty_stays_so() -> None:
    assert explain(EngineDead(""), "dead").why == ""
