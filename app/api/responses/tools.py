"""Reads the tools of POST /v1/responses.

function     a function                      namespace    its tools, as functions whose names begin with the namespace's
custom       a custom tool                   others       left out: only OpenAI's service, or one client, has them
local_shell  a function that runs a command
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.errors import refuse
from app.api.fields import check_unknown, warn
from app.api.tools.use import CHOICE, Tool, read_custom, read_function
from app.api.wording import Path, say_place

Json = dict[str, Any]
KNOWN = ("function", "custom", "local_shell", "namespace")
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


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        tools: as the model sees them.
        names: name of a function for the model -> its fields in an item, where they differ.
    """

    tools: list[Tool] = field(default_factory=list)
    names: dict[str, Json] = field(default_factory=dict)


def read_tools(tools: Sequence[Json]) -> Tools:
    """Return the tools that the model may call."""
    found = Tools()
    for i, tool in enumerate(tools):
        _add(found, ("tools", i), tool)
    if tools and all(tool["type"] not in KNOWN for tool in tools):
        rule = f"={str(tools[0]['type'])[:40]!r} is not supported: tools are called by the client"
        raise refuse(("tools", 0, "type"), rule, "unsupported_field")
    return found


def join_name(namespace: object, name: object) -> Any:
    """Return the name that the model has for a tool of a namespace."""
    if not isinstance(namespace, str) or not isinstance(name, str):
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_chosen(choice: object) -> str:
    """Return the tool that a choice names."""
    given = choice if isinstance(choice, dict) else {}
    if given.get("type") not in ("function", "custom") or not isinstance(given.get("name"), str):
        raise refuse(CHOICE, ' must be {"type": "function", "name": ...}')
    check_unknown(given, ("type", "name", "namespace"), CHOICE, None)
    return str(join_name(given.get("namespace"), given["name"]))


def describe_tool(tool: Json) -> Json:
    """Return a tool as a response repeats it: a function has all its fields."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None} | tool | {"strict": tool.get("strict") is not False}


def _add(found: Tools, where: Path, tool: Any, namespace: str | None = None) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise refuse(where, ' must be {"type": "function", "name": ..., "parameters": ...}')
    if kind in ("function", "custom"):
        inner = {name: value for name, value in tool.items() if name not in ("type", "strict")}
        if namespace is not None:
            flat = join_name(namespace, tool.get("name"))
            found.names[str(flat)] = {"name": tool.get("name"), "namespace": namespace}
            inner["name"] = flat
        read = read_function(where, inner) if kind == "function" else read_custom(where, inner)
        found.tools.extend([] if read is None else [read])
    elif kind == "local_shell":
        found.tools.append(read_function(where, LOCAL_SHELL))
        found.names["local_shell"] = {"type": "local_shell_call"}
    elif kind == "namespace" and namespace is None:
        name, tools = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(tools, list):
            raise refuse(where, " must have a name and a list of tools")
        for i, one in enumerate(tools):
            _add(found, (*where, "tools", i), one, name)
    else:
        warn(f"{say_place(where)}.type={kind[:40]!r} is a tool that no model here can call, and was left out")
