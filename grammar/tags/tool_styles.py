"""The forms in which models write tool calls. The sources are the models' chat templates.

A server reads the form from its model's template; this table is for templates that hide it, and for settings by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Dialect = Literal["json", "python", "gemma"]
PLACE = re.compile(r"\{(?:name|index|id|key)\}")  # in a text of a style


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """The form in which one family of models writes tool calls.

    Attributes:
        openings: what may stand before the first call of a section; "" where a call begins with its head.
        heads: what may stand between that and the arguments, with {name} for the tool, {index} for the number of the
            call and {id} for its id.
        tail: after the arguments; it may have {id} too.
        separator: between two calls of one section, None where a section has one call.
        end: after the last call of a section.
        parameter: how one argument is written, with {key} and {value}; None where all are one JSON object.
        other_parameter: the same for values other than strings; None where it is the same.
        parameter_separator: between two arguments.
        dialect: how values other than text are written.
        quote: what stands on both sides of a string in the dialect of Gemma.
        is_repeated: text and more sections may follow a section.
        is_whole: an answer is either text or calls; text does not begin with an opening.
        is_loose: spaces in JSON may be left out.
        channel: how an answer of several messages begins one, with {channel} for its name.
        next_message: between two messages.
    """

    openings: tuple[str, ...]
    heads: tuple[str, ...] = ('{"name": "{name}", "arguments": ',)
    tail: str = "}"
    separator: str | None = None
    end: str = ""
    parameter: str | None = None
    other_parameter: str | None = None
    parameter_separator: str = ""
    dialect: Dialect = "json"
    quote: str = ""
    is_repeated: bool = False
    is_whole: bool = False
    is_loose: bool = False
    channel: str = ""
    next_message: str = ""

    @classmethod
    def bare(cls, is_list: bool) -> "ToolStyle":
        """Return the style of a call, or a list of calls, without a mark: for models that are not shown how to call."""
        return cls(("[",), separator=", ", end="]", is_whole=True) if is_list else cls(("",), is_whole=True)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the beginnings of a section, without the spaces and brackets after them."""
        starts = [head.partition("{name}")[0] for head in self.heads]
        cut = [opening.rstrip(" [\n") for opening in self.openings]
        pairs = zip(cut, self.openings, strict=True)
        marks = [mark if mark.endswith((">", "]")) else opening for mark, opening in pairs]
        found = [[mark] if mark else starts for mark in marks]
        return tuple(dict.fromkeys(mark for each in found for mark in each))

    @property
    def writes_text(self) -> bool:
        """Whether strings are written as they are, up to a mark."""
        return self.parameter is not None and not self.parameter.endswith("{value}")

    def find_parameter(self, is_text: bool) -> str:
        """Return how an argument is written."""
        assert self.parameter is not None, "the arguments are one object"
        return self.parameter if is_text or self.other_parameter is None else self.other_parameter


_XML = ("<function={name}>\n",)
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_NAMES = (
    '{"name": "{name}", "parameters": ', '{"name":"{name}","parameters":',
    '{"type": "function", "name": "{name}", "parameters": ',
)
_STYLES: Mapping[str, ToolStyle] = {
    # Hermes, Qwen 2.5, Qwen 3, Granite 4
    "hermes": ToolStyle(("<tool_call>\n",), end="\n</tool_call>", is_repeated=True),
    # Llama 3.1 to 3.3
    "llama3_json": ToolStyle(("", "<|python_tag|>"), _NAMES, is_repeated=True, is_loose=True),
    # Mistral until 2024, in the middle of 2025, and since
    "mistral": ToolStyle(("[TOOL_CALLS] [", "[TOOL_CALLS]["), separator=", ", end="]"),
    "mistral_v11": ToolStyle(("[TOOL_CALLS]",), ("{name}[CALL_ID]{id}[ARGS]",), "", separator="[TOOL_CALLS]"),
    "mistral_v13": ToolStyle(("[TOOL_CALLS]",), ("{name}[ARGS]",), "", separator="[TOOL_CALLS]"),
    # DeepSeek R1 and V3, V3.1, then V3.2
    "deepseek_v3": ToolStyle(
        (_DEEPSEEK[0],), (f"{_DEEPSEEK[1]}function<｜tool▁sep｜>{{name}}\n```json\n",), f"\n```{_DEEPSEEK[2]}",
        separator="\n", end=_DEEPSEEK[3],
    ),
    "deepseek_v31": ToolStyle(
        (_DEEPSEEK[0],), (f"{_DEEPSEEK[1]}{{name}}<｜tool▁sep｜>",), _DEEPSEEK[2], separator="",
        end=_DEEPSEEK[3],
    ),
    "deepseek_v32": ToolStyle(
        ("<｜DSML｜function_calls>\n",),
        ('<｜DSML｜invoke name="{name}">\n',),
        "</｜DSML｜invoke>\n",
        separator="",
        end="</｜DSML｜function_calls>",
        parameter='<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n',
        other_parameter='<｜DSML｜parameter name="{key}" string="false">{value}</｜DSML｜parameter>\n',
    ),
    # Kimi K2
    "kimi_k2": ToolStyle(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",), "<|tool_call_end|>",
        separator="", end="<|tool_calls_section_end|>",
    ),
    # Qwen 3 Coder, Qwen 3.5, Nemotron 3
    "qwen3_coder": ToolStyle(
        ("<tool_call>\n",), _XML, "</function>\n", end="</tool_call>",
        parameter="<parameter={key}>\n{value}\n</parameter>\n", is_repeated=True,
    ),
    # Seed-OSS
    "seed_oss": ToolStyle(
        ("<seed:tool_call>\n",), _XML, "</function>\n", end="</seed:tool_call>",
        parameter="<parameter={key}>{value}</parameter>\n", dialect="python", is_repeated=True,
    ),
    # GLM 4.5 and 4.6, then 4.7
    "glm45": ToolStyle(
        ("<tool_call>",), ("{name}\n",), "", end="</tool_call>",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", is_repeated=True,
    ),
    "glm47": ToolStyle(
        ("<tool_call>",), ("{name}",), "", end="</tool_call>",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>", is_repeated=True,
    ),
    # MiniMax M1, then M2
    "minimax": ToolStyle(("<tool_calls>\n",), tail="}\n", separator="", end="</tool_calls>"),
    "minimax_m2": ToolStyle(
        ("<minimax:tool_call>\n",), ('<invoke name="{name}">\n',), "</invoke>\n", separator="",
        end="</minimax:tool_call>", parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    # Llama 3.2 and 4, ToolACE; LFM2; OLMo 3
    "pythonic": ToolStyle(
        ("[",), ("{name}(",), ")", separator=", ", end="]", parameter="{key}={value}",
        parameter_separator=", ", dialect="python", is_whole=True,
    ),
    "lfm2": ToolStyle(
        ("<|tool_call_start|>[",), ("{name}(",), ")", separator=", ", end="]<|tool_call_end|>",
        parameter="{key}={value}", parameter_separator=", ", dialect="python",
    ),
    "olmo3": ToolStyle(
        ("<function_calls>\n",), ("{name}(",), ")", separator="\n", end="\n</function_calls>",
        parameter="{key}={value}", parameter_separator=", ", dialect="python",
    ),
    # Granite 3; Phi 4 mini, as its card and as vLLM have it
    "granite": ToolStyle(("<|tool_call|>[", "<|tool_call|> ["), separator=", ", end="]"),
    "phi4_mini": ToolStyle(("<|tool_call|>[",), separator=", ", end="]<|/tool_call|>"),
    "phi4_mini_json": ToolStyle(("functools[",), separator=", ", end="]"),
    # Gemma's function calling, then Gemma 4
    "functiongemma": ToolStyle(
        ("<start_function_call>",), ("call:{name}{",), "}", end="<end_function_call>",
        parameter="{key}:{value}", parameter_separator=",", dialect="gemma", quote="<escape>", is_repeated=True,
    ),
    "gemma4": ToolStyle(
        ("<|tool_call>",), ("call:{name}{",), "}", end="<tool_call|>", parameter="{key}:{value}",
        parameter_separator=",", dialect="gemma", quote='<|"|>', is_repeated=True,
    ),
    # gpt-oss: harmony
    "openai": ToolStyle(
        ("",),
        (
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
            " to=functions.{name}<|channel|>commentary json<|message|>",
        ),
        "",
        channel="<|channel|>{channel}<|message|>",
        next_message="<|end|><|start|>assistant",
        is_loose=True,
    ),
}
# Aliases of these parsers in vLLM and SGLang.
_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("qwen", "qwen25", "granite4"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"), "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "qwen3_xml": "qwen3_coder", "glm": "glm45",
    "minimax-m2": "minimax_m2", "llama4_pythonic": "pythonic", "gpt-oss": "openai",
}
TOOL_STYLES = {**_STYLES, **{alias: _STYLES[name] for alias, name in _ALIASES.items()}}
MESSAGES, ANSWER = ("analysis", "commentary"), "final"  # channels


def list_tool_styles() -> Mapping[str, ToolStyle]:
    """Return the styles by name; several names may be one style, whose own name comes first."""
    return TOOL_STYLES
