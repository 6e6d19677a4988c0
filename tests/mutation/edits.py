"""The small changes that a mutant makes, found and applied on the syntax tree of one file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
BODIES = ("body", "orelse", "finalbody")
NOT_CHANGED = {"annotation", "target", "targets", "handlers", "cases", *BODIES}
# The walk finds nested functions; the text of an error is not behaviour.
LEFT_ALONE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert)


@dataclass(frozen=True)
class Edit:
    """One possible change; `apply` makes it in the tree that the edit was found in."""

    line: int
    apply: Callable[[], Any]


def find_edits(tree: ast.Module) -> list[Edit]:
    """Return every change possible inside the functions of a module, in a fixed order."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [edit for function in functions for edit in _edits_of_body(function.body)]


def _edits_of_body(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        if isinstance(statement, LEFT_ALONE):
            continue
        if _can_be_removed(statement):
            yield Edit(statement.lineno, partial(body.__setitem__, place, ast.Pass()))
        bodies = [getattr(statement, name, []) for name in BODIES]
        parts = (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
        for child_body in [*bodies, *(part.body for part in parts)]:
            yield from _edits_of_body(child_body)
        for name, value in ast.iter_fields(statement):
            for each in value if isinstance(value, list) else [value]:
                if name not in NOT_CHANGED and isinstance(each, ast.expr):
                    for node in ast.walk(each):
                        yield from _edits_of_node(node)
        yield from _edits_of_statement(statement)


def _can_be_removed(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return False
        case ast.Expr(value=ast.Call() | ast.Await()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return True
    return False


def _replace(line: int, owner: ast.AST, field: str, value: Any) -> Edit:
    return Edit(line, partial(setattr, owner, field, value))


def _edits_of_statement(statement: ast.stmt) -> Iterator[Edit]:
    match statement:
        case ast.If(test=test) | ast.While(test=test):
            yield _replace(test.lineno, statement, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield _replace(statement.lineno, statement, "value", ast.Constant(None))
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield _replace(statement.lineno, statement, "op", OPERATORS[type(op)]())


def _edits_of_node(node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                if type(op) in COMPARISONS:
                    swap = partial(ops.__setitem__, place, COMPARISONS[type(op)]())
                    yield Edit(node.lineno, swap)
        case ast.BoolOp(op=op):
            yield _replace(node.lineno, node, "op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield _replace(node.lineno, node, "op", OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _replace(node.lineno, node, "operand", ast.UnaryOp(ast.Not(), operand))
        case ast.Constant(value=bool() as value):
            yield _replace(node.lineno, node, "value", not value)
        case ast.Constant(value=int() as value):
            yield _replace(node.lineno, node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED_CALLS:
            yield _replace(node.lineno, node.func, "id", SWAPPED_CALLS[name])
