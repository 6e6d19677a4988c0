"""The tools of a chat request: which the model may or must call, and the grammar of its calls.

tool_choice   none        the tools are left out
              auto        the chat template shows them; what it calls a call triggers a grammar (a structural tag),
                          so that only the tools there are get called, with arguments that fit. Where the template's
                          way of writing calls is unknown, that of Hermes is used.
                          Where the template knows no tools, the model answers in text without seeing them.
                          Beside a response_format, the answer is calls or what that describes, in one grammar
              required    a grammar: {"name": ..., "arguments": ...} of one tool, or an array of those; it wins over a
                          response_format
              a function  the same grammar, of that one tool
              allowed     auto or required, as if there were only the tools that it lists
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from app.api.constraint import Constraint
from app.api.errors import ApiError, BadRequest, to_api_error
from app.api.fields import check_unknown
from app.api.protocol import ChatRequest
from app.api.tools.custom import read_custom_tool
from app.api.tools.custom_calls import CustomCalls
from app.api.tools.styled_calls import Piece, StyledCalls
from grammar import (
    GrammarError,
    GrammarSpec,
    InvalidGrammar,
    SchemaValidator,
    ToolStyle,
    UnsupportedGrammar,
    list_raw,
    list_tool_styles,
    make_forced_tags,
    make_tool_tags,
)

Json = dict[str, Any]

MODES = ("none", "auto", "required")
MAX_PARALLEL_CALLS = 16
# Grammars and schemas of tools that are kept.
MAX_NUM_SPECS = 32
MAX_NUM_SCHEMAS = 512
# OpenAI allows 64 characters, Anthropic 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
# where a grammar of calls contains a tool's schema, by the tool's number, or the schema of an argument
IN_CALL = re.compile(
    r"/format(?:/\w+)*?/tags/(\d+)/content(?:/elements/(\d+)(?=/[ce]))?(?:/elements/\d+|/content)*(?:/json_schema)?"
    r"(/(?:\$defs|definitions)/root(?=/))?"
)
IN_FORCED = re.compile(r"/format(?:/\w+)*?/elements/(\d+)/content()()(?:/json_schema)?")
IN_ANSWER = re.compile(r"/format(?:/\w+)*?(?:/json_schema|/pattern|(?=:))")
# second line: the Responses API of OpenAI
FUNCTION_FIELDS = (
    *("name", "description", "parameters", "strict"),
    *("output_schema", "defer_loading", "allowed_callers", "async"),
)
# one call, or an array of them, as `make_forced_tags` describes it
FORCED = ToolStyle(("[", ""), separator=", ", end="]", is_whole=True)
NO_PARAMETERS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    parameters: Json
    definition: Json  # as the client sent it, for the chat template; of a custom tool, as a function
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """A choice among some of the tools."""

    mode: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a request uses.

    Attributes:
        spec: the grammar of outputs that contain calls only; None when the model may answer in text.
        is_parallel: whether it may call more than once.
        style: how the model writes calls within text (`styles.py`); None when they are forced.
        text_spec: the grammar of text that may contain such calls; None when they are forced.
        answer: the constraint of an answer that calls nothing, a part of `text_spec`; None without one.
        shows_reasoning: whether the reply has the reasoning of a style that writes it as messages.
        calls_field: the field of a message that has the calls; the older one has a single call.
    """

    tools: tuple[Tool, ...]
    spec: GrammarSpec | None
    is_parallel: bool = True
    style: str | None = None
    text_spec: GrammarSpec | None = None
    answer: Constraint | None = None
    shows_reasoning: bool = True
    calls_field: Literal["tool_calls", "function_call"] = "tool_calls"

    @property
    def definitions(self) -> list[Json]:
        return [tool.definition for tool in self.tools]

    def make_parser(self) -> StyledCalls | CustomCalls:
        """Return the parser of calls in one output."""
        if self.spec is not None:
            parser = StyledCalls(FORCED, {})
        else:
            assert self.style is not None, "tools that are not forced are called in a style"
            style = list_tool_styles()[self.style]
            raw = {tool.name: list_raw(tool.parameters, style.parameter or "") for tool in self.tools}
            parser = StyledCalls(style, raw, self.answer is not None, self.shows_reasoning)
        customs = frozenset(tool.name for tool in self.tools if tool.is_custom)
        return CustomCalls(parser, customs) if customs else parser

    def is_valid_call(self, call: Piece) -> bool:
        """Return whether a call is one of a tool, with arguments that fit.

        Raises:
            GrammarError: the validator cannot read the tool's schema.
        """
        schema = next((tool.parameters for tool in self.tools if tool.name == call.name), None)
        try:
            arguments = {"input": call.text} if call.kind == "custom" else json.loads(call.text)
        except (ValueError, RecursionError):
            return False
        return schema is not None and SchemaValidator(schema).is_valid(arguments)

    def in_style(self, style: str | None, answer: Constraint | None) -> ToolUse:
        """Return the same tools, called in the model's style.

        Args:
            style: None if unknown; the style of Hermes is used then.
            answer: the constraint of an answer without calls; None where text may stand beside calls.

        Raises:
            ApiError: 400 for parameters or an answer that cannot be a part of such a grammar.
        """
        if self.spec is not None:
            return self
        style = style or "hermes"
        content = None if answer is None else _make_format(answer)
        options = () if answer is None else (answer.spec.whitespace, answer.spec.backend)
        try:
            spec = _make_text_spec(style, _write_schemas(self.tools), self.is_parallel, json.dumps(content), *options)
        except GrammarError as error:
            raise explain(error, replace(self, style=style, answer=answer)) from error
        return replace(self, style=style, text_spec=spec, answer=answer)


def read_tools(body: ChatRequest, calls_many: bool = True) -> ToolUse | None:
    """Validate the tools and the tool choice; None if no tools are used.

    Args:
        calls_many: whether the model may make several calls if the request does not say.

    Raises:
        ApiError: 400 for a malformed tool or schema, or a choice that is not among the tools.
    """
    found = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    tools = [tool for tool in found if tool is not None]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have the same name", "tools")
    choice = _read_choice(body.tool_choice, names)
    if isinstance(choice, Allowed):
        tools, choice = [tool for tool in tools if tool.name in choice.names], choice.mode
    if not tools:
        return None
    for tool in tools:
        _check_schema(tool)  # also where the model may not call it
    is_array = calls_many if body.parallel_tool_calls is None else body.parallel_tool_calls
    if choice in ("none", "auto"):
        shows_reasoning = body.include_reasoning is not False
        use = ToolUse(tuple(tools), None, is_array, shows_reasoning=shows_reasoning)
        return use if choice == "auto" else None
    if choice == "required":
        return ToolUse(tuple(tools), _make_spec(tools, MAX_PARALLEL_CALLS if is_array else None), is_array)
    chosen = [tool for tool in tools if tool.name == choice.removeprefix("function:")]
    return ToolUse(tuple(chosen), _make_spec(chosen, None), is_parallel=False)


def read_functions(body: ChatRequest) -> ChatRequest:
    """Return a request with OpenAI's older `functions` and `function_call` as one with tools, called one at a time.

    Raises:
        ApiError: 400 for functions beside tools.
    """
    if body.tools is not None or body.tool_choice is not None:
        raise BadRequest("functions is the older name of tools: give one of them", "functions")
    choice: Any = body.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})


def combine(tools: ToolUse | None, answer: Constraint | None) -> Constraint | None:
    """Return the one constraint of a request: that of forced tools, or of tools with the answer, takes precedence."""
    spec = None if tools is None else tools.spec or tools.text_spec
    return answer if spec is None else Constraint("tools", spec)


def _make_format(answer: Constraint) -> Json:
    """Return the part of a structural tag for an answer.

    Raises:
        ApiError: 400 for a constraint that can be none.
    """
    spec = answer.spec
    if spec.kind in ("json_schema", "json_object") and spec.source is None:
        any_order = spec.property_order == "any"
        return {"type": "json_schema", "json_schema": spec.document, "any_order": any_order}
    if spec.kind == "regex":
        return {"type": "regex", "pattern": spec.text}
    if spec.kind == "choice":
        texts = [{"type": "const_string", "value": text} for text in spec.document]
        return {"type": "or", "elements": texts}
    message = (
        f"{answer.param} cannot shape the answer of a request with tools; use tool_choice none or required"
    )
    raise BadRequest(message, "tool_choice", "too_many_constraints")


def explain(error: GrammarError, use: ToolUse) -> ApiError:
    """Return the error for a rejected grammar of calls: names the tool, with a pointer into its schema."""
    text = error.pointer if isinstance(error, UnsupportedGrammar) else str(error)
    found = IN_CALL.match(text) or (None if use.answer else IN_FORCED.match(text))
    if found is None:
        found = IN_ANSWER.match(text)
        if found is None or use.answer is None:
            return to_api_error(error, "tools")
        return to_api_error(_move(error, found[0], ""), use.answer.param)
    tool = use.tools[int(found[1]) % len(use.tools)]  # a style may list every tool several times
    is_listed = found[2] and use.style is not None and not list_tool_styles()[use.style].parameter_separator
    # arguments are listed only if the properties are an object
    place = f"/properties/{list(tool.parameters['properties'])[int(found[2])]}" if is_listed and not found[3] else ""
    known = to_api_error(_move(error, found[0], place), "tools")
    return ApiError(400, f"tool {tool.name!r}: {known}", "tools", known.code, details=known.details)


def _move(error: GrammarError, place: str, to: str) -> GrammarError:
    """Return the same error with another prefix of its pointer."""
    if isinstance(error, UnsupportedGrammar):
        return UnsupportedGrammar(to + error.pointer.removeprefix(place), error.keyword, error.reason)
    pointer = error.pointer if isinstance(error, InvalidGrammar) else None
    text = str(error).removeprefix(place).removeprefix(": ")
    return InvalidGrammar(text, pointer and to + pointer.removeprefix(place))


def _read_tool(where: str, tool: Mapping[str, Any]) -> Tool | None:
    """Return a tool; None for a custom one that is left out."""
    if tool.get("type") == "custom":
        custom = read_custom_tool(where, tool)
        found = None if custom is None else _read_tool(where, custom)
        return None if found is None else replace(found, is_custom=True)
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        message = f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
        raise BadRequest(message, "tools")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        message = f"{where}.function.name must be 1 to 128 of the characters a-z, A-Z, 0-9, _ and -"
        raise BadRequest(message, "tools")
    if description is not None and not isinstance(description, str):
        raise BadRequest(f"{where}.function.description must be a text", "tools")
    for other in ("input_schema", "schema"):
        if function.get(other) is not None:
            message = f"{where}.function.{other} is not a field of a function; its schema is named parameters"
            raise BadRequest(message, "tools", "unknown_field")
    parameters = function.get("parameters")
    if parameters is None:
        # Without parameters an unknown field is likely a misspelt one; beside them it is left to the chat template.
        check_unknown(function, FUNCTION_FIELDS, f"{where}.function")
        parameters = NO_PARAMETERS
    if not isinstance(parameters, dict):
        raise BadRequest(f"{where}.function.parameters must be a JSON Schema", "tools")
    # also beside anyOf or $ref, which may allow values that are not objects
    parameters = {"type": "object", **parameters}
    if parameters["type"] != "object":
        message = f"{where}.function.parameters must have the type object: arguments have names"
        raise BadRequest(message, "tools")
    return Tool(name, parameters, dict(tool))


def _read_choice(choice: str | Mapping[str, Any] | None, names: Sequence[str]) -> str | Allowed:
    """Return one of MODES, or "function:" and a name, or some of the tools."""
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, str):
        if choice not in MODES:
            message = f"tool_choice={choice[:80]!r} must be one of {', '.join(MODES)}, or name a function"
            raise BadRequest(message, "tool_choice")
        if choice == "required" and not names:
            raise BadRequest("tool_choice required needs tools", "tool_choice")
        return choice
    if choice.get("type") == "allowed_tools":
        check_unknown(choice, ("type", "allowed_tools"), "tool_choice", None)
        return _read_allowed(choice.get("allowed_tools"), names)
    return f"function:{_read_name(choice, names)}"


def _read_allowed(allowed: object, names: Sequence[str]) -> Allowed:
    allowed = allowed if isinstance(allowed, dict) else {}
    tools, mode = allowed.get("tools"), allowed.get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        message = (
            'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": [...]}, with a tool'
        )
        raise BadRequest(message, "tool_choice")
    check_unknown(allowed, ("mode", "tools"), "tool_choice.allowed_tools", None)
    return Allowed(mode, frozenset(_read_name(tool, names) for tool in tools))


def _read_name(choice: object, names: Sequence[str]) -> str:
    """Return the name of an existing tool."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    choice = choice if isinstance(choice, dict) and kind in ("function", "custom") else {}
    function = choice.get(str(kind))
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise BadRequest('tool_choice must be {"type": "function", "function": {"name": ...}}', "tool_choice")
    check_unknown(choice, ("type", str(kind)), "tool_choice", None)
    check_unknown(function, ("name",), f"tool_choice.{kind}", None)
    if name not in names:
        raise BadRequest(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
    return name


def _make_spec(tools: Sequence[Tool], max_calls: int | None) -> GrammarSpec:
    """Return the grammar of one call, or of an array of calls."""
    try:
        return _make_forced_spec(_write_schemas(tools), max_calls)
    except GrammarError as error:
        raise explain(error, ToolUse(tuple(tools), None)) from error


def _check_schema(tool: Tool) -> None:
    try:
        _parse_schema(json.dumps(tool.parameters))
    except GrammarError as error:
        known = to_api_error(error, "tools")
        raise ApiError(400, f"tool {tool.name!r}: {known}", "tools", known.code, details=known.details) from error


def _write_schemas(tools: Sequence[Tool]) -> str:
    return json.dumps([(tool.name, tool.parameters) for tool in tools])


# Clients send the same tools with each request, and 64 of them take 15 ms.
@lru_cache(MAX_NUM_SCHEMAS)
def _parse_schema(schema: str) -> GrammarSpec:
    return GrammarSpec.json_schema(schema)


@lru_cache(MAX_NUM_SPECS)
def _make_forced_spec(schemas: str, max_calls: int | None) -> GrammarSpec:
    return GrammarSpec.structural_tag(make_forced_tags(json.loads(schemas), max_calls))


@lru_cache(MAX_NUM_SPECS)
def _make_text_spec(
    style: str,
    schemas: str,
    is_parallel: bool,
    content: str,
    whitespace: Literal["spaced", "compact", "any"] = "spaced",
    backend: str | None = None,
) -> GrammarSpec:
    tags = make_tool_tags(style, json.loads(schemas), is_parallel, json.loads(content))
    return GrammarSpec.structural_tag(tags, whitespace, backend)
