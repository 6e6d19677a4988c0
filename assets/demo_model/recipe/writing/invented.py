"""Invented schemas: random fields with matching values, so that the model reads a schema and not a habit."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import goods, moments, values
from .documents import Document, layout_form, layout_line, layout_table
from .drafts import Record, say
from .labels import describe, make_adjective, make_deed, make_label, make_plural, make_word, near_name, stem
from .phrases import (
    capitalize,
    chance,
    compose_sentence,
    expand,
    join_bullets,
    join_list,
    make_clause,
    make_sentence,
)
from .schemas import Schema, dress, to_camel
from .tables import read_sections, words

STRING: Schema = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Field:
    """One invented field: its label in words, its schema, its value and how a document writes it."""

    label: str
    schema: Schema
    value: Any
    text: str | None

    @property
    def key(self) -> str:
        return self.label.replace(" ", "_").replace("-", "_")


def string_value(label: str, rng: Random) -> str:
    """A value that suits the label more often than not."""
    last = label.split()[-1]
    makers: list[Callable[[Random], str]] = []
    if last in words("people_labels"):
        makers += [values.person, values.person]
    if last in words("firm_labels"):
        makers.append(values.company)
    if last in words("place_labels"):
        makers += [values.city, values.city, values.place]
    if last in words("code_labels"):
        makers += [values.code, values.code]
    if last in ("address", "street"):
        makers.append(values.street)
    if last in ("title", "headline", "topic", "subject", "category", "genre"):
        makers.append(goods.event_title)
    if last == "phone":
        makers.append(values.phone)
    if last == "email":
        makers.append(lambda r: values.email(r, values.person(r)))
    if not makers or chance(rng, 0.3):
        makers = [
            values.person,
            values.company,
            values.city,
            values.code,
            goods.product,
            values.make_name,
            *[values.ordinary] * 6,
            *OBJECTS,
        ]
    return rng.choice(makers)(rng)


OBJECTS: tuple[Callable[[Random], str], ...] = (
    lambda r: f"{values.make_word(r)} {values.make_word(r)}",
    lambda r: f"{r.choice(words('adjectives'))} {r.choice(words('things'))}",
    lambda r: r.choice(words("adjectives")),
    lambda r: f"{capitalize(r.choice(words('things')))} {values.digits(r, 2)}",
    lambda r: r.choice(words("feature_nouns")),
    lambda r: r.choice(words("ingredients")),
    lambda r: r.choice(words("countries")),
    goods.feature,
    goods.skill,
)


def string_field(label: str, rng: Random) -> Field:
    value = string_value(label, rng)
    return Field(label, dict(STRING), value, value)


def nullable_field(label: str, rng: Random) -> Field:
    schema: Schema = {"type": ["string", "null"]}
    if chance(rng, 0.5):
        schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    if chance(rng, 0.5):
        return Field(label, schema, None, None)
    value = string_value(label, rng)
    return Field(label, schema, value, value)


def number_field(label: str, rng: Random) -> Field:
    value = goods.as_number(
        round(rng.uniform(0, rng.choice([10, 100, 1000, 5000])), rng.choice([0, 1, 1, 2]))
    )
    written = f"{value:,}" if chance(rng, 0.3) else str(value)
    unit = expand("{||| kg| m| km| °C| W| bar| litres| EUR| mg| ml|%| hours| cm}", rng)
    return Field(label, {"type": "number"}, value, written + unit)


def integer_field(label: str, rng: Random) -> Field:
    value = rng.choice([rng.randrange(0, 60), rng.randrange(0, 60), rng.randrange(0, 5000)])
    if "year" in label:
        value = rng.randrange(1900, 2030)
    return Field(label, {"type": "integer"}, value, values.count_word(rng, value))


def boolean_field(label: str, rng: Random, value: bool | None = None) -> Field:
    value = chance(rng, 0.5) if value is None else value
    text = rng.choice(
        ["yes", "true", "Yes", "y", "on", "✓", "YES"]
        if value
        else ["no", "false", "No", "n", "off", "not", "NO"]
    )
    return Field(label, {"type": "boolean"}, value, text)


def date_field(label: str, rng: Random) -> Field:
    iso, written = moments.calendar_date(rng)
    schema: Schema = {"type": "string", "format": "date"}
    if chance(rng, 0.2):
        schema = {"type": "string", "description": f"{capitalize(label)}, YYYY-MM-DD"}
    return Field(label, schema, iso, written)


def time_field(label: str, rng: Random) -> Field:
    value, written = moments.clock_time(rng)
    return Field(label, {"type": "string", "description": "HH:MM"}, value, written)


def doer_field(label: str, rng: Random) -> Field:
    value = rng.choice([values.person, values.person, values.first_name, values.company])(rng)
    return Field(label, dict(STRING), value, value)


def list_field(label: str, rng: Random) -> Field:
    makers: list[Callable[[Random], str]] = [
        values.make_word,
        goods.skill,
        goods.feature,
        values.first_name,
        values.person,
    ]
    makers += [
        lambda r: r.choice(words("adjectives")),
        lambda r: r.choice(words("things")),
        lambda r: r.choice(words("ingredients")),
    ]
    maker = makers[-1] if label.endswith(("ingredients", "toppings")) else rng.choice(makers)
    items = values.unique(maker, rng.choice([1, 2, 3, 3, 4, 5]), rng)
    text = "\n" + join_bullets(items, rng) if chance(rng, 0.12) else join_list(items, rng)
    return Field(label, {"type": "array", "items": dict(STRING)}, items, text)


def enum_field(label: str, rng: Random) -> Field:
    known = rng.choice(words("invented_enums"))
    label, options = known.split(": ")[0], known.split(": ")[1].split("/")
    if chance(rng, 0.4):
        options = values.unique(
            lambda r: r.choice(words("adjectives") + words("things")), rng.choice([2, 3, 4]), rng
        )
    value = rng.choice(options)
    text = value if chance(rng, 0.8) else rng.choice([value.upper(), capitalize(value)])
    return Field(label, {"type": "string", "enum": options}, value, text)


# How often, the labels of a list and the labels of any words, and what makes the field.
FIELD_MAKERS: tuple[tuple[int, str, Callable[[Random], str], Callable[[str, Random], Field]], ...] = (
    (9, "invented_strings", make_label, string_field),
    (3, "invented_numbers", make_label, number_field),
    (3, "invented_integers", make_plural, integer_field),
    (2, "invented_booleans", make_adjective, boolean_field),
    (2, "invented_dates", make_label, date_field),
    (1, "invented_times", make_label, time_field),
    (2, "invented_lists", make_plural, list_field),
    (2, "invented_strings", make_label, enum_field),
    (2, "invented_strings", make_label, nullable_field),
    (2, "", make_deed, doer_field),
)
OPEN_SHARE = 0.25  # of the documents whose labels are any words of the language
KIND_SHARE = 0.5  # of their labels that end with the name of a kind of thing


def make_field(taken: set[str], rng: Random, is_open: bool) -> Field:
    """A field whose label is new to the record; of any words, none of them may be in another label."""
    while True:
        weights = [weight for weight, *_ in FIELD_MAKERS]
        _, pool, make, maker = rng.choices(FIELD_MAKERS, weights=weights)[0]
        if not pool:
            label = make(rng)
        elif is_open:
            # A last word that says what kind of thing it is keeps kinds of values and words together.
            label = f"{make_word(rng)} {rng.choice(words(pool))}" if chance(rng, KIND_SHARE) else make(rng)
        else:
            label = rng.choice(words(pool))
            if chance(rng, 0.45):
                label = f"{rng.choice(words('invented_owners'))} {label}"
            elif chance(rng, 0.08):
                label = f"{values.make_word(rng, 2)} {label}"
        field = maker(label, rng)
        found = stem(field.label) if is_open else {field.key}
        if not found & taken:
            taken |= found
            return field


def say_field(field: Field, rng: Random) -> str:
    """One sentence that states the field."""
    style = "any"
    if field.text is None:
        style = "absent"
    elif isinstance(field.value, bool):
        style = "yes" if field.value else "no"
    elif field.label.endswith(" by") or chance(rng, 0.55):
        style = find_style(field)
    slots = {
        "label": field.label,
        "deed": field.label.removesuffix(" by"),
        "text": field.text,
        "c": make_clause(rng),
        "other": values.person(rng) if style in ("person", "deed") else values.ordinary(rng),
        "lower": rng.randrange(1, 900),
    }
    return compose_sentence(rng.choice(read_sections("statements")[style]), rng, slots)


def find_style(field: Field) -> str:
    """The section of `statements.txt` that suits the kind of value."""
    kind = field.schema.get("type")
    if field.label.endswith(" by"):
        return "deed"
    if kind in ("integer", "number"):
        return str(kind)
    if kind == "array":
        return "list"
    if "enum" in field.schema:
        return "enum"
    if field.text != field.value:
        return "date"
    return "person" if isinstance(field.value, str) and is_name(field.value) else "any"


def is_name(text: str) -> bool:
    """Whether a text is written as names are: two words or more, capitals ahead."""
    return len(text.split()) > 1 and text.istitle()


def write_fields(fields: list[Field], rng: Random) -> str:
    """All known fields as a form, a table, a line or as sentences, in random order."""
    known = [field for field in fields if field.text is not None]
    rng.shuffle(known)
    rows = [(field.label, str(field.text)) for field in known]
    is_short = all("\n" not in text for _, text in rows)
    draw = rng.random()
    if draw < 0.12 and is_short:
        text = layout_table(rows, rng)
    elif draw < 0.36 and is_short:
        text = layout_line(rows, rng)
    elif draw < 0.6:
        rows += [
            (field.label, say("absent", rng)) for field in fields if field.text is None and chance(rng, 0.25)
        ]
        text = layout_form(rows, rng, shuffle=False)
    else:
        said = known + [field for field in fields if field.text is None and chance(rng, 0.3)]
        sentences = [say_field(field, rng) for field in said]
        for _ in range(rng.choice([0, 0, 1, 2])):
            sentences.insert(rng.randrange(len(sentences) + 1), make_sentence(rng))
        text = rng.choice([" ", " ", "\n"]).join(sentences)
    if chance(rng, 0.3):
        text = f"{say('record_title', rng)} {rng.choice([values.code, values.person, values.make_name])(rng)}\n{text}"
    return text


def name_keys(fields: list[Field], spare: list[Field], rng: Random) -> tuple[Schema, Record]:
    """Properties and record under keys in one of several styles; opaque keys come with a description.

    In some records the keys are only near to the labels, but never as near to another one, be it asked for or spare.
    """
    style, opaque, described, is_near = rng.random(), chance(rng, 0.15), chance(rng, 0.35), chance(rng, 0.5)
    properties: Schema = {}
    record: Record = {}
    for number, field in enumerate(fields, 1):
        others = {word for other in fields + spare if other is not field for word in stem(other.label)}
        label = _near_label(field, others, rng) if is_near and chance(rng, 0.7) else field.label
        key = label.replace(" ", "_").replace("-", "_")
        if key in properties or stem(label) & stem(field.label) & others:
            key = field.key
        if style > 0.94:
            key = label if key not in properties else field.label
        elif style > 0.72:
            key = to_camel(key) if style < 0.86 else key.replace("_", "-")
        schema = dict(field.schema)
        if opaque:
            key = f"{rng.choice(['f', 'x', 'field', 'col', 'q'])}{number}"
        if opaque or described:
            form = schema.get("description", "")
            if form in ("", "HH:MM"):
                schema["description"] = describe(field.label, rng) + (form and f", {form}")
        properties[key], record[key] = schema, field.value
    return properties, record


def _near_label(field: Field, others: set[str], rng: Random) -> str:
    """Another name of the field; whether something is so is asked for by its word; a measure also by its unit."""
    if isinstance(field.value, bool):
        return f"is {field.label}" if chance(rng, 0.6) else field.label
    unit = re.search("[a-z]+$", field.text or "") if field.schema.get("type") == "number" else None
    if unit and chance(rng, 0.5):
        return f"{field.label} {rng.choice(['', 'in '])}{unit.group()}"
    return near_name(field.label, others, rng)


def invent(rng: Random, most: int = 7) -> tuple[Document, Schema]:
    """A document with made-up fields, some of them asked for, and the schema that asks."""
    taken: set[str] = set()
    count = min(most, rng.choice([2, 3, 3, 4, 4, 5, 6, 7]))
    is_open = chance(rng, OPEN_SHARE)
    fields = [make_field(taken, rng, is_open) for _ in range(count)]
    spare = [make_field(taken, rng, is_open) for _ in range(rng.choice([0, 0, 1, 2, 3, 4]))]
    text = write_fields(fields + spare, rng)
    properties, record = name_keys(fields, spare, rng)
    schema = dress("record", properties, rng)
    if chance(rng, 0.12):
        schema, record = _nest(schema, record, rng)
    return Document("invented", text, record), schema


def _nest(schema: Schema, record: Record, rng: Random) -> tuple[Schema, Record]:
    """Move the last fields into an inner object."""
    keys = list(record)
    inner = keys[len(keys) // 2 :]
    name = rng.choice(["details", "info", "data", "extra", "meta"])
    fields = schema["properties"]
    outer: Schema = {key: fields[key] for key in keys if key not in inner}
    outer[name] = dress("", {key: fields[key] for key in inner}, rng)
    values_in = {key: record[key] for key in inner}
    return dress("record", outer, rng), {key: record[key] for key in keys if key not in inner} | {
        name: values_in
    }
