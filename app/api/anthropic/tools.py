"""Reads the tools of POST /v1/messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from app.api.errors import refuse
from app.api.fields import check_unknown, warn
from app.api.tools.use import Tool, read_function
from app.api.wording import Path, say_place

Json = dict[str, Any]

# the last of them are for Anthropic's own machines
TOOL_FIELDS = (
    *("name", "description", "input_schema", "type", "strict"),
    *("cache_control", "input_examples", "eager_input_streaming", "defer_loading", "allowed_callers"),
)
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
EDITS: Json = {
    "path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": NUMBER, "insert_text": TEXT,
    "view_range": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2},
}
# Tools that clients run: the protocol names them, and Anthropic has published their descriptions and arguments.
CLIENT_TOOL = re.compile(r"(bash|text_editor|memory)_\d{8}")
CLIENT_TOOLS: dict[str, tuple[str, Json, tuple[str, ...]]] = {
    "bash": (
        "Runs a command in a bash session that keeps its state; restart begins a new session.",
        {"command": TEXT, "restart": {"type": "boolean"}},
        ("command",),
    ),
    "text_editor": (
        "Views and edits files: view a file or folder, create a file from file_text, str_replace the only occurrence "
        "of old_str by new_str, insert a text after insert_line.",
        {"command": {"enum": ["view", "create", "str_replace", "insert"]}, **EDITS},
        ("command", "path"),
    ),
    "memory": (
        "Keeps notes in files below /memories: view, create, str_replace, insert, delete, rename.",
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **EDITS, "old_path": TEXT, "new_path": TEXT,
        },
        ("command",),
    ),
}


def read_tools(tools: Sequence[Json]) -> list[Tool]:
    """Return the tools. Those that only a service has are left out."""
    kept = [each for i, tool in enumerate(tools) if (each := _read_tool(("tools", i), tool)) is not None]
    if tools and not kept:
        rule = f"={str(tools[0]['type'])[:40]!r} is not supported: tools are called by the client"
        raise refuse(("tools", 0, "type"), rule, "unsupported_field")
    return kept


def _read_tool(where: Path, tool: Json) -> Tool | None:
    schema, kind = tool.get("input_schema"), tool.get("type")
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    if isinstance(kind, str) and (known := CLIENT_TOOL.fullmatch(kind)):
        description, properties, required = CLIENT_TOOLS[known[1]]
        schema = {"type": "object", "properties": properties, "required": [*required]}
        return read_function(where, {"description": description} | function | {"parameters": schema})
    if kind not in (None, "custom"):
        warn(f"{say_place(where)}.type={str(kind)[:40]!r} is a tool of a service and was left out")
        return None
    if not isinstance(schema, dict):
        raise refuse((*where, "input_schema"), " must be a JSON Schema")
    if schema.get("type", "object") != "object":
        raise refuse((*where, "input_schema"), " must have the type object: arguments have names")
    check_unknown(tool, TOOL_FIELDS, where)
    return read_function(where, function | {"parameters": schema})
