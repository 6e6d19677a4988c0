"""The messages that the model reads of a history, and the figures under an answer."""

import pytest

from app.reasoning import Thinking
from app.ui.chat.conversation import (
    answer_message,
    answer_messages,
    error_message,
    figures_message,
    lay_out,
    read_text,
    take_back,
    to_model_messages,
    user_message,
)
from app.ui.explain import Explanation

FAILURE = error_message(Explanation("No.", "Because.", "Do."))


def test_the_model_reads_no_figures_and_no_failed_turn_behind_the_system_prompt() -> None:
    failed = [user_message("a"), FAILURE]
    history = [*failed, user_message("b"), answer_message("c"), figures_message("12 tok/s"), user_message("d")]
    read = [(message["role"], message["content"]) for message in to_model_messages(history, " be brief ")]
    assert read == [("system", "be brief"), ("user", "b"), ("assistant", "c"), ("user", "d")]
    assert to_model_messages([], "  ") == []


def test_an_answer_that_is_json_is_laid_out_as_a_code_block() -> None:
    text = '{"a": {}, "b": [12.50, "x, {y\\" :"], "c": [], "d": {"e": null}}'
    laid_out = """{
  "a": {},
  "b": [
    12.50,
    "x, {y\\" :"
  ],
  "c": [],
  "d": {
    "e": null
  }
}"""
    given = [user_message(text), answer_message(text), answer_message("{no json"), figures_message("[1]")]
    assert lay_out(given) == [given[0], answer_message(f"```json\n{laid_out}\n```"), *given[2:]]


def test_a_tool_call_is_shown_also_while_it_is_written() -> None:
    call = answer_message('Let me see. <tool_call>\n{"name": "f"}\n</tool_call>')
    assert lay_out([call])[0]["content"] == 'Let me see. **Tool call**\n```json\n{\n  "name": "f"\n}\n```'
    assert '"na' in lay_out([answer_message('<tool_call>{"na')])[0]["content"]


@pytest.mark.parametrize(("text", "shown"), [
    (r"$E=mc^2$ and $x$, \(y\)", r"\(E=mc^2\) and \(x\), \(y\)"), (r"$\frac{1}{2}$.", r"\(\frac{1}{2}\)."),
    ("$5 and $6", None), ("$5-$10, or 6$ each", None), ("$$\nx^2\n$$ \\[y\\]", None), (r"\$5 = \$6", None),
    ("`$x$` and ``$y$ ` ``", None), ("```\n$x$\n```", None), ("```\n$x$", None), ("$HOME:$PATH", None),
])
def test_formulas_between_dollars_are_shown_and_amounts_and_code_stay(text: str, shown: str | None) -> None:
    for make in (answer_message, user_message):
        assert lay_out([make(text)])[0]["content"] == (shown or text)
    assert take_back(shown or text, text) == text


@pytest.mark.parametrize(("text", "num_escaped"), [
    ("<b>you</b> &amp; <!-- I --> a < b && c", 4), ("$5 <u>and</u> $6", 2), ("- a\n\n    <b>in a list", 1),
    ("see ```html\n<p>", 1), ("`<b>` ``<i>`` ```<u>``` <https://a.example>", 0), ("    <b>code\n\n    <i>", 0),
    ("~~~\n<b>\n~~~\n> ```html\n> &lt;<b>", 0), (r"$a<b$ \(c<d\) $$a<b$$", 0),
])
def test_html_of_a_question_is_shown_as_it_was_typed(text: str, num_escaped: int) -> None:
    shown = lay_out([user_message(text)])[0]["content"]
    assert shown.count("&#00") == num_escaped
    assert take_back(shown, text) == text
    assert "&#00" not in lay_out([answer_message(text)])[0]["content"]


def test_text_is_read_from_all_forms_that_gradio_uses() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [read_text("ab"), read_text(blocks), read_text(blocks[0]), read_text(None)] == ["ab", "ab", "a", ""]


def test_reasoning_is_a_folded_message_and_not_read_back_to_the_model() -> None:
    thinking, answer = answer_messages("<think>\nhm\n</think>\n\nYes.")
    assert (thinking["content"], thinking["metadata"]["title"]) == ("hm", "**Reasoning**")
    assert to_model_messages([thinking, answer], "") == [{"role": "assistant", "content": "Yes."}]


def test_reasoning_that_goes_on_is_shown_as_it_grows() -> None:
    (thinking,) = answer_messages("<think>so far")
    assert thinking["content"] == "so far" and thinking["metadata"]["status"] == "pending"
    assert answer_messages("It is <think> in the middle") == [answer_message("It is <think> in the middle")]
    opened, answer = answer_messages("so far</think>Yes.", Thinking(is_open=True))
    assert (opened["content"], answer["content"]) == ("so far", "Yes.")


def test_the_analysis_of_a_model_with_channels_is_folded() -> None:
    channels = Thinking(is_open=False, has_channels=True)
    begun = "<|channel|>analysis<|message|>User greets."
    (growing,) = answer_messages(begun, channels)
    assert growing["content"] == "User greets." and growing["metadata"]["status"] == "pending"
    whole = f"{begun}<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
    reasoning, answer = answer_messages(whole, channels)
    assert (reasoning["content"], reasoning["metadata"]["status"]) == ("User greets.", "done")
    assert answer == answer_message("Hello!")
    assert answer_messages("<|channel|>final<|message|>Hi", channels) == [answer_message("Hi")]
    assert answer_messages("plain", channels) == [answer_message("plain")]
