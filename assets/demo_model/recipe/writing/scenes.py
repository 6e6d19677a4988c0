"""Small worlds: records of everyday life (a booking, a match, a flat) whose fields go by several names."""

import json
from dataclasses import dataclass, replace
from random import Random

from . import values
from .documents import Document
from .drafts import Record, make_distractors
from .invented import Field, boolean_field, write_fields
from .parts import PLAIN_SHARE, Part, make_part
from .phrases import SLOT, capitalize, chance, compose, expand
from .schemas import Schema, dress, to_camel
from .tables import read_worlds
from .truths import Question, answer_question, pose_question

TRUTH_SHARES = (0.6, 0.2, 0.15, 0.05)  # of the documents with 0, 1, 2 and 3 statements of yes or no beside
FORM_SHARE = 0.35  # of the documents that state field after field under labels
ABSENT_SHARE = 0.7  # of the fields a text does not state that are asked for all the same
NULLABLE_SHARES = (0.0, 0.05, 0.1, 0.35)  # of the fields that it states: one of these for each schema


@dataclass(frozen=True, slots=True)
class Telling:
    """One document of a scene: its fields, its text, and which fields (by index) it states or has no value for.

    The others are `absent`: the text says nothing of them.
    """

    parts: list[Part]
    text: str
    known: list[int]
    absent: list[int]


def tell(lines: tuple[str, ...], questions: list[Question], rng: Random) -> Telling:
    """A document of the scene of these lines, with fresh values: one of its templates, or a plain statement.

    The answers to the questions are stated beside.
    """
    if chance(rng, FORM_SHARE):
        return write_statement(make_parts(lines, questions, rng), rng)
    while True:
        parts = make_parts(lines, questions, rng)
        distractors = make_distractors(rng)
        slots = dict(distractors)
        for part in parts:
            # A distractor must not stand in for a field of its name that is absent.
            slots.pop(part.names[0], None)
            slots |= part.slots
        template = expand(rng.choice([line[2:] for line in lines if line.startswith("> ")]), rng)
        template = _add_truths(template, parts, rng)
        said = set(SLOT.findall(template))
        if said <= slots.keys():
            break
    known = [i for i, part in enumerate(parts) if part.value is None or said & part.slots.keys()]
    mistakable = {word for name in said & distractors.keys() for word in name.split("_")}
    absent = [
        i
        for i, part in enumerate(parts)
        if i not in known and not mistakable & {word for name in part.names for word in name.split("_")}
    ]
    return Telling(parts, compose(template, rng, slots), known, absent)


def make_parts(lines: tuple[str, ...], questions: list[Question], rng: Random) -> list[Part]:
    """The fields of the scene, and those that the questions ask for."""
    parts = [make_part(line, rng) for line in lines if not line.startswith("> ")]
    for question in questions:
        value, text = answer_question(question, rng)
        slots = {question.names[0]: text}
        parts.append(Part(question.names, {"type": "boolean"}, value, slots, question.descriptions, True))
    return parts


def pose_questions(lines: tuple[str, ...], rng: Random) -> list[Question]:
    """Perhaps some things that may be so in any scene, under names that this one has not taken."""
    taken = {name for line in lines if not line.startswith("> ") for name in line.split(": ")[0].split("|")}
    questions = []
    for _ in range(rng.choices(range(len(TRUTH_SHARES)), TRUTH_SHARES)[0]):
        question = pose_question(rng)
        if not taken & set(question.names):
            taken |= set(question.names)
            questions.append(question)
    return questions


def _add_truths(template: str, parts: list[Part], rng: Random) -> str:
    """Put the statements that the template knows nothing of before or behind it."""
    for part in parts:
        if part.is_statement:
            joint, slot = rng.choice([" ", " ", "\n"]), f"<{part.names[0]}>"
            template = f"{slot}{joint}{template}" if chance(rng, 0.3) else f"{template}{joint}{slot}"
    return template


def write_statement(parts: list[Part], rng: Random) -> Telling:
    """A form, or sentences that name one field each: labels and keys are two names of one thing."""
    parts = [_put_plainly(part, rng) for part in parts]
    said = [part for part in parts if chance(rng, 0.85)] or parts[:2]
    known = [i for i, part in enumerate(parts) if part in said]
    absent = [i for i, part in enumerate(parts) if part not in said]
    # The text names some of the absent ones as absent.
    denied = [replace(parts[i], value=None, slots={}) for i in absent if chance(rng, 0.3)]
    text = write_fields([label_part(part, rng) for part in said + denied], rng)
    return Telling(parts, text, known, absent)


def _put_plainly(part: Part, rng: Random) -> Part:
    """Beside a label any words can be a value: it is not to be known by its looks alone."""
    if part.schema != {"type": "string"} or not chance(rng, PLAIN_SHARE):
        return part
    value = values.ordinary(rng)
    return replace(part, value=value, slots={part.names[0]: value})


def label_part(part: Part, rng: Random) -> Field:
    """The field as a form has it: one of its names in words, or its description, beside the value."""
    name, text = rng.choice(part.names).replace("_", " "), part.slots.get(part.names[0])
    name = name.removeprefix("is ")
    if isinstance(part.value, bool) and chance(rng, 0.5):
        return replace(boolean_field(name, rng, part.value), schema=part.schema)
    if part.descriptions and not isinstance(part.value, bool) and chance(rng, 0.2):
        described = expand(rng.choice(part.descriptions), rng).removesuffix(", HH:MM")
        name = described[0].lower() + described[1:]
    return Field(name, part.schema, part.value, text)


def play(rng: Random, num_documents: int = 1) -> tuple[list[Document], Schema]:
    """Documents of a random scene, at least one, and a schema that asks for some of its fields.

    It may ask for what the text does not say; the answer is null then, and it is allowed for other fields too.
    """
    lines = rng.choice(list(read_worlds().values()))
    questions = pose_questions(lines, rng)
    tellings = [tell(lines, questions, rng) for _ in range(num_documents)]
    first, share = tellings[0], rng.choice(NULLABLE_SHARES)
    asked = [i for i in first.known if chance(rng, 0.85)] or first.known[:2]
    nullable = {i for i in asked if chance(rng, share)}
    absent = [i for i in first.absent if chance(rng, ABSENT_SHARE)]
    asked, nullable = sorted(asked + absent), nullable | set(absent)
    if chance(rng, 0.3):
        rng.shuffle(asked)
    tellings = [
        telling
        for telling in tellings
        if all(i in telling.known or (i in nullable and i in telling.absent) for i in asked)
    ]
    properties = _name([first.parts[i] for i in asked], [i in nullable for i in asked], rng)
    flat = dress("record", properties, rng)
    nested, seed = chance(rng, 0.2) and len(asked) > 3, rng.random()
    schema, documents = flat, []
    for telling in tellings:
        values_asked = [telling.parts[i].value if i in telling.known else None for i in asked]
        record: Record = dict(zip(properties, values_asked, strict=True))
        if nested:
            schema, record = nest(flat, record, Random(seed))
        documents.append(Document("scene", telling.text, record))
    return documents, schema


def allow_null(schema: Schema, rng: Random) -> Schema:
    """The schema of the field, or null, in one of the ways to write it."""
    if "null" in json.dumps(schema):
        return schema
    schema = dict(schema)
    description = {"description": schema.pop("description")} if "description" in schema else {}
    if "enum" not in schema and chance(rng, 0.5):
        return {**schema, "type": [schema["type"], "null"], **description}
    return {"anyOf": [schema, {"type": "null"}], **description}


def _name(parts: list[Part], nullable: list[bool], rng: Random) -> Schema:
    """Properties under one of the names of each field; the nullable ones also take null."""
    properties: Schema = {}
    style, described = rng.random(), chance(rng, 0.3)
    for number, (part, is_nullable) in enumerate(zip(parts, nullable, strict=True), 1):
        key = rng.choice(part.names)
        key = key if key not in properties else part.names[0]
        schema = dict(part.schema)
        if described or style < 0.06:
            form = schema.get("description")
            schema["description"] = _describe(part, rng) + (f", {form}" if form else "")
        if style < 0.06:
            key = f"{rng.choice('abcfqx')}{number}"
        elif style < 0.2:
            key = to_camel(key)
        elif style < 0.24:
            key = key.upper()
        elif style < 0.27:
            key = key.replace("_", "-")
        properties[key] = allow_null(schema, rng) if is_nullable else schema
    return properties


def _describe(part: Part, rng: Random) -> str:
    if part.descriptions and chance(rng, 0.7):
        return expand(rng.choice(part.descriptions), rng)
    return capitalize(rng.choice(part.names).replace("_", " "))


def nest(schema: Schema, record: Record, rng: Random) -> tuple[Schema, Record]:
    """Move some neighbouring fields into an inner object."""
    keys = list(record)
    start = rng.randrange(len(keys) - 1)
    inner = keys[start : start + rng.choice([2, 2, 3])]
    name = rng.choice(["details", "info", "data", "extra", "meta", "who", "where", "facts", "main", "basics"])
    fields, properties, nested = schema["properties"], {}, {}
    for key in keys:
        if key == inner[0]:
            properties[name] = dress("", {k: fields[k] for k in inner}, rng)
            nested[name] = {k: record[k] for k in inner}
        if key not in inner:
            properties[key], nested[key] = fields[key], record[key]
    return dress("record", properties, rng), nested
