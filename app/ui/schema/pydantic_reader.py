"""Pydantic classes as a JSON Schema, read from the syntax tree: what a person types here never runs."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from app.extraction import Schema
from app.ui.schema.pydantic_code import (
    CodeError,
    error_at,
    is_ellipsis,
    parse_classes,
    parse_type,
    quote_code,
    read_literal,
    read_name,
)
from app.ui.schema.pydantic_config import EXTRA, find_config, read_config
from app.ui.schema.pydantic_enum import is_enum, make_choice, read_enum
from app.ui.schema.pydantic_field import FieldDraft, apply_field, apply_mark

SIMPLE: dict[str, Schema] = {
    "str": {"type": "string"}, "int": {"type": "integer"}, "float": {"type": "number"}, "bool": {"type": "boolean"},
    "date": {"type": "string", "format": "date"}, "time": {"type": "string", "format": "time"},
    "datetime": {"type": "string", "format": "date-time"}, "EmailStr": {"type": "string", "format": "email"},
    "AnyUrl": {"type": "string", "format": "uri"}, "HttpUrl": {"type": "string", "format": "uri"},
    "UUID": {"type": "string", "format": "uuid"}, "Decimal": {"type": "number"}, "None": {"type": "null"},
}  # fmt: skip
NULL: Schema = {"type": "null"}
LISTS = ("list", "List", "Sequence")
SETS = ("set", "Set", "frozenset", "FrozenSet")
TUPLES = ("tuple", "Tuple")
MAPPINGS = ("dict", "Dict", "Mapping")
# Each use of a class writes it once more, and a class that uses two others doubles what they hold.
MAX_CLASSES_READ = 2000


def pydantic_to_schema(code: str) -> Schema:
    """The schema of the last class, with the classes that it uses written in place.

    Raises:
        CodeError: no class, or something that has no schema.
    """
    classes = parse_classes(code)
    try:
        return _read_last_class(classes)
    except RecursionError as error:
        raise CodeError("the classes are nested too deeply") from error


def _read_last_class(classes: dict[str, ast.ClassDef]) -> Schema:
    models = [node for node in classes.values() if not is_enum(node)]
    if not models:
        raise CodeError("there is no class yet: write `class Record(BaseModel):` and its fields")
    return _Reader(classes).read_class(models[-1], is_root=True)


@dataclass(slots=True)
class _Model:
    """What a class and its bases say."""

    fields: dict[str, FieldDraft] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class _Reader:
    """Classes by name, and those that are being read: a class inside itself has no form here."""

    def __init__(self, classes: dict[str, ast.ClassDef]) -> None:
        self.classes = classes
        self.open: list[str] = []
        self.num_read = 0

    def read_class(self, node: ast.ClassDef, is_root: bool = False) -> Schema:
        model = self.read_model(node)
        schema: Schema = {"title": model.config.get("title") or node.name} if is_root else {}
        description = ast.get_docstring(node)
        if description:
            schema["description"] = description
        schema |= {"type": "object", "properties": {}}
        required = []
        for name, draft in model.fields.items():
            name = name if draft.alias is None else draft.alias
            if name in schema["properties"]:
                raise error_at(node, f"two fields of {node.name} are called {name!r}")
            schema["properties"][name] = draft.schema
            if not draft.has_default:
                required.append(name)
        if required:
            schema["required"] = required
        # As a person who writes a class means it; `extra="allow"` or "ignore" says otherwise.
        others = EXTRA[model.config.get("extra", "forbid")]
        if others is not None:
            schema["additionalProperties"] = others
        return schema

    def read_model(self, node: ast.ClassDef) -> _Model:
        """Fields and configuration of a class, put together in the order in which Pydantic does it."""
        self.num_read += 1
        if self.num_read > MAX_CLASSES_READ:
            raise error_at(node, "the classes are too large when each is written where it is used")
        if node.name in self.open:
            raise error_at(node, f"{node.name} contains itself; write such a schema as JSON")
        self.open.append(node.name)
        bases = self.read_bases(node)
        model = _Model()
        for base in bases:
            model.config |= base.config
        model.config |= read_config(node)
        for base in reversed(bases):
            model.fields |= base.fields
        for statement in node.body:
            self.read_statement(statement, model)
        self.open.pop()
        return model

    def read_bases(self, node: ast.ClassDef) -> list[_Model]:
        models = []
        for base in node.bases:
            found = self.classes.get(base.id) if isinstance(base, ast.Name) else None
            if found is not None and not is_enum(found):
                models.append(self.read_model(found))
            elif found is not None or read_name(base) != "BaseModel":
                raise error_at(base, f"the base class {quote_code(base)} is not known here")
        return models

    def read_statement(self, statement: ast.stmt, model: _Model) -> None:
        if find_config(statement) is not None:
            return
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                if name.startswith("_"):
                    raise error_at(statement, f"{name} is no field: its name begins with an underscore")
                draft = self.read_marked(annotation)
                self.read_value(value, draft)
                model.fields[name] = draft
            case _:
                raise error_at(statement, f"{quote_code(statement)} is no field")

    def read_value(self, value: ast.expr | None, draft: FieldDraft) -> None:
        """Take in what stands behind `=`."""
        if isinstance(value, ast.Call) and read_name(value.func) == "Field":
            apply_field(value, draft)
        elif value is not None and not is_ellipsis(value):
            draft.has_default = True

    def read_marked(self, annotation: ast.expr) -> FieldDraft:
        """A type with the marks that `Annotated` puts behind it, the innermost first."""
        match annotation:
            case ast.Constant(value=str() as text):
                return self.read_marked(parse_type(text, annotation))
            case ast.Subscript(value=generic, slice=ast.Tuple(elts=[inner, *marks])) if (
                read_name(generic) == "Annotated"
            ):
                draft = self.read_marked(inner)
                for mark in marks:
                    apply_mark(mark, draft)
                return draft
        return FieldDraft(self.read_type(annotation))

    def read_type(self, node: ast.expr) -> Schema:
        match node:
            case ast.Constant(value=None):
                return dict(NULL)
            case ast.Constant(value=str() as text):
                return self.read_type(parse_type(text, node))
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return self.read_named(name, node)
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return self.join(self.read_type(left), self.read_type(right))
            case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
                return self.read_generic(name, inner, node)
        raise error_at(node, f"{quote_code(node)} is no type that a record can have")

    def read_named(self, name: str, node: ast.expr) -> Schema:
        if name in SIMPLE:
            return dict(SIMPLE[name])
        found = self.classes.get(name)
        if found is None:
            raise error_at(node, f"the type {name} is not known here")
        return read_enum(found) if is_enum(found) else self.read_class(found)

    def read_generic(self, name: str, inner: ast.expr, node: ast.expr) -> Schema:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if not parts:
            raise error_at(node, f"{name}[()] holds nothing")
        if name == "Literal":
            return make_choice([read_literal(each) for each in parts])
        if name in TUPLES:
            return self.read_tuple(parts)
        if name == "Annotated" and len(parts) > 1:
            draft = self.read_marked(node)
            if draft.has_default or draft.alias is not None:
                raise error_at(node, "a default or an alias belongs to a field, not to a type inside one")
            return draft.schema
        if len(parts) == 1 and name == "Optional":
            return self.join(self.read_type(inner), dict(NULL))
        if name == "Union":
            return reduce(self.join, [self.read_type(part) for part in parts])
        if len(parts) == 2 and name in MAPPINGS and read_name(parts[0]) == "str":
            return {"type": "object", "additionalProperties": self.read_type(parts[1])}
        if len(parts) == 1 and name in (*LISTS, *SETS):
            items = {"type": "array", "items": self.read_type(parts[0])}
            return items | {"uniqueItems": True} if name in SETS else items
        raise error_at(node, f"{quote_code(node)} is no type that a record can have")

    def read_tuple(self, parts: list[ast.expr]) -> Schema:
        if len(parts) == 2 and is_ellipsis(parts[1]):
            return {"type": "array", "items": self.read_type(parts[0])}
        items = [self.read_type(part) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}

    def join(self, left: Schema, right: Schema) -> Schema:
        if left == NULL:
            left, right = right, left
        if right == NULL and isinstance(left.get("type"), str) and "enum" not in left:
            return {**left, "type": [left["type"], "null"]}
        options = [
            each for side in (left, right) for each in (side["anyOf"] if side.keys() == {"anyOf"} else [side])
        ]
        return {"anyOf": options}
