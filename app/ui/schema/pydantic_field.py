"""What stands around a field's type: `Field(...)`, and the marks of annotated_types inside `Annotated`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.extraction import Schema
from app.ui.schema.pydantic_code import error_at, is_ellipsis, quote_code, read_literal, read_name
from app.ui.schema.pydantic_writer import CONSTRAINTS

LENGTHS = {
    "min_length": {"string": "minLength", "array": "minItems", "object": "minProperties"},
    "max_length": {"string": "maxLength", "array": "maxItems", "object": "maxProperties"},
}
ARGUMENTS = {argument: name for name, argument in CONSTRAINTS.items() if argument not in LENGTHS}
# What may stand in Annotated beside Field, and the parameters of each in their order.
MARKS = {
    "Gt": ("gt",), "Ge": ("ge",), "Lt": ("lt",), "Le": ("le",), "Interval": ("gt", "ge", "lt", "le"),
    "MultipleOf": ("multiple_of",), "MinLen": ("min_length",), "MaxLen": ("max_length",),
    "Len": ("min_length", "max_length"), "StringConstraints": ("min_length", "max_length", "pattern"),
}  # fmt: skip
ALIASES = ("alias", "validation_alias")
SILENT = ("title", "examples")
LEAST = ("minimum", "exclusiveMinimum", *LENGTHS["min_length"].values())
UNORDERED = ("multipleOf", "pattern")


@dataclass(slots=True)
class FieldDraft:
    """A field while its annotation and its value are read."""

    schema: Schema
    alias: str | None = None
    has_default: bool = False


def apply_mark(mark: ast.expr, field: FieldDraft) -> None:
    """Take in what stands behind the type in `Annotated`."""
    name = read_name(mark.func) if isinstance(mark, ast.Call) else ""
    if isinstance(mark, ast.Call) and name == "Field":
        apply_field(mark, field)
    elif isinstance(mark, ast.Call) and name in MARKS:
        for argument, value in _bind(mark, MARKS[name]):
            if argument not in MARKS[name]:
                raise error_at(mark, f"{name}({argument}=...) has no keyword in JSON Schema here")
            _limit(field.schema, argument, value)
    else:
        raise error_at(mark, f"{quote_code(mark)} in Annotated has no keyword in JSON Schema here")


def apply_field(call: ast.Call, field: FieldDraft) -> None:
    """Take in the arguments of `Field`."""
    aliases: dict[str, str] = {}
    for name, value in _bind(call, ("default",)):
        if name == "default":
            field.has_default |= not is_ellipsis(value)
        elif name == "default_factory":
            field.has_default = True
        elif name in ALIASES:
            aliases |= _read_alias(name, value)
        elif name == "description":
            _describe(field.schema, read_literal(value))
        elif name in SILENT:
            read_literal(value)
        elif name in ARGUMENTS or name in LENGTHS:
            _limit(field.schema, name, value)
        else:
            raise error_at(value, f"Field({name}=...) has no keyword in JSON Schema here")
    field.alias = aliases.get("validation_alias", aliases.get("alias", field.alias))


def _bind(call: ast.Call, parameters: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of a call with their names."""
    if len(call.args) > len(parameters) or any(isinstance(each, ast.Starred) for each in call.args):
        raise error_at(call, f"the arguments of {quote_code(call)} have no names")
    yield from zip(parameters, call.args, strict=False)
    for each in call.keywords:
        yield each.arg or "**", each.value


def _read_alias(name: str, value: ast.expr) -> dict[str, str]:
    alias = read_literal(value)
    if alias is not None and not isinstance(alias, str):
        raise error_at(value, f"{name} is {quote_code(value)}, which is no plain name")
    return {} if alias is None else {name: alias}


def _describe(schema: Schema, description: Any) -> None:
    if description is not None:
        schema["description"] = description


def _limit(schema: Schema, argument: str, node: ast.expr) -> None:
    """Add one limit; of two the stricter holds."""
    value = read_literal(node)
    if value is None:
        return
    for keyword in _list_keywords(schema, argument):
        both = [schema.get(keyword, value), value]
        pick = max if keyword in LEAST else min
        if keyword in UNORDERED or not all(isinstance(each, int | float) for each in both):
            if both[0] != value:
                raise error_at(node, f"there is more than one {argument}")
            schema[keyword] = value
        else:
            schema[keyword] = pick(both)


def _list_keywords(schema: Schema, argument: str) -> list[str]:
    """The keywords of an argument: a length is one of texts, lists or dicts, or of each that may stand."""
    if argument in ARGUMENTS:
        return [ARGUMENTS[argument]]
    kinds, keywords = _list_kinds(schema), LENGTHS[argument]
    return [keywords[kind] for kind in keywords if kind in kinds] or [keywords["string"]]


def _list_kinds(schema: Schema) -> set[str]:
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found.union(*(_list_kinds(option) for option in schema.get("anyOf", [])))
