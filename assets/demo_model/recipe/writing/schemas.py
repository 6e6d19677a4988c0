"""The eight fixed schemas and random variations of a schema together with its record."""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from .drafts import Record
from .phrases import capitalize, chance
from .tables import read_sections

SCHEMAS = Path(__file__).parents[3] / "schemas"

Schema = dict[str, Any]


@cache
def _read_schema(kind: str) -> str:
    return (SCHEMAS / f"{kind}.json").read_text(encoding="utf-8")


def load_schema(kind: str) -> Schema:
    """A fresh copy of one of the schemas in `assets/schemas`."""
    schema: Schema = json.loads(_read_schema(kind))
    return schema


@cache
def renames(kind: str) -> dict[str, tuple[str, ...]]:
    pairs = (line.split(": ", 1) for line in read_sections("renames")[kind])
    return {name: tuple(others.split(", ")) for name, others in pairs}


def make_object(properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def to_camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(capitalize(part) for part in rest)


def vary(kind: str, record: Record, rng: Random, full_share: float = 0.4) -> tuple[Schema, Record]:
    """The kind's schema as it is, or renamed, reordered, cut down, with fewer words, and the record to match."""
    schema = load_schema(kind)
    if chance(rng, 0.75):
        del schema["$schema"]
    if chance(rng, full_share):
        return schema, record
    fields: Schema = schema["properties"]
    names = list(record)
    if chance(rng, 0.4):
        names = [name for name in names if chance(rng, 0.6)] or [rng.choice(names)]
    if chance(rng, 0.3):
        rng.shuffle(names)
    labels = (
        {name: rename(kind, name, rng) if chance(rng, 0.5) else name for name in names}
        if chance(rng, 0.4)
        else {}
    )
    if not labels or len(set(labels.values())) < len(labels):
        labels = {name: name for name in names}
    if chance(rng, 0.1):
        labels = {name: to_camel(label) for name, label in labels.items()}
    described = chance(rng, 0.3)
    properties = {labels[name]: loosen(fields[name], described, rng) for name in names}
    return dress(kind, properties, rng), {labels[name]: record[name] for name in names}


def rename(kind: str, name: str, rng: Random) -> str:
    return rng.choice(renames(kind)[name])


def loosen(field: Schema, described: bool, rng: Random) -> Schema:
    """A field with or without its description, in one of the ways to write the same type."""
    field = dict(field)
    if not described:
        field.pop("description", None)
    if "anyOf" in field and chance(rng, 0.5):
        kinds = [option["type"] for option in field.pop("anyOf")]
        field = {"type": kinds, **field}
    if "JPY" in field.get("enum", ()) and chance(rng, 0.6):
        del field["enum"]
    if field.get("type") == "array" and field["items"]["type"] == "object":
        items = {name: loosen(item, described, rng) for name, item in field["items"]["properties"].items()}
        field["items"] = dress("", items, rng)
    return field


def dress(title: str, properties: Schema, rng: Random) -> Schema:
    """An object schema from bare (`properties` alone) to complete."""
    schema = make_object(properties)
    if chance(rng, 0.65):
        schema = {"type": "object", "properties": properties}
    elif chance(rng, 0.3):
        del schema["additionalProperties"]
    if title and chance(rng, 0.3):
        schema = {"title": capitalize(title.replace("_", " ")), **schema}
    return schema
