"""Custom tools, whose input is one text: for the model they are functions with the argument `input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.errors import refuse
from app.api.fields import check_unknown, warn
from app.api.tools.lark_regex import NotRegular, to_regex
from app.api.wording import Path, say_place

Json = dict[str, Any]

FIELDS = ("type", "name", "description", "format", "defer_loading", "allowed_callers")


def to_function(where: Path, custom: Mapping[str, Any]) -> Json | None:
    """Return a custom tool as a function; None for one that is left out because of its grammar.

    Raises:
        ApiError: 400 for one that is malformed.
    """
    check_unknown(custom, FIELDS, where)
    schema: Json = {"type": "string"}
    asked = custom.get("format") or {"type": "text"}
    # chat completions have the grammar's fields one level deeper than responses
    grammar = asked.get("grammar", asked) if isinstance(asked, dict) else {}
    kind = (asked.get("type"), grammar.get("syntax")) if isinstance(grammar, dict) else (None, None)
    if kind[0] == "grammar" and isinstance(grammar.get("definition"), str):
        pattern = grammar["definition"]
        if kind[1] == "lark":
            try:
                pattern, kind = to_regex(pattern), ("grammar", "regex")
            except NotRegular as error:
                warn(f"{say_place(where)} was left out: calls cannot follow its Lark grammar, which has {error}")
                return None
        schema["pattern"] = f"^(?:{pattern})$"
    if kind[0] != "text" and kind != ("grammar", "regex"):
        rule = " must be text, or a grammar with the syntax lark or regex, and its definition"
        raise refuse((*where, "format"), rule)
    parameters = {"type": "object", "properties": {"input": schema}, "required": ["input"]}
    kept = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    return kept | {"parameters": parameters | {"additionalProperties": False}}
