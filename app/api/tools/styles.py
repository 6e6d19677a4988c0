"""Finds the style of tool calls (grammar/tags/tool_calls.py) of a model from its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable

from engine import InvalidRequest
from grammar import ToolStyle, list_tool_styles

PROBE = "probe_of_troupe"
# a template that renders no calls may describe them to the model
DESCRIBED = {"hermes": re.compile(r'<tool_call>\s*\{\s*"name"')}


def find_style(render: Callable[..., str]) -> str | None:
    """Return the style in which a chat template renders an assistant's calls; None if it is unknown.

    Args:
        render: `Tokenizer.apply_chat_template`.
    """
    tool = {
        "type": "function",
        "function": {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
    }
    function = {"name": PROBE, "arguments": {"of": 1}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    user = {"role": "user", "content": "x"}
    conversations = (
        [user, {"role": "assistant", "content": "", "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "abcdefghi", "name": PROBE, "content": "1"}],
        [user],
    )  # fmt: skip
    for messages in conversations:
        try:
            text = render(messages, tools=[tool])
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
