"""A JSON Schema as Pydantic classes: source code to copy into a program."""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Set
from typing import Any

from app.extraction import Schema

# Through their modules: a field may be called `date`, and then `date: date = Field()` means something else.
FORMATS = {
    "date": "dt.date", "time": "dt.time", "date-time": "dt.datetime", "email": "EmailStr", "uri": "AnyUrl",
    "uuid": "uuid.UUID",
}  # fmt: skip
TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
IMPORTS = {"dt": "import datetime as dt", "uuid": "import uuid", "Literal": "from typing import Literal"}
TAKEN = {"str", "int", "float", "bool", "list", "dt", "uuid", "Literal", "Field", "EmailStr", "AnyUrl"}
# Keyword of the schema -> argument of Field.
CONSTRAINTS = {
    "minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt", "multipleOf": "multiple_of",
    "minLength": "min_length", "maxLength": "max_length", "minItems": "min_length", "maxItems": "max_length",
    "pattern": "pattern",
}  # fmt: skip
NUMBER_LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
# The limits that a class can put on a value of each type.
LIMITS = {
    "string": {"minLength", "maxLength", "pattern"}, "integer": NUMBER_LIMITS, "number": NUMBER_LIMITS,
    "array": {"minItems", "maxItems"},
}  # fmt: skip
# Pydantic's regular expressions have neither these nor references to groups.
LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
OTHERS = {False: "forbid", True: "allow"}
SILENT = {
    "type", "format", "description", "enum", "items", "properties", "required", "title", "additionalProperties",
}  # fmt: skip


class NotAClass(ValueError):
    """A schema that has no faithful Pydantic class; the message names keyword and place."""


def schema_to_pydantic(schema: Schema) -> str:
    """Return the source of a schema's classes, the record's last.

    Raises:
        NotAClass: a keyword that a class cannot say.
    """
    try:
        return _Writer().write(schema)
    except RecursionError as error:
        raise NotAClass("the schema is nested too deeply") from error


class _Writer:
    """Classes and imports as they are found to be needed."""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.names: set[str] = set()
        self.imported: set[str] = set()

    def write(self, schema: Schema) -> str:
        if schema.get("type") != "object" or "properties" not in schema:
            raise NotAClass("a class stands for an object with properties; this root is none")
        self.make_class(
            schema, str(schema.get("title") or "Record"), "", extra={"$schema", "$id", "$comment"}
        )
        standard = [line for name, line in IMPORTS.items() if name in self.imported]
        third = sorted({"BaseModel"} | (self.imported & {"ConfigDict", "Field", "EmailStr", "AnyUrl"}))
        head = [*standard, *([""] if standard else []), f"from pydantic import {', '.join(third)}"]
        return "\n".join(head) + "\n\n\n" + "\n\n\n".join(self.classes) + "\n"

    def make_class(self, schema: Schema, title: str, pointer: str, extra: Set[str] = frozenset()) -> str:
        name = self.pick_name(title)
        lines = [f"class {name}(BaseModel):"]
        if isinstance(schema.get("description"), str):
            lines += [f'    """{_one_line(schema["description"])}"""', ""]
        _refuse_unknown(schema, SILENT | extra, pointer)
        if not isinstance(schema.get("additionalProperties", False), bool):
            raise NotAClass(f"additionalProperties at {pointer or 'the root'} has no form in a class")
        # Pydantic's default, "ignore", is written out as well: the reader sees that further fields are dropped.
        others = OTHERS[schema["additionalProperties"]] if "additionalProperties" in schema else "ignore"
        self.imported.add("ConfigDict")
        lines += [f'    model_config = ConfigDict(extra="{others}")', ""]
        required = _list_required(schema, pointer)
        for field, subschema in schema["properties"].items():
            lines.append("    " + self.make_field(field, subschema, field in required, pointer))
        if not schema["properties"]:
            lines.append("    pass")
        self.classes.append("\n".join(lines))
        return name

    def make_field(self, field: str, subschema: Any, is_required: bool, pointer: str) -> str:
        where = f"{pointer}/properties/{field}"
        if (
            not field.isidentifier()
            or keyword.iskeyword(field)
            or field.startswith(("_", "model_"))
            or field in TAKEN
        ):
            raise NotAClass(f"{field!r} is no name for an attribute here")
        if not isinstance(subschema, dict):
            raise NotAClass(f"the schema at {where} is no object")
        subschema = _join_null(subschema)
        kind = self.make_type(subschema, where, field)
        arguments = _list_arguments(subschema, where)
        if not is_required:
            arguments.insert(0, "default=None")
        if not arguments:
            return f"{field}: {kind}"
        # Through Field the default needs no `| None`: a field that may be left out need not take null.
        if arguments == ["default=None"] and kind.endswith("| None"):
            return f"{field}: {kind} = None"
        self.imported.add("Field")
        return f"{field}: {kind} = Field({', '.join(arguments)})"

    def make_type(self, subschema: Schema, pointer: str, field: str) -> str:
        kinds = subschema.get("type")
        if isinstance(kinds, list):
            parts = [self.make_type({**subschema, "type": kind}, pointer, field) for kind in kinds]
            return " | ".join(parts)
        if kinds is None and isinstance(subschema.get("anyOf"), list):
            _refuse_unknown(subschema, {"anyOf", "description", "title"}, pointer)
            return " | ".join(
                self.make_part(each, f"{pointer}/anyOf/{at}", field)
                for at, each in enumerate(subschema["anyOf"])
            )
        if kinds == "object":
            if not isinstance(subschema.get("properties"), dict):
                raise NotAClass(f"the object at {pointer} has no properties")
            return self.make_class(subschema, str(subschema.get("title") or field), pointer)
        _refuse_unknown(subschema, SILENT | set(CONSTRAINTS), pointer)
        if "enum" in subschema:
            if not subschema["enum"]:
                raise NotAClass(f"the enum at {pointer} is empty")
            self.imported.add("Literal")
            return f"Literal[{', '.join(_quote(value, pointer) for value in subschema['enum'])}]"
        if kinds == "array":
            items = subschema.get("items")
            if not isinstance(items, dict):
                raise NotAClass(f"the list at {pointer} does not say what its items are")
            singular = re.sub(r"s$", "", field) if len(field) > 3 else field
            return f"list[{self.make_part(items, pointer + '/items', singular)}]"
        if kinds == "string" and "format" in subschema:
            name = FORMATS.get(subschema["format"])
            if name is None:
                raise NotAClass(f"format {subschema['format']!r} at {pointer} has no type here")
            self.imported.add(name.split(".")[0])
            return name
        if kinds not in TYPES:
            raise NotAClass(f"the type at {pointer} is {kinds!r}")
        return TYPES[kinds]

    def make_part(self, subschema: Schema, pointer: str, field: str) -> str:
        """A type inside another: only a whole field has the `Field` that limits are said in."""
        if set(subschema) & set(CONSTRAINTS):
            raise NotAClass(f"limits at {pointer}, inside another type, have no short form in a class")
        return self.make_type(subschema, pointer, field)

    def pick_name(self, title: str) -> str:
        words = re.findall(r"[A-Za-z0-9]+", title)
        base = "".join(word[0].upper() + word[1:] for word in words) or "Record"
        base = base if not base[0].isdigit() else f"Model{base}"
        name, number = base, 2
        while name in self.names:
            name, number = f"{base}{number}", number + 1
        self.names.add(name)
        return name


def _refuse_unknown(subschema: Schema, known: Set[str], pointer: str) -> None:
    for name in subschema:
        if name not in known:
            raise NotAClass(f"{name} at {pointer or 'the root'} has no form in a class")


def _list_required(schema: Schema, pointer: str) -> list[Any]:
    required = schema.get("required", [])
    where = pointer or "the root"
    if not isinstance(required, list):
        raise NotAClass(f"required at {where} is no list")
    for name in required:
        if name not in list(schema["properties"]):
            raise NotAClass(f"required at {where} has {name!r}, which is no property")
    return required


def _join_null(subschema: Schema) -> Schema:
    """{"anyOf": [X, null]}, which Pydantic writes, as one type with null: its limits are the field's then."""
    match subschema.get("anyOf"):
        case [{"type": str() as kind} as first, {"type": "null"} as second] if (
            kind != "null"
            and len(second) == 1
            and "enum" not in first
            and not {"type", *CONSTRAINTS} & {*subschema}
        ):
            rest = {name: value for name, value in subschema.items() if name != "anyOf"}
            return {**first, **rest, "type": [kind, "null"]}
    return subschema


def _list_arguments(subschema: Schema, where: str) -> list[str]:
    """Limits and description as arguments of `Field`."""
    limits = {name: value for name, value in subschema.items() if name in CONSTRAINTS}
    kind = _find_kind(subschema)
    for name, value in limits.items():
        if name not in LIMITS.get(kind, ()):
            raise NotAClass(f"{name} at {where} has no form in a class for {kind}")
        if not _is_usable(name, value, is_whole=kind == "integer"):
            raise NotAClass(f"{name} at {where} is {value!r}, which no class can say")
    found = [f"{CONSTRAINTS[name]}={value!r}" for name, value in limits.items()]
    if isinstance(subschema.get("description"), str):
        found.append(f"description={_quote(subschema['description'], where)}")
    return found


def _find_kind(subschema: Schema) -> str:
    """Return the type that limits apply to: the one type beside null, or words for a schema that takes no limits."""
    kinds = subschema.get("type")
    named = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    if "enum" in subschema:
        return "an enum"
    if named == ["string"] and "format" in subschema:
        return f"the format {subschema['format']}"
    return str(named[0]) if len(named) == 1 else "more than one type"


def _is_usable(name: str, value: Any, is_whole: bool) -> bool:
    """Return whether Pydantic takes the value of this limit."""
    if name == "pattern":
        return isinstance(value, str) and not LOOK_AROUND.search(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name not in NUMBER_LIMITS:
        return isinstance(value, int) and value >= 0
    is_whole_value = isinstance(value, int) or value.is_integer()
    is_in_range = is_whole_value if is_whole else abs(value) <= sys.float_info.max
    return is_in_range and (name != "multipleOf" or value > 0)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', "'")


def _quote(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise NotAClass(f"{value!r} at {where} is no value that a class can say") from error
    # JSON's quotes are Python's, too; its true, false and null are not.
    return text if isinstance(value, str) else repr(value)
