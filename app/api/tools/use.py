"""The tools of a chat request: which the model may or must call, and the grammar of its calls.

tool_choice   none        the tools are left out
              auto        the chat template shows them; what it calls a call triggers a grammar (a structural tag),
                          so that only the tools there are get called, with arguments that fit. A template whose
                          way of writing calls cannot be read is refused.
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
from typing import Any, NamedTuple

from app.api.errors import ApiError, BadRequest, refuse, to_api_error
from app.api.fields import check_unknown, warn
from app.api.protocol import ChatFields, ChatRequest, read_text
from app.api.sampling import Constraint, close_objects
from app.api.tools.custom import CustomCalls, to_function
from app.api.tools.styled_calls import Piece, StyledCalls
from app.api.wording import Path
from app.extraction.pointers import walk_objects
from app.template_facts import TemplateFacts
from grammar import (
    GrammarError,
    GrammarSpec,
    InvalidGrammar,
    SchemaValidator,
    ToolStyle,
    UnsupportedGrammar,
    find_tool_refusal,
    make_tool_spec,
)

Json = dict[str, Any]

MODES = ("none", "auto", "required")
CHOICE = ("tool_choice",)
TOOLS_NOT_SHOWN = "the chat template knows no tools: with tool_choice auto the model was not shown them"
NO_STYLE = (
    "the form in which the model {model!r} writes tool calls could not be read from its chat template; name it "
    "with the server's option --tool-call-parser, or use tool_choice required"
)
MAX_NUM_SPECS = 32  # grammars of tools that are kept
# OpenAI allows 64 characters, Anthropic 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
# where a grammar of calls contains a tool's schema, by the tool's number, and the answer's
IN_CALL = re.compile(r"/tools/(\d+)/parameters")
IN_ANSWER = "/answer"
# kinds of constraints that may be the answer beside calls
PARTS = ("json_schema", "json_object", "regex", "choice")
# second line: the Responses API of OpenAI
FUNCTION_FIELDS = (
    *("name", "description", "parameters", "strict"), *("output_schema", "defer_loading", "allowed_callers", "async")
)
# An object beside one of these may be narrower or wider than what it lists.
COMBINING = frozenset(
    [*("allOf", "oneOf", "not", "if", "contains", "dependentSchemas", "dependencies", "minProperties"),
     "unevaluatedProperties"]
)
NO_PARAMETERS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    parameters: Json
    definition: Json  # as the client sent it, for the chat template; of a custom tool, as a function
    is_custom: bool = False
    is_strict: bool = False


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
        spec: the grammar of the answer.
        style: how the model writes calls.
        is_forced: the answer is calls and nothing else.
        is_parallel: whether it may call more than once.
        answer: the constraint of an answer that calls nothing, a part of `spec`; None without one.
        shows_reasoning: whether the reply has the reasoning of a style that writes it as messages.
    """

    tools: tuple[Tool, ...]
    spec: GrammarSpec
    style: ToolStyle
    is_forced: bool = False
    is_parallel: bool = True
    answer: Constraint | None = None
    shows_reasoning: bool = True

    @property
    def definitions(self) -> list[Json]:
        return [tool.definition for tool in self.tools]

    @property
    def is_bare(self) -> bool:
        """Whether calls are written without the model's own marks."""
        return self.style in (ToolStyle.bare(True), ToolStyle.bare(False))

    def make_parser(self) -> StyledCalls | CustomCalls:
        """Return the parser of calls in one output."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        # A list of calls may also be written as one call.
        style = replace(ToolStyle.bare(True), openings=("[", "")) if self.is_bare else self.style
        parser = StyledCalls(style, schemas, self.answer is not None, self.shows_reasoning)
        customs = frozenset(tool.name for tool in self.tools if tool.is_custom)
        return CustomCalls(parser, customs) if customs else parser

    def is_valid_call(self, call: Piece) -> bool:
        """Return whether a call is one of a tool, with arguments that fit.

        Raises GrammarError: the validator cannot read the tool's schema.
        """
        schema = next((tool.parameters for tool in self.tools if tool.name == call.name), None)
        try:
            arguments = {"input": call.text} if call.kind == "custom" else json.loads(call.text)
        except (ValueError, RecursionError):
            return False
        return schema is not None and SchemaValidator(schema).is_valid(arguments)


def use_tools(
    tools: Sequence[Tool], choice: ToolChoice, body: ChatFields, template: TemplateFacts,
    answer: Constraint | None = None,
) -> ToolUse | None:
    """Return the tools that an answer may call, with their grammar; None if there are none.

    Where the chat template knows no tools, the model is not shown them: it answers a request that leaves the choice to
    it in text, and makes one call at a time where calls are forced, having no reason to end a list of them.

    Args:
        answer: the constraint of an answer without calls; None where text may stand beside calls.

    Raises ApiError: 400 for a schema that is malformed or not supported, or a choice that is not among the tools.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequest("two tools have the same name", "tools")
    for name in choice.names or ():
        if name not in names:
            raise BadRequest(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice")
    used = tuple(tool for tool in tools if choice.names is None or tool.name in choice.names)
    written = _write(tools)
    _check_schemas(written)  # also those that the model may not call
    if not used or choice.mode == "none":
        return None
    is_parallel = template.knows_tools if body.parallel_tool_calls is None else body.parallel_tool_calls
    if choice.mode == "auto" and not template.knows_tools:
        warn(TOOLS_NOT_SHOWN)
        return None
    is_forced = choice.mode != "auto"
    is_parallel &= choice.mode != "one"
    style = template.tool_style if template.knows_tools else None
    if style is None and not is_forced:
        raise BadRequest(NO_STYLE.format(model=body.model), "tools", "unsupported_field")
    style = style or ToolStyle.bare(is_parallel)
    answer = None if is_forced else answer
    if answer is not None and (answer.spec.kind not in PARTS or answer.spec.source is not None):
        message = f"{answer.param} cannot shape the answer of a request with tools; use tool_choice none or required"
        raise BadRequest(message, "tool_choice", "too_many_constraints")
    written = written if len(used) == len(tools) else _write(used)
    spec, warnings = _make_spec(style, written, is_forced, is_parallel, None if answer is None else answer.spec)
    for message in warnings:
        warn(message)
    shows = body.include_reasoning is not False
    return ToolUse(used, spec, style, is_forced, is_parallel, answer, shows)


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Return the tools of a chat completion.

    Raises ApiError: 400 for a malformed one.
    """
    known = [tool.get("type") in ("function", "custom") or "function" in tool for tool in tools or ()]
    found: list[Tool] = []
    for i, tool in enumerate(tools or ()):
        if not known[i] and any(known) and isinstance(kind := tool.get("type"), str):
            warn(f"tools[{i}].type={kind[:40]!r} is a tool that no model here can call, and was left out")
        elif (read := _read_tool(("tools", i), tool)) is not None:
            found.append(read)
    return found


def read_functions(body: ChatRequest) -> ChatRequest:
    """Return a request with OpenAI's older `functions` and `function_call` as one with tools, called one at a time.

    Raises ApiError: 400 for functions beside tools.
    """
    if body.tools is not None or body.tool_choice is not None:
        raise BadRequest("functions is the older name of tools: give one of them", "functions")
    choice: Any = body.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": function} for function in body.functions or ()]
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})


def explain(error: GrammarError, use: ToolUse) -> ApiError:
    """Return the error for a rejected grammar of calls: names the tool, with a pointer into its schema."""
    text = error.pointer if isinstance(error, UnsupportedGrammar) else str(error)
    found = IN_CALL.match(text)
    if found is not None:
        return explain_tool(_move(error, found[0]), use.tools[int(found[1])].name)
    if use.answer is not None and text.startswith(IN_ANSWER):
        return to_api_error(_move(error, IN_ANSWER), use.answer.param)
    return to_api_error(error, "tools")


def explain_tool(error: GrammarError, name: str) -> ApiError:
    """Return the error for a tool's schema."""
    known = to_api_error(error, "tools")
    return ApiError(400, f"tool {name!r}: {known}", "tools", known.code, details=known.details)


def _move(error: GrammarError, place: str) -> GrammarError:
    """Return the same error with a pointer that begins behind a place."""
    if isinstance(error, UnsupportedGrammar):
        return UnsupportedGrammar(error.pointer.removeprefix(place), error.keyword, error.reason)
    pointer = error.pointer if isinstance(error, InvalidGrammar) else None
    text = str(error).removeprefix(place).removeprefix(": ")
    return InvalidGrammar(text, pointer and pointer.removeprefix(place))


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
    return None if function is None else replace(read_function(where, function), is_custom=True, is_strict=True)


def read_function(where: Path, function: Mapping[str, Any], tool: Mapping[str, Any] | None = None) -> Tool:
    """Return a function of any API.

    Args:
        tool: what the chat template gets; default: the function.
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
    is_strict = function.get("strict") is True
    return Tool(name, parameters, dict(tool or {"type": "function", "function": function}), is_strict=is_strict)


def read_chosen(choice: object) -> str:
    """Return the tool that a choice of chat completions names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    choice = choice if isinstance(choice, dict) and kind in ("function", "custom") else {}
    function = choice.get(str(kind))
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise refuse(CHOICE, ' must be {"type": "function", "function": {"name": ...}}')
    check_unknown(choice, ("type", str(kind)), CHOICE, None)
    check_unknown(function, ("name",), (*CHOICE, str(kind)), None)
    return name


def read_choice(
    choice: str | Mapping[str, Any] | None, has_tools: bool, read_name: Callable[[object], str] = read_chosen,
    is_nested: bool = True,
) -> ToolChoice:
    """Return the tool choice of one of OpenAI's APIs.

    Args:
        read_name: returns the tool that an object names.
        is_nested: allowed tools are one level deeper, as in chat completions.

    Raises ApiError: 400 for a malformed one.
    """
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in MODES:
            raise refuse(CHOICE, f"={choice[:80]!r} must be one of {', '.join(MODES)}, or name a function")
        if choice == "required" and not has_tools:
            raise BadRequest("tool_choice required needs tools", "tool_choice")
        return ToolChoice(choice or "auto")
    if choice.get("type") != "allowed_tools":
        return ToolChoice("one", frozenset([read_name(choice)]))
    where: Path = CHOICE
    allowed = choice
    if is_nested:
        check_unknown(choice, ("type", "allowed_tools"), CHOICE, None)
        inner = choice.get("allowed_tools")
        where, allowed = (*CHOICE, "allowed_tools"), inner if isinstance(inner, dict) else {}
    tools, mode = allowed.get("tools"), allowed.get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        raise refuse(where, ' must be {"mode": "auto" or "required", "tools": [...]}, with a tool')
    check_unknown(allowed, ("type", "mode", "tools"), where, None)
    return ToolChoice(mode, frozenset(map(read_name, tools)))


def _write(tools: Sequence[Tool]) -> str:
    return json.dumps([(tool.name, tool.parameters, tool.is_strict) for tool in tools])


def _close(parameters: Json) -> Json:
    """Return a schema whose arguments are those that it lists, unless it says which others it allows.

    Models that are not trained to call tools write unlisted names without end.
    """
    return close_objects(parameters) if all(map(_lists_all, walk_objects(parameters))) else parameters


def _lists_all(node: Json) -> bool:
    """Return whether a part of a schema stays satisfiable, and means no more, with the listed properties alone."""
    listed, required = node.get("properties"), node.get("required")
    if not isinstance(listed, dict):
        return node.keys().isdisjoint(COMBINING)
    is_met = not isinstance(required, list) or all(name in list(listed) for name in required)
    return is_met and node.keys().isdisjoint(COMBINING | {"anyOf", "$ref"})


# Clients send the same tools with each request, and 64 of them take 15 ms.
@lru_cache(MAX_NUM_SPECS)
def _check_schemas(tools: str) -> None:
    """Raise ApiError for a schema that is malformed."""
    for name, schema, _ in json.loads(tools):
        try:
            GrammarSpec.json_schema(json.dumps(schema))
        except GrammarError as error:
            raise explain_tool(error, name) from error


@lru_cache(MAX_NUM_SPECS)
def _make_spec(
    style: ToolStyle, tools: str, is_forced: bool, is_parallel: bool, answer: GrammarSpec | None
) -> tuple[GrammarSpec, tuple[str, ...]]:
    """Return the grammar of an answer with tools, and the warnings for the client.

    Raises ApiError: 400 for a strict tool whose schema cannot be enforced, and for tools that are too large.
    """
    enforced: list[tuple[str, Json]] = []
    warnings = []
    for name, given, is_strict in json.loads(tools):
        schema = _close(given)
        try:
            refusal = find_tool_refusal(style, schema)
        except GrammarError as contradiction:
            raise explain_tool(contradiction, name) from contradiction
        if refusal is not None and is_strict:
            raise explain_tool(refusal, name) from refusal
        if refusal is not None:
            warnings.append(f"the arguments of the tool {name!r} are any object: {refusal}")
        enforced.append((name, schema if refusal is None else {"type": "object"}))
    try:
        return make_tool_spec(style, enforced, is_forced, is_parallel, answer), tuple(warnings)
    except GrammarError as error:
        raise to_api_error(error, "tools") from error
