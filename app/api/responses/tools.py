"""The tools of POST /v1/responses as tools of a chat request.

function     a function                      namespace    its tools, as functions whose names begin with the namespace's
custom       a custom tool                   others       left out: only OpenAI's service, or one client, has them
local_shell  a function that runs a command
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.errors import BadRequest
from app.api.fields import check_unknown, warn

Json = dict[str, Any]
LOCAL_SHELL: Json = {
    "name": "local_shell",
    "description": "Runs a command, given as a list of its words, on the user's machine.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
            "timeout_ms": {"type": "integer", "minimum": 1},
            "working_directory": {"type": "string"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
CHOICE = 'tool_choice must be {"type": "function", "name": ...}'


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        places: location in the request -> the tool of a chat request.
        names: name of a function for the model -> its fields in an item, where they differ.
    """

    places: dict[str, Json] = field(default_factory=dict)
    names: dict[str, Json] = field(default_factory=dict)


def read_tools(tools: Sequence[Json]) -> Tools:
    """Return the tools that the model may call.

    Raises:
        ApiError: 400 for a tool that is malformed, or if none is left.
    """
    found = Tools()
    for i, tool in enumerate(tools):
        _add(found, f"tools[{i}]", tool)
    if tools and not found.places:
        message = f"tools[0].type={str(tools[0]['type'])[:40]!r} is not supported: tools are called by the client"
        raise BadRequest(message, "tools", "unsupported_field")
    return found


def join_name(namespace: object, name: object) -> Any:
    """Return the name that the model has for a tool of a namespace."""
    if not isinstance(namespace, str) or not isinstance(name, str):
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_choice(choice: str | Mapping[str, Any] | None) -> str | Json | None:
    """Return the tool choice of a chat request."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping) and kind == "allowed_tools":
        check_unknown(choice, ("type", "mode", "tools"), "tool_choice", None)
        tools = choice.get("tools")
        nested = [read_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": nested}}
    if kind not in ("function", "custom") or not isinstance(choice.get("name"), str):
        raise BadRequest(CHOICE, "tool_choice")
    check_unknown(choice, ("type", "name", "namespace"), "tool_choice", None)
    return {"type": kind, kind: {"name": join_name(choice.get("namespace"), choice["name"])}}


def describe_tool(tool: Json) -> Json:
    """Return a tool as a response repeats it: a function has all its fields."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None} | tool | {"strict": tool.get("strict") is not False}


def _add(found: Tools, where: str, tool: Any, namespace: str | None = None) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        message = f'{where} must be {{"type": "function", "name": ..., "parameters": ...}}'
        raise BadRequest(message, "tools")
    if kind in ("function", "custom"):
        inner = {name: value for name, value in tool.items() if name not in ("type", "strict")}
        if namespace is not None:
            flat = join_name(namespace, tool.get("name"))
            found.names[str(flat)] = {"name": tool.get("name"), "namespace": namespace}
            inner["name"] = flat
        found.places[where] = {"type": kind, kind: inner}
    elif kind == "local_shell":
        found.places[where] = {"type": "function", "function": LOCAL_SHELL}
        found.names["local_shell"] = {"type": "local_shell_call"}
    elif kind == "namespace" and namespace is None:
        name, tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(tools, list):
            raise BadRequest(f"{where} must have a name and a list of tools", "tools")
        for i, one in enumerate(tools):
            _add(found, f"{where}.tools[{i}]", one, name)
    else:
        warn(f"{where}.type={kind[:40]!r} is a tool that no model here can call, and was left out")
