"""How models write tool calls among words, as structural tags: only the tools there are, with valid arguments.

hermes   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>          Hermes, Qwen 2.5 and 3
llama    {"name": "f", "parameters": {...}}, also behind <|python_tag|>        Llama 3.1 to 3.3
mistral  [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]                 Mistral up to 2024
named    [TOOL_CALLS]f[ARGS]{...}                                              Mistral since 2025

The styles of `list_call_sections` have a section of calls between marks: DeepSeek R1, V3 and V3.1, Kimi K2.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import InvalidGrammar

Json = dict[str, Any]
# (name, schema of the arguments) of each tool.
Tools = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class CallSection:
    """A style whose calls stand in one section, each with its arguments as a JSON object.

    Attributes:
        begin, end: around all calls.
        head: before the arguments, with {name} for the name of the tool.
        number: the digits of a call's number stand after the head, then this.
        tail: after the arguments.
        separator: between two calls.
    """

    begin: str
    head: str
    tail: str
    end: str
    number: str = ""
    separator: str = ""


# Sources: the chat templates of the models.
_SECTIONS = {
    "deepseek": CallSection(
        begin="<｜tool▁calls▁begin｜>",
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        separator="\n",
    ),
    "deepseek_v31": CallSection(
        begin="<｜tool▁calls▁begin｜>",
        head="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "kimi": CallSection(
        begin="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.{name}:",
        tail="<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        number="<|tool_call_argument_begin|>",
    ),
}


def list_call_sections() -> Mapping[str, CallSection]:
    """Return the styles whose calls stand in one section, by name."""
    return _SECTIONS


def make_tool_tags(style: str, tools: Tools, is_parallel: bool = True) -> Json:
    """Return the structural tag of words with calls among them.

    Args:
        style: one of TOOL_STYLES.
        tools: names are taken as they are, so they hold nothing that JSON would escape.
        is_parallel: whether there may be more than one call.
    """
    if style not in TOOL_STYLES:
        raise InvalidGrammar(f"unknown style of tool calls {style!r}; choose from {list(TOOL_STYLES)}")
    if not tools:
        raise InvalidGrammar("tool calls need at least one tool")
    return {"type": "structural_tag", "format": TOOL_STYLES[style](tools, is_parallel)}


def _hermes(tools: Tools, is_parallel: bool) -> Json:
    tags = [
        _tag(f'<tool_call>\n{{"name": "{name}", "arguments": ', schema, "}\n</tool_call>")
        for name, schema in tools
    ]
    return _trigger(["<tool_call>"], tags, is_parallel)


def _llama(tools: Tools, is_parallel: bool) -> Json:
    heads = ('{"name": "', '{"type": "function", "name": "')
    triggers = [*heads, "<|python_tag|>"]
    tags = [
        _tag(f'{mark}{head}{name}", "parameters": ', schema, "}")
        for mark in ("", "<|python_tag|>")
        for head in heads
        for name, schema in tools
    ]
    return _trigger(triggers, tags, is_parallel)


def _mistral(tools: Tools, is_parallel: bool) -> Json:
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(f'{{"name": "{name}", "arguments": ', schema, "}") for name, schema in tools],
        "separator": ", ",
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    start = {"type": "or", "elements": [_const(" ["), _const("[")]}
    rule = ["[TOOL_CALLS]", {"type": "sequence", "elements": [start, calls, _const("]")]}]
    return {"type": "dispatch", "rules": [rule], "loop": False}


def _named(tools: Tools, is_parallel: bool) -> Json:
    def choose(mark: str) -> Json:
        tags = [_tag(f"{mark}{name}[ARGS]", schema, "") for name, schema in tools]
        return {"type": "or", "elements": tags}

    more = [{"type": "star", "content": choose("[TOOL_CALLS]")}] if is_parallel else []
    rule = ["[TOOL_CALLS]", {"type": "sequence", "elements": [choose(""), *more]}]
    return {"type": "dispatch", "rules": [rule], "loop": False}


def _section(style: CallSection, tools: Tools, is_parallel: bool) -> Json:
    tags = []
    for name, schema in tools:
        tag = _tag(style.head.format(name=name), schema, style.tail)
        if style.number:
            elements = [{"type": "regex", "pattern": "[0-9]{1,4}"}, _const(style.number), tag["content"]]
            tag["content"] = {"type": "sequence", "elements": elements}
        tags.append(tag)
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": style.separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    rule = [style.begin, {"type": "sequence", "elements": [calls, _const(style.end)]}]
    return {"type": "dispatch", "rules": [rule], "loop": False}


def make_forced_tags(tools: Tools, max_calls: int | None = None) -> Json:
    """Return the structural tag of a text that is a call, {"name": ..., "arguments": ...}, and nothing else.

    Each tool's schema is compiled as it would be alone: drafts and names of one mean nothing to the others.

    Args:
        max_calls: the text is an array of 1 to so many calls; None for one call.
    """
    if not tools:
        raise InvalidGrammar("tool calls need at least one tool")
    call = {
        "type": "or",
        "elements": [_tag(f'{{"name": "{name}", "arguments": ', schema, "}") for name, schema in tools],
    }
    if max_calls is None:
        return {"type": "structural_tag", "format": call}
    next_call = {"type": "sequence", "elements": [_const(", "), call]}
    more = {"type": "repeat", "min": 0, "max": max_calls - 1, "content": next_call}
    elements = [_const("["), call, *([more] if max_calls > 1 else []), _const("]")]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def _tag(begin: str, schema: Mapping[str, Any], end: str) -> Json:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _trigger(triggers: list[str], tags: list[Json], is_parallel: bool) -> Json:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": not is_parallel}


TOOL_STYLES: dict[str, Callable[[Tools, bool], Json]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
    "named": _named,
    **{name: partial(_section, style) for name, style in _SECTIONS.items()},
}
