"""Reasoning in the chat: what a chat template leaves to a person, and the template's options for a choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.reasoning import SWITCHES, supports_reasoning
from engine import InvalidRequest

EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class ThinkingChoices:
    """What a chat template lets a person choose.

    Attributes:
        knows: it supports reasoning.
        has_switch: it renders otherwise when reasoning is switched off.
        efforts: the efforts that it takes; empty if they make no difference.
    """

    knows: bool = False
    has_switch: bool = False
    efforts: tuple[str, ...] = ()

    def __or__(self, other: ThinkingChoices) -> ThinkingChoices:
        """Return the choices that either of two models has."""
        efforts = tuple(each for each in EFFORTS if each in self.efforts + other.efforts)
        return ThinkingChoices(self.knows or other.knows, self.has_switch or other.has_switch, efforts)

    def make_options(self, thinks: bool, effort: str) -> dict[str, Any]:
        """Return the template's options for the person's choice; none for what the template does not take."""
        options: dict[str, Any] = dict.fromkeys(SWITCHES, thinks) if self.has_switch else {}
        is_on = thinks or not self.has_switch
        return options | ({"reasoning_effort": effort} if is_on and effort in self.efforts else {})


def read_choices(render: Callable[..., str]) -> ThinkingChoices:
    """Return what a chat template lets a person choose, by rendering a question in each way.

    Args:
        render: `Tokenizer.apply_chat_template`.
    """

    def ask(thinks: bool, **options: Any) -> str:
        try:
            return render([{"role": "user", "content": "x"}], **dict.fromkeys(SWITCHES, thinks), **options)
        except InvalidRequest:
            return ""

    on, off = ask(True), ask(False)
    rendered = {effort: ask(True, reasoning_effort=effort) for effort in EFFORTS}
    efforts = tuple(effort for effort, text in rendered.items() if text)
    differs = len({on, *rendered.values()} - {""}) > 1
    return ThinkingChoices(supports_reasoning(render), bool(on and off) and on != off, efforts if differs else ())
