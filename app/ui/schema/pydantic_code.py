"""Python code that is read, never run: its classes, names and plain values, and errors that tell the line."""

from __future__ import annotations

import ast
import json
from typing import Any

MAX_CODE_CHARS = 100_000
# What Python's parser raises for a text that is no code.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


class CodeError(ValueError):
    """Code that cannot be read as classes; the message has the line."""


def parse_classes(code: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name.

    Raises:
        CodeError: a text that is too long, or no Python.
    """
    if len(code) > MAX_CODE_CHARS:
        raise CodeError(f"the code has {len(code):,} characters; at most {MAX_CODE_CHARS:,} are read")
    try:
        tree = ast.parse(code)
    except UNREADABLE as error:
        line = getattr(error, "lineno", None)
        raise CodeError(f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)) from error
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def parse_type(text: str, node: ast.expr) -> ast.expr:
    """The type in a text, with the line that the text stands in."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except UNREADABLE as error:
        raise error_at(node, f"`{text[:60]}` is no type: {getattr(error, 'msg', error)}") from error
    for each in ast.walk(parsed):
        ast.copy_location(each, node)
    return parsed


def read_name(node: ast.expr) -> str:
    """Return the last part of a name: `Field` for `Field` and `pydantic.Field`; "" for other expressions."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def read_literal(node: ast.expr) -> Any:
    """A value that JSON has, too, and that can be sent as UTF-8."""
    try:
        value = ast.literal_eval(node)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError) as error:
        raise error_at(node, f"{quote_code(node)} must be a plain value") from error
    return value


def is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def quote_code(node: ast.AST) -> str:
    """The beginning of a piece of code, for a message."""
    try:
        first, *_ = ast.unparse(node).split("\n")
        return f"`{first[:60]}`"
    except ValueError:
        # A whole number that is too long to be written in digits.
        return "this"


def error_at(node: ast.AST, message: str) -> CodeError:
    return CodeError(f"line {getattr(node, 'lineno', '?')}: {message}")
