"""The ways in which models write tool calls among words: how to know one, and where its parts begin and end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from engine import InvalidRequest
from grammar import CallSection, list_call_sections

PROBE = "probe_of_troupe"


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How calls look in a text that a grammar (`make_tool_tags`) has shaped.

    Attributes:
        opens: with what the first call begins; everything before it is words.
        head: what stands from there up to the arguments; its group is the name.
        next_head: the same for a call right after another one.
        separator: what stands between two such calls, None where words may.
        close: what ends the last of them.
    """

    opens: tuple[str, ...]
    head: re.Pattern[str]
    next_head: re.Pattern[str]
    separator: str | None
    close: str


def _style(
    opens: tuple[str, ...], start: str, call: str, separator: str | None = None, close: str = ""
) -> ToolStyle:
    return ToolStyle(opens, re.compile(start + call), re.compile(call), separator, close)


def _read_section(section: CallSection) -> ToolStyle:
    before, _, after = section.head.partition("{name}")
    number = rf"\d+{re.escape(section.number)}" if section.number else ""
    call = rf"{re.escape(before)}([\w-]+){re.escape(after)}{number}(?=\{{)"
    separator, close = section.tail + section.separator, section.tail + section.end
    return _style((section.begin,), re.escape(section.begin), call, separator, close)


_JSON_HEAD = r'\{"name": "([\w-]+)", "arguments": (?=\{)'
STYLES = {
    "hermes": _style(("<tool_call>",), r"<tool_call>\n", _JSON_HEAD, close="}\n</tool_call>"),
    "llama": _style(
        ('{"name": "', '{"type": "function", "name": "', "<|python_tag|>"),
        r"(?:<\|python_tag\|>)?",
        r'\{(?:"type": "function", )?"name": "([\w-]+)", "parameters": (?=\{)',
        close="}",
    ),
    "mistral": _style(("[TOOL_CALLS]",), r"\[TOOL_CALLS\] ?\[", _JSON_HEAD, separator="}, ", close="}]"),
    "named": _style(("[TOOL_CALLS]",), r"\[TOOL_CALLS\]", r"([\w-]+)\[ARGS\](?=\{)"),
    **{name: _read_section(section) for name, section in list_call_sections().items()},
}


def find_style(render: Callable[..., str]) -> str | None:
    """The style in which a chat template writes the calls of an assistant; None when it is none of ours.

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
            style = _recognise(render(messages, tools=[tool]))
        except InvalidRequest:
            continue
        if style is not None:
            return style
    return None


def _recognise(text: str) -> str | None:
    for name, section in list_call_sections().items():
        before, _, after = section.head.partition("{name}")
        if f"{before}{PROBE}{after}" in text:
            return name
    if "<tool_call>" in text:
        # Other models put the same tag around other things than this.
        return "hermes" if re.search(r'<tool_call>\s*\{\s*"name"', text) else None
    if "[TOOL_CALLS]" in text:
        if "[CALL_ID]" in text:
            return None
        return "named" if "[ARGS]" in text else "mistral"
    if re.search(rf'\{{"name": "{PROBE}", "parameters": ', text):
        return "llama"
    return None
