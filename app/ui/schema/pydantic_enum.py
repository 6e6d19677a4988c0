"""Choices of a Pydantic class: `Literal[...]` and the classes made of `Enum`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from app.extraction import Schema
from app.ui.schema.pydantic_code import error_at, quote_code, read_literal, read_name

# The base of an enum -> the type that its values must have, None for any.
ENUMS: dict[str, type | None] = {"Enum": None, "StrEnum": str, "IntEnum": int}
MIXINS: dict[str, type] = {"str": str, "int": int, "float": float}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
# They can give a member another value than the one that stands in the code.
MAKERS = ("__new__", "__init__")


def is_enum(node: ast.ClassDef) -> bool:
    return any(read_name(base) in ENUMS for base in node.bases)


def read_enum(node: ast.ClassDef) -> Schema:
    """The values of an enum's members.

    Raises:
        CodeError: a base or a statement that is not understood, a value that JSON lacks, or no member.
    """
    values = [read_literal(value) for value in _list_members(node)]
    if not values:
        raise error_at(node, f"{node.name} has no members")
    for kind in _list_kinds(node):
        # True is 1 there, and 1 is 1.0: not what stands in the code.
        if any(type(value) is not kind for value in values):
            raise error_at(node, f"the values of {node.name} are not all of type {kind.__name__}")
    schema = make_choice(values)
    description = ast.get_docstring(node)
    return schema | {"description": description} if description else schema


def make_choice(values: list[Any]) -> Schema:
    """One of these values, with their type where they have one in common."""
    kinds = {type(value) for value in values}
    kind = TYPES.get(kinds.pop()) if len(kinds) == 1 else None
    return {"type": kind, "enum": values} if kind else {"enum": values}


def _list_members(node: ast.ClassDef) -> Iterator[ast.expr]:
    for statement in node.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if not name.startswith("_"):
                yield value
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign(value=None):
                pass
            case ast.FunctionDef(name=name) if name not in MAKERS:
                pass
            case _:
                raise error_at(statement, f"{quote_code(statement)} is no member of an enum")


def _list_kinds(node: ast.ClassDef) -> list[type]:
    kinds = []
    for base in node.bases:
        name = read_name(base)
        if name not in ENUMS and name not in MIXINS:
            raise error_at(base, f"the base class {quote_code(base)} is not known here")
        kinds.append(ENUMS.get(name) or MIXINS.get(name))
    if node.keywords:
        raise error_at(node, f"{node.keywords[0].arg} behind the bases of an enum is not understood here")
    return [kind for kind in kinds if kind is not None]
