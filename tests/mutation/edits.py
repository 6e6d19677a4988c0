"""The small changes that a mutant makes, found and applied on the syntax tree of one file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Edit:
    """One possible change; `apply` makes it in the tree that the edit was found in."""

    line: int
    apply: Callable[[], None]


def find_edits(tree: ast.Module) -> list[Edit]:
    """Return every change possible inside the functions of a module, in a fixed order."""
    return [edit for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for edit in
            _edits_of_body(node.body)]  # fmt: skip


def _edits_of_body(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        # Nested functions are found by the walk; an error's text is not behaviour.
        if isinstance(
            statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Raise | ast.Assert
        ):
            continue
        if _can_be_removed(statement):
            yield Edit(statement.lineno, lambda place=place: body.__setitem__(place, ast.Pass()))  # type: ignore[misc]
        for child_body in _bodies(statement):
            yield from _edits_of_body(child_body)
        for expression in _own_expressions(statement):
            yield from _edits_of_expression(expression)
        yield from _edits_of_statement(statement)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield from [part] if (part := getattr(statement, name, None)) else []
    for part in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
        yield part.body


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself, without its nested statements and annotations."""
    for name, value in ast.iter_fields(statement):
        if name not in (
            "annotation",
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "cases",
            "target",
            "targets",
        ):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.expr):
                    yield each


def _can_be_removed(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return False
        case ast.Expr(value=ast.Call() | ast.Await()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return True
    return False


def _edits_of_statement(statement: ast.stmt) -> Iterator[Edit]:
    match statement:
        case ast.If() | ast.While():

            def negate(node: ast.If | ast.While = statement) -> None:
                node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)

            yield Edit(statement.test.lineno, negate)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):

            def return_none(node: ast.Return = statement) -> None:
                node.value = ast.copy_location(ast.Constant(None), node)

            yield Edit(statement.lineno, return_none)
        case ast.AugAssign(op=op) if type(op) in OPERATORS:

            def swap(node: ast.AugAssign = statement) -> None:
                node.op = OPERATORS[type(node.op)]()

            yield Edit(statement.lineno, swap)


def _edits_of_expression(root: ast.expr) -> Iterator[Edit]:
    for node in ast.walk(root):
        match node:
            case ast.Compare():
                for place, op in enumerate(node.ops):
                    if type(op) in COMPARISONS:

                        def compare(node: ast.Compare = node, place: int = place) -> None:
                            node.ops[place] = COMPARISONS[type(node.ops[place])]()

                        yield Edit(node.lineno, compare)
            case ast.BoolOp():

                def other(node: ast.BoolOp = node) -> None:
                    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()

                yield Edit(node.lineno, other)
            case ast.BinOp(op=op) if type(op) in OPERATORS:

                def operate(node: ast.BinOp = node) -> None:
                    node.op = OPERATORS[type(node.op)]()

                yield Edit(node.lineno, operate)
            case ast.UnaryOp(op=ast.Not()):

                def assert_it(node: ast.UnaryOp = node) -> None:
                    node.op = ast.Not()
                    node.operand = ast.copy_location(ast.UnaryOp(ast.Not(), node.operand), node.operand)

                yield Edit(node.lineno, assert_it)
            case ast.Constant(value=bool() | int()):

                def change(node: ast.Constant = node) -> None:
                    node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]

                yield Edit(node.lineno, change)
            case ast.Call(func=ast.Name(id=name)) if name in SWAPPED_CALLS:

                def rename(function: ast.Name = node.func) -> None:  # type: ignore[assignment]
                    function.id = SWAPPED_CALLS[function.id]

                yield Edit(node.lineno, rename)
