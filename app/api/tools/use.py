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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from app.api.errors import ApiError, BadRequest, refuse, to_api_error
from app.api.fields import check_unknown, warn
from app.api.protocol import ChatFields, ChatRequest, read_text
from app.api.sampling import Constraint
from app.api.tools.custom import CustomCalls, to_function
from app.api.tools.styled_calls import Piece, StyledCalls
from app.api.wording import Path
from app.template_facts import TemplateFacts
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
CHOICE = ("tool_choice",)
TOOLS_NOT_SHOWN = "the chat template knows no tools: with tool_choice auto the model was not shown them"
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


class ToolChoice(NamedTuple):
    """Whether the model may call tools.

    Attributes:
        mode: "none", "auto", "required", or "one": a call of the one tool that is named.
        names: the tools that it is about; None: all.
    """

    mode: str
    names: frozenset[str] | None = None


AUTO = ToolChoice("auto")


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


def use_tools(
    tools: Sequence[Tool],
    choice: ToolChoice,
    body: ChatFields,
    template: TemplateFacts,
    answer: Constraint | None = None,
    calls_field: Literal["tool_calls", "function_call"] = "tool_calls",
) -> ToolUse | None:
    """Return the tools that an answer may call, with their grammar; None if there are none.

    Where the chat template knows no tools, the model is not shown them: it answers a request that leaves the choice to
    it in text, and makes one call at a time where calls are forced, having no reason to end a list of them.

    Args:
        answer: the constraint of an answer without calls; None where text may stand beside calls.

    Raises:
        ApiError: 400 for a schema that is malformed or not supported, or a choice that is not among the tools.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have the same name", "tools")
    for name in choice.names or ():
        if name not in names:
            raise BadRequest(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
    used = tuple(tool for tool in tools if choice.names is None or tool.name in choice.names)
    for tool in tools:
        _check_schema(tool)  # also where the model may not call it
    if not used or choice.mode == "none":
        return None
    is_parallel = template.knows_tools if body.parallel_tool_calls is None else body.parallel_tool_calls
    if choice.mode == "auto" and not template.knows_tools:
        warn(TOOLS_NOT_SHOWN)
        return None
    use = ToolUse(used, None, is_parallel, calls_field=calls_field, shows_reasoning=body.include_reasoning is not False)
    if choice.mode == "auto":
        return use.in_style(template.tool_style, answer)
    is_array = choice.mode == "required" and is_parallel
    spec = _make_spec(used, MAX_PARALLEL_CALLS if is_array else None)
    return replace(use, spec=spec, is_parallel=is_array)


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Return the tools of a chat completion.

    Raises:
        ApiError: 400 for a malformed one.
    """
    return [each for i, tool in enumerate(tools or ()) if (each := _read_tool(("tools", i), tool)) is not None]


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


def _read_tool(where: Path, tool: Mapping[str, Any]) -> Tool | None:
    kind = tool.get("type")
    given = tool.get(str(kind))
    if kind not in ("function", "custom") or not isinstance(given, dict):
        fields = '"custom": {"name": ...}' if kind == "custom" else '"function": {"name": ..., "parameters": ...}'
        raise refuse(where, f' must be {{"type": "{"custom" if kind == "custom" else "function"}", {fields}}}')
    place = (*where, kind)
    return read_custom(place, given) if kind == "custom" else read_function(place, given, tool)


def read_custom(where: Path, custom: Mapping[str, Any]) -> Tool | None:
    """Return a custom tool of any API; None for one that is left out because of its grammar."""
    function = to_function(where, custom)
    return None if function is None else replace(read_function(where, function), is_custom=True)


def read_function(where: Path, function: Mapping[str, Any], tool: Mapping[str, Any] | None = None) -> Tool:
    """Return a function of any API.

    Args:
        tool: what the chat template gets; default: the function.

    Raises:
        ApiError: 400 naming the place, if it is malformed.
    """
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise refuse((*where, "name"), " must be 1 to 128 of the characters a-z, A-Z, 0-9, _ and -")
    if description is not None:
        read_text((*where, "description"), description)
    for other in ("input_schema", "schema"):
        if function.get(other) is not None:
            rule = " is not a field of a function; its schema is named parameters"
            raise refuse((*where, other), rule, "unknown_field")
    parameters = function.get("parameters")
    if parameters is None:
        # Without parameters an unknown field is likely a misspelt one; beside them it is left to the chat template.
        check_unknown(function, FUNCTION_FIELDS, where)
        parameters = NO_PARAMETERS
    if not isinstance(parameters, dict):
        raise refuse((*where, "parameters"), " must be a JSON Schema")
    # also beside anyOf or $ref, which may allow values that are not objects
    parameters = {"type": "object", **parameters}
    if parameters["type"] != "object":
        raise refuse((*where, "parameters"), " must have the type object: arguments have names")
    return Tool(name, parameters, dict(tool or {"type": "function", "function": function}))


def read_choice(choice: str | Mapping[str, Any] | None, has_tools: bool) -> ToolChoice:
    """Return the tool choice of a chat completion.

    Raises:
        ApiError: 400 for a malformed one.
    """
    if choice is None or isinstance(choice, str):
        return read_mode(choice, has_tools)
    if choice.get("type") == "allowed_tools":
        check_unknown(choice, ("type", "allowed_tools"), CHOICE, None)
        allowed = choice.get("allowed_tools")
        return read_allowed((*CHOICE, "allowed_tools"), allowed if isinstance(allowed, dict) else {}, _read_name)
    return ToolChoice("one", frozenset([_read_name(choice)]))


def read_mode(choice: str | None, has_tools: bool) -> ToolChoice:
    """Return a tool choice that is about all tools."""
    if choice is not None and choice not in MODES:
        raise refuse(CHOICE, f"={choice[:80]!r} must be one of {', '.join(MODES)}, or name a function")
    if choice == "required" and not has_tools:
        raise BadRequest("tool_choice required needs tools", "tool_choice")
    return ToolChoice(choice or "auto")


def read_allowed(where: Path, allowed: Mapping[str, Any], read_name: Callable[[object], str]) -> ToolChoice:
    """Return a choice among some tools."""
    tools, mode = allowed.get("tools"), allowed.get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        raise refuse(where, ' must be {"mode": "auto" or "required", "tools": [...]}, with a tool')
    check_unknown(allowed, ("type", "mode", "tools"), where, None)
    return ToolChoice(mode, frozenset(map(read_name, tools)))


def _read_name(choice: object) -> str:
    kind = choice.get("type") if isinstance(choice, dict) else None
    choice = choice if isinstance(choice, dict) and kind in ("function", "custom") else {}
    function = choice.get(str(kind))
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise refuse(CHOICE, ' must be {"type": "function", "function": {"name": ...}}')
    check_unknown(choice, ("type", str(kind)), CHOICE, None)
    check_unknown(function, ("name",), (*CHOICE, str(kind)), None)
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
