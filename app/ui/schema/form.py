"""A JSON Schema as a form and back: what the form cannot show travels along unchanged, so nothing is lost.

schema ──schema_to_form──▶ {"title", "description", "fields": [...], "more": {...}} ──form_to_schema──▶ schema
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.extraction import Schema

Form = dict[str, Any]
Field = dict[str, Any]

# Kind in the form -> its schema.
KINDS: dict[str, Schema] = {
    "text": {"type": "string"}, "whole number": {"type": "integer"}, "number": {"type": "number"},
    "yes or no": {"type": "boolean"}, "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"}, "date and time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email"}, "link": {"type": "string", "format": "uri"},
    "choice": {"type": "string", "enum": []}, "group": {"type": "object", "properties": {}},
}
OTHER = "other"
MAX_DEPTH = 5
# The form goes through the browser, where every number is a double.
MAX_EXACT = 2**53


class NotAForm(ValueError):
    """A schema whose root the form cannot show; the message says why."""


def schema_to_form(schema: Schema) -> Form:
    """The form of a record's schema."""
    if schema.get("type") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise NotAForm("the form shows schemas whose root is an object with properties; edit this one as JSON")
    if _has_inexact(schema):
        raise NotAForm(f"the form would change whole numbers beyond {MAX_EXACT:,}; edit this schema as JSON")
    more = dict(schema)
    form = _take(more, "title", "description")
    form["fields"] = _read_properties(more, depth=0)
    form["more"] = more
    return form


def form_to_schema(form: Mapping[str, Any]) -> Schema:
    """The schema of a form.

    Raises ValueError: a field without a name, or two of the same name; the message names it.
    """
    more = dict(form.get("more") or {})
    schema: Schema = {name: more.pop(name) for name in ("$schema", "$id") if name in more}
    schema.update({name: form[name] for name in ("title", "description") if form.get(name)})
    schema["type"] = "object"
    _write_properties(schema, form["fields"], "")
    more.pop("type", None)
    return {**schema, **more}


def _has_inexact(schema: Schema) -> bool:
    """Return whether a whole number in a schema is beyond those that a double holds one by one."""
    found: list[Any] = [schema]
    while found:
        value = found.pop()
        if isinstance(value, dict):
            found += value.values()
        elif isinstance(value, list):
            found += value
        elif isinstance(value, int) and abs(value) > MAX_EXACT:
            return True
    return False


def _read_properties(more: Schema, depth: int) -> list[Field]:
    """Take properties and required out of an object's schema."""
    properties = more.pop("properties", {})
    required = more.get("required", [])
    if not isinstance(required, list):
        required = []
    elif all(name in list(properties) for name in required):
        more.pop("required", None)
    return [
        {"name": name, "required": name in required, **_read_field(subschema, depth)}
        for name, subschema in properties.items()
    ]


def _read_field(subschema: Any, depth: int) -> Field:
    other: Field = {"kind": OTHER, "raw": subschema, "many": False, "nullable": False}
    if not isinstance(subschema, dict) or depth >= MAX_DEPTH:
        return other
    rest = dict(subschema)
    description = rest.pop("description", "")
    style = "type"
    if _is_any_of_null(rest):
        rest, style = {**rest["anyOf"][0], "type": [rest["anyOf"][0]["type"], "null"]}, "anyOf"
    is_many = rest.get("type") == "array" and isinstance(rest.get("items"), dict)
    item = dict(rest.pop("items")) if is_many else rest
    if is_many and _is_nullable(item):
        return other
    nullable = not is_many and _is_nullable(item)
    if nullable:
        item["type"] = item["type"][0]
    field = _read_kind(item, depth)
    if field is None or not isinstance(description, str):
        return other
    field |= {"description": description, "many": is_many, "nullable": nullable, "null_style": style}
    if is_many:
        rest.pop("type")
        field |= {"more": rest, "item_more": field["more"]}
    return field


def _is_nullable(item: Schema) -> bool:
    kinds = item.get("type")
    return isinstance(kinds, list) and len(kinds) == 2 and kinds[1] == "null" and "enum" not in item


def _is_any_of_null(subschema: Schema) -> bool:
    """{"anyOf": [X, null]}, which Pydantic writes; a plain X beside nothing else."""
    match subschema:
        case {"anyOf": [{"type": str() as kind, **first}, {"type": "null"}]}:
            return (
                len(subschema) == 1 and kind not in ("array", "object") and not {"enum", "description"} & set(first)
            )
    return False


def _read_kind(item: Schema, depth: int) -> Field | None:
    """Kind, choices and inner fields of a single value; `more` keeps the keywords that have no place in the form."""
    more = dict(item)
    if more.get("type") == "object":
        if not isinstance(more.get("properties"), dict):
            return None
        fields = _read_properties(more, depth + 1)
        more.pop("type")
        # A new group is closed; one that was read stays as open as it was.
        return {"kind": "group", "fields": fields, "more": more, "open": "additionalProperties" not in more}
    if "enum" in more:
        choices = more.pop("enum")
        if not isinstance(choices, list):
            return None
        is_plain = more.pop("type", None) == "string" and all(isinstance(each, str) for each in choices)
        return {"kind": "choice", "choices": choices, "more": more} if is_plain else None
    for kind, shape in KINDS.items():
        if kind not in ("choice", "group") and all(more.get(name) == shape.get(name) for name in ("type", "format")):
            return {"kind": kind, "more": {name: value for name, value in more.items() if name not in shape}}
    return None


def _write_properties(schema: Schema, fields: list[Field], place: str) -> None:
    names = [str(field.get("name", "")).strip() for field in fields]
    where = f" in {place}" if place else ""
    for name in names:
        if not name:
            raise ValueError(f"a field{where} has no name yet")
        if names.count(name) > 1:
            raise ValueError(f"two fields{where} are called {name!r}")
    schema["properties"] = {name: _write_field(field, name) for name, field in zip(names, fields, strict=True)}
    required = [name for name, field in zip(names, fields, strict=True) if field.get("required")]
    if required:
        schema["required"] = required


def _write_field(field: Field, name: str) -> Schema:
    if field["kind"] == OTHER:
        return field["raw"]
    if field.get("many"):
        item = _write_single(field, field.get("item_more") or {}, name)
        outer: Schema = {"type": "array", "items": item}
    else:
        outer = _write_single(field, {}, name)
    outer |= field.get("more") or {}
    if field.get("nullable") and not field.get("many") and field["kind"] != "choice":
        if field.get("null_style") == "anyOf":
            outer = {"anyOf": [outer, {"type": "null"}]}
        else:
            outer["type"] = [outer["type"], "null"]
    if field.get("description"):
        outer["description"] = field["description"]
    return outer


def _write_single(field: Field, more: Schema, name: str) -> Schema:
    schema = dict(KINDS[field["kind"]])
    if field["kind"] == "choice":
        choices = [choice for choice in field.get("choices") or [] if str(choice).strip()]
        if not choices:
            raise ValueError(f"the choice {name!r} has nothing to choose from yet")
        schema["enum"] = choices
    if field["kind"] == "group":
        fields = field.get("fields") or []
        if not fields:
            raise ValueError(f"the group {name!r} has no fields yet")
        schema.pop("properties")
        _write_properties(schema, fields, name)
        if not field.get("open"):
            schema["additionalProperties"] = False
    return schema | more


def _take(schema: Schema, *names: str) -> Form:
    """Remove the named strings from a schema and return them, "" where there is none. Other values stay."""
    return {name: schema.pop(name) if isinstance(schema.get(name), str) else "" for name in names}
