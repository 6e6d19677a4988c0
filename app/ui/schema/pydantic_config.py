"""How a Pydantic class is configured: in `model_config`, and behind its bases."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from app.ui.schema.pydantic_code import error_at, quote_code, read_literal, read_name

# Value of `extra` -> additionalProperties; None stands for no such keyword.
EXTRA = {"forbid": False, "allow": True, "ignore": None}
# They change how a record is checked or made in Python, not its schema.
SILENT = frozenset(
    [
        *(
            "arbitrary_types_allowed",
            "cache_strings",
            "coerce_numbers_to_str",
            "defer_build",
            "from_attributes",
        ),
        *("frozen", "hide_input_in_errors", "loc_by_alias", "populate_by_name", "protected_namespaces"),
        *("regex_engine", "revalidate_instances", "str_strip_whitespace", "str_to_lower", "str_to_upper"),
        *("strict", "use_enum_values", "validate_assignment", "validate_by_name", "validate_default"),
        *("validate_return", "validation_error_cause"),
    ]
)


def read_config(node: ast.ClassDef) -> dict[str, Any]:
    """`extra` and `title`, as far as a class says them; what stands behind the bases wins, as in Pydantic.

    Raises:
        CodeError: an option that may change the schema in another way.
    """
    config: dict[str, Any] = {}
    for statement in node.body:
        value = find_config(statement)
        if value is not None:
            config |= _read_options(_list_options(value), value)
    behind = [(each.arg or "**", each.value) for each in node.keywords]
    return config | _read_options(behind, node)


def find_config(statement: ast.stmt) -> ast.expr | None:
    """What a statement gives `model_config`."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id="model_config")], value=value)
            | ast.AnnAssign(target=ast.Name(id="model_config"), value=value)
        ):
            return value
    return None


def _list_options(value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match value:
        case ast.Dict(keys=keys, values=values):
            for key, each in zip(keys, values, strict=True):
                yield str(read_literal(key)) if key is not None else "**", each
        case ast.Call(func=func, args=[], keywords=keywords) if read_name(func) in ("ConfigDict", "dict"):
            for keyword in keywords:
                yield keyword.arg or "**", keyword.value
        case _:
            raise error_at(value, f"{quote_code(value)} is no configuration of a class")


def _read_options(options: Iterable[tuple[str, ast.expr]], place: ast.AST) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, node in options:
        if name == "extra":
            found[name] = read_literal(node)
            if found[name] not in tuple(EXTRA):
                raise error_at(node, f"extra is {quote_code(node)}; known are {', '.join(EXTRA)}")
        elif name == "title":
            found[name] = read_literal(node)
        elif name not in SILENT:
            raise error_at(place, f"{name} in the configuration of a class is not understood here")
    return found
