"""Reads from a chat template how its model writes tool calls, by rendering probe calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.api.tools.styled_calls import StyledCalls
from engine import InvalidRequest
from grammar import ToolStyle, list_tool_styles

Json = dict[str, Any]
# The tools of the probes, the ids of their calls, and an answer without calls.
NAMES = ("probe_of_troupe", "second_probe")
IDS = ("Qa1Zb2Xc3", "Qd4Ze5Xf6")
ANSWER = "☃ said"
VALUES = {"zqa": "some text", "zqb": "other words"}
RICH = {"zqa": "some text", "zqb": 7041, "zqc": 2.5, "zqd": True, "zqe": None, "zqf": [1, "a"], "zqg": {"k": "v"}}
PARAMETERS: Json = {"type": "object", "properties": dict.fromkeys(RICH, True)}
# Templates may look into the schema of each argument.
SHOWN: Json = {"type": "object", "properties": {name: {"type": "string", "description": "d"} for name in RICH}}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": SHOWN}} for name in NAMES]
USER = {"role": "user", "content": "x"}
# What a template that renders no calls tells the model about them.
DESCRIBED = {
    "hermes": re.compile(r'<tool_call>\s*\{\s*"name"'),
    "phi4_mini_json": re.compile(r'functools\[\{"name"'),
    "phi4_mini": re.compile(r"<\|tool\|>"),
    "granite": re.compile(r"<\|tool_call\|>.{0,40}(?:JSON list|\[)", re.DOTALL),
    "lfm2": re.compile(r"<\|tool_list_start\|>|\nList of tools: \["),
}
# What only the source shows of a template that cannot render calls here: some of Kimi's change lists.
WRITTEN = {"kimi_k2": "<|tool_calls_section_begin|>"}
_SPECIAL = re.compile(r"<[^<>\n]{1,60}>|\[[A-Z_]{2,}\]")
_REASONING = re.compile(r".*(?:</think>|<\|END_THINKING\|>)", re.DOTALL)

Render = Callable[..., str]


class _Unreadable(Exception):
    """The probes do not show how calls are written."""


def read_style(render: Render, ends: Collection[str] = (), source: str = "") -> ToolStyle | None:
    """Return the style in which a chat template renders an assistant's calls; None if it cannot be read.

    Args:
        render: `Tokenizer.apply_chat_template`.
        ends: the tokens that end an answer.
        source: of the template.
    """
    try:
        prompt = render([USER], tools=TOOLS)
    except InvalidRequest:
        return None
    try:
        probe = _Probe(render, ends)
        region = probe.render([RICH])
    except (InvalidRequest, _Unreadable):
        written = next((list_tool_styles()[name] for name, mark in WRITTEN.items() if mark in source), None)
        return _find_described(prompt) or written
    if "to=functions." in region and "<|channel|>" in region:
        return list_tool_styles()["openai"]
    try:
        style = _read_json(probe) or _read_parameters(probe)
    except (InvalidRequest, _Unreadable, ValueError):  # a part of the call is not found
        style = None
    if style is None or style.openings[0][:1] in ("", "{"):
        found = _find_described(prompt)
        return found or (list_tool_styles()["llama3_json"] if region.lstrip().startswith('{"name"') else None)
    if style.openings == ("[",):
        style = list_tool_styles()["pythonic"]
    return style if _reads_back(style, region) else None


def _find_described(prompt: str) -> ToolStyle | None:
    return next((list_tool_styles()[name] for name, sign in DESCRIBED.items() if sign.search(prompt)), None)


def _reads_back(style: ToolStyle, region: str) -> bool:
    """Return whether the parser of a style reads the call that the template has written."""
    parser = StyledCalls(style, dict.fromkeys(NAMES, PARAMETERS))
    pieces = [piece for piece in (*parser.feed(region), *parser.close()) if piece.call == 0]
    try:
        read = json.loads("".join(piece.text for piece in pieces))
    except ValueError:
        return False
    # Templates may leave out what is null.
    return bool({key: value for key, value in RICH.items() if value is not None or key in read} == read)


class _Probe:
    """The text of an assistant's calls in a template, without what stands around each answer."""

    def __init__(self, render: Render, ends: Collection[str]) -> None:
        self._render = render
        self._has_own_ids = False
        answer = render([USER, {"role": "assistant", "content": ANSWER}], tools=TOOLS, add_generation_prompt=False)
        self._before, found, self._after = answer.partition(ANSWER)
        if not found:
            raise _Unreadable
        end = _SPECIAL.search(self._after)
        self._ends = {*ends, *([] if end is None else [end[0]])}
        # Kimi's ids have the names of the tools.
        one = self._write([VALUES])
        self._has_own_ids = NAMES[0] not in self._cut(one)
        if NAMES[0] not in self._cut(self._write([VALUES])):
            raise _Unreadable

    def _write(self, arguments: Sequence[Mapping[str, Any]]) -> str:
        calls = [
            {"id": f"functions.{name}:{number}" if self._has_own_ids else IDS[number], "type": "function",
             "function": {"name": name, "arguments": dict(each)}}
            for number, (name, each) in enumerate(zip(NAMES, arguments, strict=False))
        ]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._render([USER, message], tools=TOOLS, add_generation_prompt=False)

    def _cut(self, text: str) -> str:
        start = _align(text, _count_common(text, self._before))
        region = text[start:]
        if NAMES[0] not in region:
            return region
        before, name, rest = region.partition(NAMES[0])
        return _REASONING.sub("", before).lstrip() + name + rest

    def render(self, arguments: Sequence[Mapping[str, Any]]) -> str:
        """Return calls with these arguments, the first of one tool and the second of the other."""
        region = self._cut(self._write(arguments))
        num_after = _count_common(region[::-1], self._after[::-1])
        end = _align_up(region, len(region) - num_after)
        return region[: min([end, *(found for each in self._ends if (found := region.find(each)) >= 0)])]

    def render_two(self, arguments: Mapping[str, Any]) -> str | None:
        """Return two calls with the same arguments, None if the template writes one only."""
        try:
            found = self.render([arguments, arguments])
        except InvalidRequest:
            return None
        return found if NAMES[1] in found else None


def _count_common(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


def _align(text: str, at: int) -> int:
    """Return a place at most there that is not inside a special token."""
    return next((m.start() for m in _SPECIAL.finditer(text) if m.start() < at < m.end()), at)


def _align_up(text: str, at: int) -> int:
    return next((m.end() for m in _SPECIAL.finditer(text) if m.start() < at < m.end()), at)


def _read_json(probe: _Probe) -> ToolStyle | None:
    """Return the style of a template that writes arguments as one JSON object."""
    region = probe.render([VALUES])
    for is_loose, separators in ((False, (", ", ": ")), (True, (",", ":"))):
        written = json.dumps(VALUES, separators=separators)
        if written in region:
            two = probe.render_two(VALUES)
            style = _split(region, two, written, written)
            return replace(style, is_loose=is_loose)
    return None


def _read_parameters(probe: _Probe) -> ToolStyle | None:
    """Return the style of a template that writes arguments one by one."""
    none, one, two = probe.render([{}]), probe.render([{"zqa": VALUES["zqa"]}]), probe.render([VALUES])
    at = one.rindex(NAMES[0], 0, one.index("zqa", one.index(NAMES[0]) + len(NAMES[0]))) + len(NAMES[0])
    head, none, one, two = one[:at], none[at:], one[at:], two[at:]
    start, middle, end = _take(one, "zqa", VALUES["zqa"])
    _, _, between = _take(two, "zqa", VALUES["zqa"])
    between = between.partition("zqb")[0]
    num_head = _align(none, _count_common(none, start))
    head, tail, before = head + none[:num_head], none[num_head:], start[num_head:]
    if not end.endswith(tail) or not between.endswith(before):
        raise _Unreadable
    after = end[: len(end) - len(tail)]
    separator = between[len(after) : len(between) - len(before)]
    if not between.startswith(after):
        raise _Unreadable
    parameter = f"{before}{{key}}{middle}{{value}}{after}"
    style = _split(head + tail, probe.render_two({}), "", "", head)
    style = replace(style, parameter=parameter, parameter_separator=separator)
    return _read_values(style, probe, len(head), tail)


def _read_values(style: ToolStyle, probe: _Probe, num_head: int, tail: str) -> ToolStyle:
    """Return a style with the way in which it writes values other than strings."""
    number = probe.render([{"zqa": 7041}])[num_head:].removesuffix(tail)
    before, _, after = number.partition("7041")
    other = before.replace("zqa", "{key}", 1) + "{value}" + after
    if other != style.parameter:
        text = str(style.parameter)
        start, _, end = text.partition("{value}")
        other_start, _, other_end = other.partition("{value}")
        quote = start.removeprefix(other_start)
        if quote and start == other_start + quote and end == quote + other_end:
            is_python = quote in ("'", '"')
            style = replace(
                style, parameter=other, dialect="python" if is_python else "gemma", quote="" if is_python else quote
            )
        else:
            style = replace(style, other_parameter=other)
    listed = probe.render([{"zqa": [1, "a"]}])[num_head:]
    if style.dialect == "json" and '[1, "a"]' not in listed:
        if "[1, 'a']" not in listed:
            raise _Unreadable
        style = replace(style, dialect="python")
    return style


def _take(text: str, key: str, value: str) -> tuple[str, str, str]:
    """Return what stands before a key, between it and its value, and behind that."""
    start, found, rest = text.partition(key)
    middle, has_value, end = rest.partition(value)
    if not found or not has_value:
        raise _Unreadable
    return start, middle, end


def _split(one: str, two: str | None, first: str, second: str, head: str | None = None) -> ToolStyle:
    """Return the style of calls: what stands before, between and behind their arguments.

    Args:
        one, two: one call, and two.
        first, second: their arguments as they are written.
        head: one call up to its arguments, where these are empty.
    """
    before = one.partition(first)[0] if head is None else head
    behind = _mark(one[len(before) + len(first) :])
    if two is None:
        opening, rest = _cut_opening(_mark(before))
        return ToolStyle((opening,), (rest,), behind)
    if head is None:
        _, _, rest = two.partition(first)
        middle = rest.partition(second)[0]
    else:
        rest = two[len(before) :]
        name = rest.index(NAMES[1]) + len(NAMES[1])
        middle = rest[: name + len(before) - before.rindex(NAMES[0]) - len(NAMES[0])]
    between, head, number = _mark(middle), _mark(before), 0
    # What both calls have right before their arguments; their numbers may differ.
    at, other = len(head), len(between)
    parts: list[str] = []
    while at and other:
        run, other_run = _find_run(head, at), _find_run(between, other)
        if run and other_run and int(other_run) == int(run) + 1:
            parts.append("{index}")
            at, other, number = at - len(run), other - len(other_run), number + 1
        elif head[at - 1] == between[other - 1]:
            parts.append(head[at - 1])
            at, other = at - 1, other - 1
        else:
            break
    shared = "".join(reversed(parts))
    if at == 0:  # each call has a section of its own
        gap = between[:other]
        end = gap[: _align(gap, _count_common(gap, behind))].rstrip() if gap.strip() else ""
        opening, rest = _cut_opening(shared)
        if not end:
            return ToolStyle((opening,), (rest,), "", separator=gap + opening)
        return ToolStyle((opening,), (rest,), end, is_repeated=True)
    cut = _align_up(head, at) - at
    opening, shared = head[: at + cut], shared[cut:]
    between = between[: other + cut]
    tail = between[: _align(between, _align(behind, _count_common(between, behind)))]
    return ToolStyle((opening,), (shared,), tail, between[len(tail) :], behind[len(tail) :])


def _mark(text: str) -> str:
    """Return a text with places for names and ids."""
    for number, name in enumerate(NAMES):
        text = text.replace(f"functions.{name}:{number}", "functions.{name}:{index}")
        text = text.replace(name, "{name}").replace(IDS[number], "{id}")
    return text


def _find_run(text: str, end: int) -> str:
    """Return the digits right before a place."""
    found = re.search(r"\d+$", text[:end])
    return "" if found is None else found[0]


def _cut_opening(text: str) -> tuple[str, str]:
    """Return what stands before a call's head, and the head."""
    before = text.partition("{name}")[0]
    cut = max((before.rfind(sign) + 1 for sign in (">", "]", "\n")), default=0) or len(before)
    return text[:cut], text[cut:]
