"""The tool calls of models as structural tags: only the tools that exist, with arguments that fit their schemas.

Each style is a row of TOOL_STYLES, named as vLLM names its parser. The sources are the models' chat templates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..errors import InvalidGrammar
from .parameters import write_parameters
from .structural_tag import make_choice, make_const, make_optional, make_sequence, make_tag

Json = dict[str, Any]
# (name, schema of the arguments) of each tool.
Tools = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """The form in which one family of models writes tool calls.

    Attributes:
        openings: what may stand before the first call; "" where a call begins with its head.
        heads: what may stand between that and the arguments, with {name} for the name of the tool.
        tail: after the arguments.
        separator: between two calls of one section, None where a section has one call.
        end: after the last call of a section.
        number: the digits of a call's number stand after the head, then this.
        parameter: how one argument is written, with {key} and {value}; None where all are one JSON object.
        parameter_separator: between two arguments.
        is_repeated: text and more sections may follow a section.
        is_whole: an answer is either text or calls; text does not begin with an opening.
        channel: how an answer of several messages begins one, with {channel} for its name.
        next_message: between two messages.
    """

    openings: tuple[str, ...]
    heads: tuple[str, ...] = ('{"name": "{name}", "arguments": ',)
    tail: str = "}"
    separator: str | None = None
    end: str = ""
    number: str = ""
    parameter: str | None = None
    parameter_separator: str = ""
    is_repeated: bool = False
    is_whole: bool = False
    channel: str = ""
    next_message: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the beginnings of a section, without the spaces and brackets after them."""
        starts = [head.partition("{name}")[0] for head in self.heads]
        found = [[opening.rstrip(" [\n") or opening] if opening else starts for opening in self.openings]
        return tuple(dict.fromkeys(chain.from_iterable(found)))


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_STYLES: Mapping[str, ToolStyle] = {
    # Hermes, Qwen 2.5, Qwen 3
    "hermes": ToolStyle(("<tool_call>\n",), end="\n</tool_call>", is_repeated=True),
    # Llama 3.1 to 3.3
    "llama3_json": ToolStyle(
        ("", "<|python_tag|>"),
        ('{"name": "{name}", "parameters": ', '{"type": "function", "name": "{name}", "parameters": '),
        is_repeated=True,
    ),
    # Mistral until 2024, and since 2025
    "mistral": ToolStyle(("[TOOL_CALLS] [", "[TOOL_CALLS]["), separator=", ", end="]"),
    "mistral_v11": ToolStyle(("[TOOL_CALLS]",), ("{name}[ARGS]",), "", separator="[TOOL_CALLS]"),
    # DeepSeek R1 and V3, then V3.1
    "deepseek_v3": ToolStyle(
        (_DEEPSEEK[0],),
        (f"{_DEEPSEEK[1]}function<｜tool▁sep｜>{{name}}\n```json\n",),
        f"\n```{_DEEPSEEK[2]}",
        separator="\n",
        end=_DEEPSEEK[3],
    ),
    "deepseek_v31": ToolStyle(
        (_DEEPSEEK[0],),
        (f"{_DEEPSEEK[1]}{{name}}<｜tool▁sep｜>",),
        _DEEPSEEK[2],
        separator="",
        end=_DEEPSEEK[3],
    ),
    # Kimi K2
    "kimi_k2": ToolStyle(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_call_begin|>functions.{name}:",),
        "<|tool_call_end|>",
        separator="",
        end="<|tool_calls_section_end|>",
        number="<|tool_call_argument_begin|>",
    ),
    # Qwen 3 Coder, Qwen 3.5
    "qwen3_coder": ToolStyle(
        ("<tool_call>\n",),
        ("<function={name}>\n",),
        "</function>\n",
        end="</tool_call>",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
        is_repeated=True,
    ),
    # GLM 4.5 and 4.6, then 4.7
    "glm45": ToolStyle(
        ("<tool_call>",),
        ("{name}\n",),
        "",
        end="</tool_call>",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        is_repeated=True,
    ),
    "glm47": ToolStyle(
        ("<tool_call>",),
        ("{name}",),
        "",
        end="</tool_call>",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        is_repeated=True,
    ),
    # MiniMax M1, then M2
    "minimax": ToolStyle(("<tool_calls>\n",), tail="}\n", separator="", end="</tool_calls>"),
    "minimax_m2": ToolStyle(
        ("<minimax:tool_call>\n",),
        ('<invoke name="{name}">\n',),
        "</invoke>\n",
        separator="",
        end="</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    # Llama 3.2 and 4, ToolACE
    "pythonic": ToolStyle(
        ("[",),
        ("{name}(",),
        ")",
        separator=", ",
        end="]",
        parameter="{key}={value}",
        parameter_separator=", ",
        is_whole=True,
    ),
    # gpt-oss: harmony
    "openai": ToolStyle(
        ("",),
        (
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
        ),
        "",
        channel="<|channel|>{channel}<|message|>",
        next_message="<|end|><|start|>assistant",
    ),
}
# Aliases of these parsers in vLLM and SGLang.
_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("qwen", "qwen25"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "qwen3_xml": "qwen3_coder",
    "glm": "glm45",
    "minimax-m2": "minimax_m2",
    "llama4_pythonic": "pythonic",
    "gpt-oss": "openai",
}
TOOL_STYLES = {**_STYLES, **{alias: _STYLES[name] for alias, name in _ALIASES.items()}}
MESSAGES, ANSWER = ("analysis", "commentary"), "final"  # channels


def list_tool_styles() -> Mapping[str, ToolStyle]:
    """Return the styles by name; several names may be one style, whose own name comes first."""
    return TOOL_STYLES


def make_tool_tags(style: str, tools: Tools, is_parallel: bool = True, answer: Json | None = None) -> Json:
    """Return the structural tag of an answer that may call tools.

    Args:
        style: one of TOOL_STYLES.
        tools: names are taken as they are, so they hold nothing that JSON would escape.
        is_parallel: whether there may be more than one call.
        answer: the format of an answer without calls; None for any text, which may also stand beside calls.

    Raises:
        UnsupportedGrammar: arguments cannot be written one by one.
    """
    if style not in TOOL_STYLES:
        raise InvalidGrammar(f"unknown style of tool calls {style!r}; choose from {list(TOOL_STYLES)}")
    if not tools:
        raise InvalidGrammar("tool calls need at least one tool")
    return {"type": "structural_tag", "format": _Writer(TOOL_STYLES[style], tools, is_parallel).write(answer)}


class _Writer:
    def __init__(self, style: ToolStyle, tools: Tools, is_parallel: bool) -> None:
        self._style = style
        self._tools = tools
        self._is_parallel = is_parallel
        self._arguments = [self._write_arguments(index, schema) for index, (_, schema) in enumerate(tools)]

    def write(self, answer: Json | None) -> Json:
        if self._style.channel:
            return self._write_messages(answer)
        if answer is None and not self._style.is_whole:
            return self._write_among_text()
        # Free text must not begin like a call.
        starts = {opening[0] for opening in self._style.openings if opening}
        text = (
            {"type": "regex", "pattern": rf"(?:[^\{''.join(starts)}](?s:.*))?"} if answer is None else answer
        )
        sections = [self._write_section(each, self._style.heads) for each in self._style.openings if each]
        if self._style.is_repeated and self._is_parallel:
            more = {
                "type": "star",
                "content": make_sequence(make_optional(make_const("\n")), make_choice(sections)),
            }
            return make_choice([text, make_sequence(make_choice(sections), more)])
        return make_choice([text, *sections])

    def _write_among_text(self) -> Json:
        rules: list[list[Any]] = []
        for mark in self._style.marks:
            openings = [each for each in self._style.openings if each and each.startswith(mark)]
            rules += [
                [mark, self._write_section(each.removeprefix(mark), self._style.heads)] for each in openings
            ]
            heads = [each.removeprefix(mark) for each in self._style.heads if each.startswith(mark)]
            if not openings:
                rules.append([mark, self._write_section("", heads)])
        return {"type": "dispatch", "rules": rules, "loop": self._style.is_repeated and self._is_parallel}

    def _write_messages(self, answer: Json | None) -> Json:
        style, text = self._style, {"type": "any_text"}
        begins = [style.channel.replace("{channel}", name) for name in (*MESSAGES, ANSWER)]
        before = make_choice([make_tag(begin, text, style.next_message) for begin in begins[:-1]])
        last = [make_tag(begins[-1], answer or text, ""), self._write_section("", style.heads)]
        return make_sequence({"type": "star", "content": before}, make_choice(last))

    def _write_section(self, start: str, heads: Sequence[str]) -> Json:
        style = self._style
        tags = [
            make_tag(head.replace("{name}", name), arguments, style.tail)
            for head in heads
            for (name, _), arguments in zip(self._tools, self._arguments, strict=True)
        ]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": style.separator or "",
            "at_least_one": True,
            "stop_after_first": style.separator is None or not self._is_parallel,
        }
        return make_sequence(make_const(start), calls, make_const(style.end))

    def _write_arguments(self, index: int, schema: Mapping[str, Any]) -> Json:
        style = self._style
        if style.parameter is not None:
            place = f"/format/tags/{index}/content/json_schema"
            return write_parameters(schema, style.parameter, style.parameter_separator, place)
        content: Json = {"type": "json_schema", "json_schema": schema}
        if style.number:
            return make_sequence(
                {"type": "regex", "pattern": "[0-9]{1,4}"}, make_const(style.number), content
            )
        return content


def make_forced_tags(tools: Tools, max_calls: int | None = None) -> Json:
    """Return the structural tag of a text that is a call, {"name": ..., "arguments": ...}, and nothing else.

    Each tool's schema is compiled as it would be alone: drafts and names of one mean nothing to the others.

    Args:
        max_calls: the text is an array of 1 to so many calls; None for one call.
    """
    if not tools:
        raise InvalidGrammar("tool calls need at least one tool")
    schemas = [(name, {"type": "json_schema", "json_schema": schema}) for name, schema in tools]
    call = make_choice(
        [make_tag(f'{{"name": "{name}", "arguments": ', content, "}") for name, content in schemas]
    )
    if max_calls is None:
        return {"type": "structural_tag", "format": call}
    more = {
        "type": "repeat",
        "min": 0,
        "max": max_calls - 1,
        "content": make_sequence(make_const(", "), call),
    }
    elements = [make_const("["), call, *([more] if max_calls > 1 else []), make_const("]")]
    return {"type": "structural_tag", "format": make_sequence(*elements)}
