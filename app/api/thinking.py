"""Models that think before they answer: which chat templates are theirs, and what a grammar makes of them.

the prompt ends in <think>          the output begins inside a thought (DeepSeek R1, QwQ)
the template knows thoughts         the output may begin with one (Qwen 3), unless enable_thinking is false
the prompt ends in </think>, or
the template knows none             there is no thought, and <think> is a text like any other

A grammar of any kind begins after the end of the reasoning (grammar/match/reasoning.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.api.constraint import Constraint
from engine import InvalidRequest
from grammar import Reasoning

Json = dict[str, Any]

OPEN = "<think>"
CLOSE = "</think>"
PROBE = "probe_of_troupe"
# the names under which chat templates have their switch
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Thinking:
    """How the outputs of one request are split into reasoning and content.

    Attributes:
        is_open: the prompt ends inside the reasoning; otherwise the output may begin it.
        keeps_breaks: line breaks after the reasoning belong to the content.
        is_shown: whether the reply includes reasoning.
    """

    is_open: bool
    keeps_breaks: bool = False
    is_shown: bool = True


def knows_thoughts(render: Callable[..., str]) -> bool:
    """Return whether a chat template supports reasoning.

    Args:
        render: `Tokenizer.apply_chat_template`.
    """
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    asked = _try(render, [user])
    # a switch that changes what the prompt says about thoughts
    silent = [_try(render, [user], **{name: False}) for name in SWITCHES]
    if any(text != asked and OPEN in text for text in silent) or asked.rstrip().endswith(OPEN):
        return True
    # a thought is written between the marks, or an old one is left out
    if OPEN in _try(render, [user, answer | {"reasoning_content": PROBE}], add_generation_prompt=False):
        return True
    thought = answer | {"content": f"{OPEN}{PROBE}{CLOSE}y"}
    told = _try(render, [user, thought, user])
    return bool(told) and PROBE not in told


def find_thinking(
    knows: bool, tail: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Thinking | None:
    """How the output of a rendered conversation begins; None when it holds no thought.

    Args:
        knows: whether the template knows thoughts.
        tail: the end of the rendered prompt.
        options: what the template was given, `add_generation_prompt` and its like included.
    """
    if options.get("continue_final_message"):
        _, mark, thought = str(messages[-1]["content"]).rpartition(OPEN)
        return Thinking(True) if knows and mark and CLOSE not in thought else None
    tail = tail.rstrip()
    if not options.get("add_generation_prompt") or tail.endswith(CLOSE):
        return None
    if tail.endswith(OPEN):
        return Thinking(True)
    is_off = any(options.get(name) is False for name in SWITCHES)
    return Thinking(False) if knows and not is_off else None


def think_first(constraint: Constraint, thinking: Thinking) -> tuple[Constraint, Thinking]:
    """Return the constraint of an answer after its reasoning."""
    spec = constraint.spec
    # These texts never begin with a line break, so one belongs to the reasoning.
    allows_breaks = spec.kind in ("json_schema", "json_object", "xml") or constraint.param == "tools"
    reasoning = Reasoning(None if thinking.is_open else OPEN, CLOSE, allows_breaks)
    thinking = replace(thinking, keeps_breaks=not allows_breaks)
    return Constraint(constraint.param, replace(spec, reasoning=reasoning)), thinking


def _try(render: Callable[..., str], messages: Sequence[Json], **options: Any) -> str:
    try:
        return render(messages, **options)
    except InvalidRequest:
        return ""
