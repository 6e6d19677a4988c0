"""Pydantic classes as a JSON Schema, read from the syntax tree: what a person types here never runs."""

from __future__ import annotations

import ast
import json
from typing import Any

from app.extraction import Schema
from app.ui.schema.pydantic_writer import CONSTRAINTS

SIMPLE: dict[str, Schema] = {
    "str": {"type": "string"}, "int": {"type": "integer"}, "float": {"type": "number"}, "bool": {"type": "boolean"},
    "date": {"type": "string", "format": "date"}, "time": {"type": "string", "format": "time"},
    "datetime": {"type": "string", "format": "date-time"}, "EmailStr": {"type": "string", "format": "email"},
    "AnyUrl": {"type": "string", "format": "uri"}, "HttpUrl": {"type": "string", "format": "uri"},
    "UUID": {"type": "string", "format": "uuid"}, "Decimal": {"type": "number"}, "None": {"type": "null"},
}  # fmt: skip
LISTS = ("list", "List", "Sequence", "tuple", "set")
ARGUMENTS = {
    argument: name for name, argument in CONSTRAINTS.items() if argument not in ("min_length", "max_length")
}
LENGTHS = {"min_length": ("minLength", "minItems"), "max_length": ("maxLength", "maxItems")}
MAX_CODE_CHARS = 100_000
# What Python's parser raises for a text that is no code.
UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


class CodeError(ValueError):
    """Code that cannot be read as classes; the message has the line."""


def pydantic_to_schema(code: str) -> Schema:
    """The schema of the last class, with the classes that it uses written in place.

    Raises:
        CodeError: no class, or something that has no schema.
    """
    if len(code) > MAX_CODE_CHARS:
        raise CodeError(f"the code has {len(code):,} characters; at most {MAX_CODE_CHARS:,} are read")
    try:
        tree = ast.parse(code)
    except UNREADABLE as error:
        line = getattr(error, "lineno", None)
        raise CodeError(f"line {line}: {getattr(error, 'msg', error)}" if line else str(error)) from error
    try:
        return _read_last_class(tree)
    except RecursionError as error:
        raise CodeError("the classes are nested too deeply") from error


def _read_last_class(tree: ast.Module) -> Schema:
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    models = [node for node in classes.values() if not _is_enum(node)]
    if not models:
        raise CodeError("there is no class yet: write `class Record(BaseModel):` and its fields")
    return _Reader(classes).read_class(models[-1], is_root=True)


def _is_enum(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ("Enum", "StrEnum") for base in node.bases)


class _Reader:
    """Classes by name, and those that are being read: a class inside itself has no form here."""

    def __init__(self, classes: dict[str, ast.ClassDef]) -> None:
        self.classes = classes
        self.open: list[str] = []

    def read_class(self, node: ast.ClassDef, is_root: bool = False) -> Schema:
        if node.name in self.open:
            raise _error(node, f"{node.name} contains itself; write such a schema as JSON")
        self.open.append(node.name)
        schema: Schema = {"title": node.name} if is_root else {}
        description = ast.get_docstring(node)
        if description:
            schema["description"] = description
        schema |= {"type": "object", "properties": {}}
        required: list[str] = []
        for statement in node.body:
            self.read_statement(statement, schema, required)
        if required:
            schema["required"] = required
        # As a person who writes a class means it; `extra="allow"` or "ignore" says otherwise.
        schema.setdefault("additionalProperties", False)
        if schema["additionalProperties"] is True:
            del schema["additionalProperties"]
        self.open.pop()
        return schema

    def read_statement(self, statement: ast.stmt, schema: Schema, required: list[str]) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
            case ast.Assign(targets=[ast.Name(id="model_config")]):
                allows = any(
                    isinstance(each, ast.keyword)
                    and each.arg == "extra"
                    and ast.unparse(each.value) in ("'allow'", "'ignore'")
                    for each in ast.walk(statement)
                )
                schema["additionalProperties"] = allows
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                subschema = self.read_type(annotation)
                has_default = self.read_value(value, subschema, statement)
                schema["properties"][name] = subschema
                if not has_default:
                    required.append(name)
            case _:
                raise _error(statement, f"`{ast.unparse(statement)[:60]}` is no field")

    def read_value(self, value: ast.expr | None, subschema: Schema, place: ast.stmt) -> bool:
        """Take in what stands behind `=`; tells whether the field may be left out."""
        match value:
            case None:
                return False
            case ast.Call(func=ast.Name(id="Field"), args=args, keywords=keywords):
                has_default = bool(args) and not _is_ellipsis(args[0])
                for each in keywords:
                    has_default |= self.read_argument(each, subschema)
                return has_default
            case ast.Constant() if _is_ellipsis(value):
                return False
            case _:
                return True

    def read_argument(self, argument: ast.keyword, subschema: Schema) -> bool:
        name = argument.arg or "**"
        if name in ("default", "default_factory"):
            return True
        value = _literal(argument.value)
        if name == "description":
            subschema["description"] = value
        elif name in ARGUMENTS:
            subschema[ARGUMENTS[name]] = value
        elif name in LENGTHS:
            is_list = "items" in subschema or "array" in str(subschema.get("type"))
            subschema[LENGTHS[name][is_list]] = value
        elif name not in ("title", "examples", "alias"):
            raise _error(argument.value, f"Field({name}=...) has no keyword in JSON Schema here")
        return False

    def read_type(self, node: ast.expr) -> Schema:
        match node:
            case ast.Constant(value=None):
                return {"type": "null"}
            case ast.Constant(value=str() as text):
                return self.read_type(_parse_type(text, node))
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return self.read_name(name, node)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return self.join(self.read_type(left), self.read_type(right), node)
            case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
                return self.read_generic(name, inner, node)
        raise _error(node, f"`{ast.unparse(node)}` is no type that a record can have")

    def read_name(self, name: str, node: ast.expr) -> Schema:
        if name in SIMPLE:
            return dict(SIMPLE[name])
        found = self.classes.get(name)
        if found is None:
            raise _error(node, f"the type {name} is not known here")
        if not _is_enum(found):
            return self.read_class(found)
        values = [_literal(each.value) for each in found.body if isinstance(each, ast.Assign)]
        return (
            {"type": "string", "enum": values}
            if all(isinstance(v, str) for v in values)
            else {"enum": values}
        )

    def read_generic(self, name: str, inner: ast.expr, node: ast.expr) -> Schema:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if not parts:
            raise _error(node, f"{name}[()] holds nothing")
        if name == "Optional":
            return self.join(self.read_type(inner), {"type": "null"}, node)
        if name == "Literal":
            values = [_literal(each) for each in parts]
            is_text = all(isinstance(value, str) for value in values)
            return {"type": "string", "enum": values} if is_text else {"enum": values}
        if name in LISTS:
            return {"type": "array", "items": self.read_type(parts[0])}
        if name == "Annotated":
            subschema = self.read_type(parts[0])
            for part in parts[1:]:
                for each in part.keywords if isinstance(part, ast.Call) else []:
                    self.read_argument(each, subschema)
            return subschema
        raise _error(node, f"{name}[...] is no type that a record can have")

    def join(self, left: Schema, right: Schema, node: ast.expr) -> Schema:
        if right == {"type": "null"} and isinstance(left.get("type"), str) and "enum" not in left:
            return {**left, "type": [left["type"], "null"]}
        return {"anyOf": [left, right]}


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _parse_type(text: str, node: ast.expr) -> ast.expr:
    """The type in a text, with the line that the text stands in."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except UNREADABLE as error:
        raise _error(node, f"`{text[:60]}` is no type: {getattr(error, 'msg', error)}") from error
    for each in ast.walk(parsed):
        ast.copy_location(each, node)
    return parsed


def _literal(node: ast.expr) -> Any:
    """A value that JSON has, too."""
    try:
        value = ast.literal_eval(node)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise _error(node, f"`{ast.unparse(node)}` must be a plain value") from error
    return value


def _error(node: ast.AST, message: str) -> CodeError:
    return CodeError(f"line {getattr(node, 'lineno', '?')}: {message}")
