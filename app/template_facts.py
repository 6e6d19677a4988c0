"""What a model's chat template supports: tools, their style (grammar/tags/tool_calls.py), and reasoning."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from app.reasoning import CLOSE, supports_reasoning
from engine import InvalidRequest, Tokenizer
from grammar import ToolStyle, list_tool_styles

PROBE = "probe_of_troupe"
TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "x"}
# a template that renders no calls may describe them to the model
DESCRIBED = {"hermes": re.compile(r'<tool_call>\s*\{\s*"name"')}


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a chat template supports.

    Attributes:
        knows_tools: it writes tools into the prompt.
        tool_style: the style of the model's calls; None if it is unknown.
        supports_reasoning: it supports reasoning.
        hides_reasoning: the end of reasoning is a special token, which texts usually omit.
    """

    knows_tools: bool = False
    tool_style: str | None = None
    supports_reasoning: bool = False
    hides_reasoning: bool = False


def read_template(tokenizer: Tokenizer | None, tool_style: str | None) -> TemplateFacts:
    """Try the chat template of a tokenizer.

    Args:
        tool_style: the style that was set; None: the one of the template.
    """
    if tokenizer is None:
        return TemplateFacts(tool_style=tool_style)
    render = tokenizer.apply_chat_template
    try:
        knows_tools = PROBE in render([USER], tools=[TOOL])
    except InvalidRequest:
        knows_tools = False
    end = tokenizer.decode(tokenizer.encode(CLOSE, add_special_tokens=False))
    return TemplateFacts(
        knows_tools, tool_style or find_style(render), supports_reasoning(render), CLOSE not in end
    )


def find_style(render: Callable[..., str]) -> str | None:
    """Return the style in which a chat template renders an assistant's calls; None if it is unknown.

    Args:
        render: `Tokenizer.apply_chat_template`.
    """
    function = {"name": PROBE, "arguments": {"of": 1}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    conversations = (
        [USER, {"role": "assistant", "content": "", "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "abcdefghi", "name": PROBE, "content": "1"}],
        [USER],
    )  # fmt: skip
    for messages in conversations:
        try:
            text = render(messages, tools=[TOOL])
        except InvalidRequest:
            continue
        # as it is, then with other spaces
        for is_spaced in (False, True):
            for name, style in list_tool_styles().items():
                if _make_sign(style, is_spaced).search(text) is not None:
                    return name
        for name, sign in DESCRIBED.items():
            if sign.search(text) is not None:
                return name
    return None


def _make_sign(style: ToolStyle, is_spaced: bool) -> re.Pattern[str]:
    """Return the pattern of the probe's call up to its argument."""
    if style.channel:
        return re.compile(f"to=functions.{PROBE}")
    argument = (style.parameter or "").partition("{value}")[0].replace("{key}", "of")
    ways = [
        (opening + head).replace("{name}", PROBE) + argument
        for opening in style.openings
        for head in style.heads
    ]
    pattern = "|".join(map(re.escape, ways))
    return re.compile(re.sub(r"(?:\\\s)+", r"\\s*", pattern) if is_spaced else pattern)
