"""A JSON Schema as Pydantic classes: source code to copy into a program."""

from __future__ import annotations

import json
import keyword
import re
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
SILENT = {
    "type",
    "format",
    "description",
    "enum",
    "items",
    "properties",
    "required",
    "title",
    "additionalProperties",
}


class NotAClass(ValueError):
    """A schema that has no faithful Pydantic class; the message names keyword and place."""


def schema_to_pydantic(schema: Schema) -> str:
    """The classes of a schema, the record's last.

    Raises:
        NotAClass: a keyword that a class cannot say.
    """
    return _Writer().write(schema)


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
        if "additionalProperties" not in schema or schema["additionalProperties"] is False:
            # Pydantic's own default is "ignore"; said, because here a class that says nothing is read as closed.
            others = "forbid" if "additionalProperties" in schema else "ignore"
            self.imported.add("ConfigDict")
            lines += [f'    model_config = ConfigDict(extra="{others}")', ""]
        else:
            raise NotAClass(f"additionalProperties at {pointer or 'the root'} has no form in a class")
        required = schema.get("required", [])
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
        kind = self.make_type(subschema, where, field)
        arguments = [
            f"{argument}={value!r}" if argument != "description" else f"description={_quote(value)}"
            for argument, value in self.list_arguments(subschema)
        ]
        if not is_required:
            arguments.insert(0, "default=None")
        if not arguments:
            return f"{field}: {kind}"
        # Through Field the default needs no `| None`: a field that may be left out need not take null.
        if arguments == ["default=None"] and kind.endswith("| None"):
            return f"{field}: {kind} = None"
        self.imported.add("Field")
        return f"{field}: {kind} = Field({', '.join(arguments)})"

    def list_arguments(self, subschema: Schema) -> list[tuple[str, Any]]:
        found = [(CONSTRAINTS[name], value) for name, value in subschema.items() if name in CONSTRAINTS]
        if isinstance(subschema.get("description"), str):
            found.append(("description", subschema["description"]))
        return found

    def make_type(self, subschema: Schema, pointer: str, field: str) -> str:
        kinds = subschema.get("type")
        if isinstance(kinds, list):
            parts = [self.make_type({**subschema, "type": kind}, pointer, field) for kind in kinds]
            return " | ".join(parts)
        if kinds is None and isinstance(subschema.get("anyOf"), list):
            _refuse_unknown(subschema, {"anyOf", "description", "title"}, pointer)
            choices = enumerate(subschema["anyOf"])
            return " | ".join(self.make_type(each, f"{pointer}/anyOf/{at}", field) for at, each in choices)
        if kinds == "object":
            if not isinstance(subschema.get("properties"), dict):
                raise NotAClass(f"the object at {pointer} has no properties")
            return self.make_class(subschema, str(subschema.get("title") or field), pointer)
        _refuse_unknown(subschema, SILENT | set(CONSTRAINTS), pointer)
        if "enum" in subschema:
            self.imported.add("Literal")
            return f"Literal[{', '.join(_quote(value) for value in subschema['enum'])}]"
        if kinds == "array":
            items = subschema.get("items")
            if not isinstance(items, dict):
                raise NotAClass(f"the list at {pointer} does not say what its items are")
            if set(items) & set(CONSTRAINTS):
                raise NotAClass(f"limits on the items of the list at {pointer} have no short form in a class")
            singular = re.sub(r"s$", "", field) if len(field) > 3 else field
            return f"list[{self.make_type(items, pointer + '/items', singular)}]"
        if kinds == "string" and "format" in subschema:
            name = FORMATS.get(subschema["format"])
            if name is None:
                raise NotAClass(f"format {subschema['format']!r} at {pointer} has no type here")
            self.imported.add(name.split(".")[0])
            return name
        if kinds not in TYPES:
            raise NotAClass(f"the type at {pointer} is {kinds!r}")
        return TYPES[kinds]

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


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace('"', "'")


def _quote(value: Any) -> str:
    # JSON's quotes are Python's, too; its true, false and null are not.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
