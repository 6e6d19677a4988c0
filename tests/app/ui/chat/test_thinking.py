"""The chat offers the choices about reasoning that the chat template takes, and passes them on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import pytest

from app.ui.chat.conversation import read_text
from app.ui.chat.settings import Settings
from app.ui.chat.thinking import ThinkingChoices, read_choices
from engine import InvalidRequest
from tests.app.ui.chat.test_chat import REQUEST, ask, at, make_tab, play
from tests.fakes import FakeTokenizer

ANSWER = "<think>\nfine?\n</think>\n\nthanks"


@dataclass
class Template(FakeTokenizer):
    """A template with these variables; it writes their values, and refuses efforts that it does not know."""

    switch: str = ""
    efforts: tuple[str, ...] = ()
    num_rendered: int = 0
    opening: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        self.num_rendered += 1
        effort = kwargs.get("reasoning_effort", "own")
        if self.efforts and effort not in (*self.efforts, "own"):
            raise InvalidRequest(f"unknown effort {effort}", "messages")
        self.asked.append({name: kwargs[name] for name in (self.switch, "reasoning_effort") if name in kwargs})
        text = super().apply_chat_template(messages, **kwargs)
        is_off = kwargs.get(self.switch) is False
        return f"{text}{effort if self.efforts else ''}{'<think></think>' if is_off else self.opening}"


@pytest.mark.parametrize("switch", ["", "enable_thinking", "thinking"])
@pytest.mark.parametrize("efforts", [(), ("low", "medium", "high"), ("high",)])
def test_what_a_template_renders_differently_is_offered(switch: str, efforts: tuple[str, ...]) -> None:
    choices = read_choices(Template(switch=switch, efforts=efforts).apply_chat_template)
    assert choices == ThinkingChoices(bool(switch), bool(switch), efforts)


@pytest.mark.parametrize("thinks", [True, False])
async def test_the_choice_reaches_the_template_also_on_retry_and_is_read_once(thinks: bool) -> None:
    template = Template(switch="enable_thinking", efforts=("low", "high"))
    tab, engine = make_tab(tokenizer=template)
    engine.reply = lambda _: ANSWER
    assert [each["visible"] for each in await tab.offer_thinking([], thinks)] == [True, thinks]
    before = template.num_rendered
    settings = astuple(Settings(thinks=thinks, effort="high"))
    first = await play(tab, await ask(tab, settings=settings))
    retried = await play(tab, await tab.retry(at(turn=1), REQUEST, first.thread, None, *settings))
    assert template.num_rendered == before + 2
    expected = {"enable_thinking": True, "reasoning_effort": "high"} if thinks else {"enable_thinking": False}
    assert template.asked[-2:] == [expected, expected]
    for played in (first, retried):
        titles = [(each.get("metadata") or {}).get("title", "") for each in played.history]
        assert ("**Reasoning**" in titles) is thinks, "reasoning that was switched off is not shown"
        assert played.history[-2]["content"] == "thanks"


CHANNELS = "<|channel|>analysis<|message|>fine,\n\nor?<|end|><|start|>assistant<|channel|>final<|message|>  Yes \n both"


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize(
    ("opening", "whole"),
    [
        ("", "<think>\nfine,\n\nor?\n</think>\n\n  Yes \n both"), ("<think>\n", "fine,\n\nor?\n</think>\n\nYes both"),
        ("", "Yes \n both"), ("<think>\n", "</think>Yes both"), ("<|start|>assistant", CHANNELS),
        ("<|start|>assistant", "<|channel|>final<|message|>Yes both"),
    ],
)
async def test_an_answer_cut_anywhere_goes_on_to_what_an_uncut_one_says(
    opening: str, whole: str, is_kept: bool
) -> None:
    tab, engine = make_tab(tokenizer=Template(switch="enable_thinking", opening=opening))
    engine.reply = lambda _: whole
    settings = Settings(with_tokens=False)
    uncut = await play(tab, await ask(tab, settings=astuple(settings)))
    expected = [read_text(message["content"]) for message in uncut.history[1:-1]]
    prompt = engine.requests[0].prompt
    # A restarted server has only what the store has: no part of a mark, and no breaks around the reasoning.
    cuts = range(len(whole)) if is_kept else [word.end() for word in re.finditer("fine,|Yes|bo", whole)]
    for cut in cuts:
        engine.reply = lambda _, cut=cut: whole[:cut]
        thread = (await play(tab, await ask(tab, settings=astuple(settings)))).thread
        if not is_kept:
            tab.answers._kept.clear()
        engine.reply = lambda _, cut=cut: whole[cut:]
        # It goes on as it began, even if the next answer would not think.
        silent = astuple(replace(settings, thinks=not is_kept and not all(expected)))
        played = await play(tab, await tab.go_on(REQUEST, thread, None, *silent))
        assert [read_text(message["content"]) for message in played.history[1:-1]] == expected
        assert not is_kept or engine.requests[-1].prompt == prompt + whole[:cut]


async def test_a_model_without_choices_is_asked_nothing_and_offers_nothing() -> None:
    template = Template()
    tab, _ = make_tab(tokenizer=template)
    assert [each["visible"] for each in await tab.offer_thinking([], True)] == [False, False]
    await play(tab, await ask(tab, settings=astuple(Settings(thinks=False, effort="low"))))
    assert template.asked[-1] == {}
