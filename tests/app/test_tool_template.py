"""The form of tool calls is read from a model's chat template; the templates here are the calls of each family."""

import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.api.tools.styled_calls import StyledCalls
from app.tool_template import NAMES, PARAMETERS, read_style
from engine import InvalidRequest
from grammar import GrammarCompiler, ToolStyle, Vocabulary, list_tool_styles, make_tool_spec

XML = (
    "{% macro xml(c, open, close) %}{{ open }}<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>\n"
    "{{ v if v is string else (v|tojson if v is mapping or v is sequence else v|string) }}\n</parameter>\n{% endfor %}"
    "</function>\n{{ close }}{% endmacro %}"
)
PYTHON = (
    "{% macro py(c) %}{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v|repr if v is not string else "
    "\"'\" ~ v ~ \"'\" }}{{ ', ' if not loop.last }}{% endfor %}){% endmacro %}"
)
GEMMA = (
    "{% macro lit(v, q) %}{% if v is string %}{{ q ~ v ~ q }}{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v|dictsort %}{{ k }}:{{ lit(x, q) }}{{ ',' if not loop.last }}"
    "{% endfor %}}{% elif v is sequence %}[{% for x in v %}{{ lit(x, q) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}{% macro gemma(c, q) %}call:{{ c.name }}{{ '{' }}{% for k, v in "
    "c.arguments|dictsort %}{{ k }}:{{ lit(v, q) }}{{ ',' if not loop.last }}{% endfor %}}{% endmacro %}"
)
DSML = (
    '{% for k, v in c.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="'
    "{{ 'true' if v is string else 'false' }}"
    '">{{ v if v is string else v|tojson }}</｜DSML｜parameter>\n{% endfor %}'
)
CHATML = ("<|im_start|>assistant\n", "<|im_end|>\n")
ARGS = "{{ c.arguments|tojson }}"
HERMES = '<tool_call>\n{"name": "{{ c.name }}", "arguments": ' + ARGS + "}\n</tool_call>"
LISTED = '{"name": "{{ c.name }}", "arguments": ' + ARGS + "}"
# Family -> what stands before the calls, a call, between two, after the last, and around an answer.
FAMILIES: dict[str, tuple[str, str, str, str, str, str]] = {
    "Qwen 3": ("", HERMES, "\n", "", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>\n"),
    "Granite 4": ("", HERMES, "\n", "", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
    "EXAONE 4": ("", f"<tool_call>{LISTED}</tool_call>", "\n", "", "[|assistant|]", "[|endofturn|]\n"),
    "Hunyuan": ("<tool_calls>[", LISTED, ", ", "]</tool_calls>", "<a>", "<|eos|>"),
    "Mistral 2024": ("[TOOL_CALLS][", LISTED[:-1] + ', "id": "{{ id }}"}', ", ", "]", "[/INST]", "</s>"),
    "Mistral v11": ("", "[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ id }}[ARGS]" + ARGS, "", "", "[/INST]", "</s>"),
    "Mistral v13": ("", "[TOOL_CALLS]{{ c.name }}[ARGS]" + ARGS, "", "", "[/INST]", "</s>"),
    "DeepSeek V3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n" + ARGS + "\n```<｜tool▁call▁end｜>",
        "\n", "<｜tool▁calls▁end｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>" + ARGS + "<｜tool▁call▁end｜>", "",
        "<｜tool▁calls▁end｜>", "<｜Assistant｜></think>", "<｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3.2": (
        "\n\n<｜DSML｜function_calls>\n", '<｜DSML｜invoke name="{{ c.name }}">\n' + DSML + "</｜DSML｜invoke>\n", "",
        "</｜DSML｜function_calls>", "<｜Assistant｜></think>", "<｜end▁of▁sentence｜>",
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>" + ARGS + "<|tool_call_end|>",
        "", "<|tool_calls_section_end|>", "<|im_middle|>", "<|im_end|>",
    ),
    "Qwen 3 Coder": ("", "{{ xml(c, '<tool_call>\n', '</tool_call>') }}", "\n", "", *CHATML),
    "Seed-OSS": (
        "", "<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>{{ v }}"
        "</parameter>\n{% endfor %}</function>\n</seed:tool_call>", "\n", "", "<seed:bos>assistant\n", "<seed:eos>",
    ),
    "GLM 4.5": (
        "", "<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v|tojson }}</arg_value>\n{% endfor %}</tool_call>", "\n", "", "<|assistant|>\n", "",
    ),
    "MiniMax M2": (
        "\n<minimax:tool_call>\n", '<invoke name="{{ c.name }}">\n{% for k, v in c.arguments.items() %}<parameter '
        'name="{{ k }}">{{ v if v is string else v|tojson }}</parameter>\n{% endfor %}</invoke>\n', "",
        "</minimax:tool_call>", "]~b]ai\n", "[e~[\n",
    ),
    "OLMo 3": ("<function_calls>\n", "{{ py(c) }}", "\n", "\n</function_calls>", *CHATML),
    "LFM 2": ("<|tool_call_start|>[", "{{ py(c) }}", ", ", "]<|tool_call_end|>", *CHATML),
    "Command R7B": (
        "<|START_ACTION|>[\n", '    {"tool_call_id": "{{ number }}", "tool_name": "{{ c.name }}", "parameters": '
        + ARGS + "}", ",\n", "\n]<|END_ACTION|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
    ),
    "Gemma functions": (
        "", "<start_function_call>{{ gemma(c, '<escape>') }}<end_function_call>", "", "<start_function_response>",
        "<start_of_turn>model\n", "<end_of_turn>\n",
    ),
    "Gemma 4": (
        "", "<|tool_call>{{ gemma(c, '<|\"|>') }}<tool_call|>", "", "<|tool_response>", "<|turn>model\n", "<turn|>\n"
    ),
    "Nemotron 2": ("<TOOLCALL>[", LISTED, ", ", "]</TOOLCALL>", "<SPECIAL_11>Assistant\n", "<SPECIAL_12>"),
}
# Families whose templates show calls in the prompt only, or one call alone.
TOLD = {
    "granite": '<|tool_call|>, then a JSON list', "phi4_mini": "<|tool|>[]<|/tool|>", "lfm2": "<|tool_list_start|>[]",
    "phi4_mini_json": 'functools[{"name": ', "hermes": '<tool_call>\n{"name": <function-name>',
}
SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["zqa"], "additionalProperties": False,
    "properties": {
        "zqa": {"type": "string"}, "zqb": {"type": "integer"}, "zqc": {"type": "number"}, "zqd": {"type": "boolean"},
        "zqe": {"type": ["string", "null"]}, "zqf": {"type": "array", "items": {"type": ["integer", "string"]}},
        "zqg": {"type": "object", "properties": {"k": {"type": "string"}}},
    },
}
FULL = {"zqa": "some text", "zqb": 7041, "zqc": 2.5, "zqd": True, "zqe": None, "zqf": [1, "a"], "zqg": {"k": "v"}}
ENDS = ("<start_function_response>", "<|tool_response>")
ENVIRONMENT = ImmutableSandboxedEnvironment()
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
ENVIRONMENT.filters["repr"] = repr


def make_render(family: tuple[str, ...]) -> Callable[..., str]:
    opening, call, separator, end, begin, stop = family
    calls = (
        "{% for t in m.tool_calls %}{% set c = t.function %}{% set id = t.id %}{% set number = loop.index0 %}"
        + call + "{% if not loop.last %}" + separator + "{% endif %}{% endfor %}"
    )
    answer = begin + "{{ m.content }}{% if m.tool_calls %}" + opening + calls + end + "{% endif %}" + stop
    text = (
        XML + PYTHON + GEMMA + "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}"
        + answer + "{% endif %}{% endfor %}"
    )
    template = ENVIRONMENT.from_string(text)

    def render(messages: Any, tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> str:
        try:
            return template.render(messages=messages)
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest(str(error)) from error

    return render


def write_calls(render: Callable[..., str], arguments: list[dict[str, Any]]) -> str:
    """Return the calls of an answer as a template writes them."""
    unnamed = {"id": "functions.f:0", "function": {"name": "g", "arguments": {}}}
    is_kimi = ">functions.f:0<" in render([{"role": "a", "content": "", "tool_calls": [unnamed]}])
    calls = [
        {"id": f"functions.{name}:{i}" if is_kimi else f"Abcdefgh{i}", "type": "function",
         "function": {"name": name, "arguments": each}}
        for i, (name, each) in enumerate(zip(NAMES, arguments, strict=False))
    ]
    empty = render([{"role": "assistant", "content": "☃"}])
    before, _, after = empty.partition("☃")
    text = render([{"role": "assistant", "content": "", "tool_calls": calls}])
    text = text.removeprefix(before).removesuffix(after).removesuffix("<start_function_response>")
    return text.removesuffix("<|tool_response>").lstrip("\n")


def make_vocabulary(text: str, has_specials: bool) -> Vocabulary:
    names = r"<\|?[^<>\s|=]+\|?>|\[[A-Z_]{2,}\]|｜DSML｜|<｜[^｜]+｜>|<\|\"\|>"
    found = re.findall(names, text) if has_specials else ()
    ids = {name: 257 + i for i, name in enumerate(dict.fromkeys(found))}
    return Vocabulary([*(bytes([b]) for b in range(256)), b"<eos>", *[b""] * (len(ids) + 1)], [256], ids)


def takes(vocabulary: Vocabulary, style: ToolStyle, text: str, **options: Any) -> bool:
    spec = make_tool_spec(style, [(name, SCHEMA) for name in NAMES], **options)
    matcher = GrammarCompiler(vocabulary).compile(spec).matcher()
    names = sorted(vocabulary.special_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    ids = [i for part in parts for i in ([vocabulary.special_tokens[part]] if part in names else part.encode())]
    return all(map(matcher.accept_token, ids)) and matcher.is_completed()


def read(style: ToolStyle, text: str, size: int) -> list[tuple[str, Any]]:
    parser, calls = StyledCalls(style, dict.fromkeys(NAMES, SCHEMA)), dict[int, list[str]]()
    fed = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
    for piece in [*fed, *parser.close()]:
        if piece.call >= 0:
            call = calls.setdefault(piece.call, [piece.name, ""])
            call[1] += piece.text
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_a_template_writes_are_taken_and_read(family: str) -> None:
    render = make_render(FAMILIES[family])
    style = read_style(render, ENDS)
    assert style is not None
    one, two = write_calls(render, [FULL]), write_calls(render, [FULL, {"zqa": "x"}])
    for vocabulary in (make_vocabulary(two, False), make_vocabulary(two, True)):
        assert takes(vocabulary, style, "Well, " + two) and takes(vocabulary, style, two, is_forced=True)
        assert takes(vocabulary, style, one, is_forced=True, is_parallel=False)
        assert takes(vocabulary, style, "No calls.")
        assert not takes(vocabulary, style, two, is_parallel=False)
        for right, wrong in (("7041", "7x"), (NAMES[0], "other"), ("zqb", "zqz")):
            assert not takes(vocabulary, style, one.replace(right, wrong), is_forced=True)
    for size in (1, 5, 1000):
        assert read(style, two, size) == [(NAMES[0], FULL), (NAMES[1], {"zqa": "x"})]


@pytest.mark.parametrize("name", TOLD)
def test_a_template_without_calls_may_describe_them(name: str) -> None:
    def render(messages: Any, **_: Any) -> str:
        if any("tool_calls" in message for message in messages):
            raise InvalidRequest("no calls, please")
        return TOLD[name]

    assert read_style(render) == list_tool_styles()[name]
    kimi = list_tool_styles()["kimi_k2"]
    assert read_style(lambda messages, **_: render(messages) and "", source="<|tool_calls_section_begin|>") == kimi


def test_llama_and_gpt_oss_have_their_styles_and_what_cannot_be_read_has_none() -> None:
    llama = '{"name": "{{ c.name }}", "parameters": ' + ARGS + "}"
    harmony = " to=functions.{{ c.name }}<|channel|>commentary json<|message|>" + ARGS
    nested = "<c>{{ c.name }}{% for k, v in c.arguments.items() %}<{{ k }}>{{ v|length }}</{{ k }}>{% endfor %}</c>"
    for call, expected in ((llama, "llama3_json"), (harmony, "openai"), (nested, None), ("", None)):
        style = read_style(make_render(("", call, "", "", "<|start|>assistant", "<|eot_id|>")))
        assert style == (list_tool_styles()[expected] if expected else None)
    assert PARAMETERS["properties"].keys() == FULL.keys()
