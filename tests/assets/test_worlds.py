"""The small worlds of the demo model's recipe: what a record holds stands in its document."""

import re
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from assets.demo_model.recipe.writing.phrases import SLOT
from assets.demo_model.recipe.writing.scenes import play, tell
from assets.demo_model.recipe.writing.schemas import Schema
from assets.demo_model.recipe.writing.tables import read_sections, read_worlds
from assets.demo_model.recipe.writing.truths import FAMILIES, answer_question, pose_question

REWRITTEN = re.compile(r"\d\d:\d\d|\d{4}-\d\d-\d\d")  # times and dates take one form in a record


def test_documents_hold_every_free_string_of_their_record() -> None:
    rng = Random(17)
    for _ in range(200):
        documents, schema = play(rng, rng.randrange(1, 5))
        for document in documents:
            jsonschema_rs.validate(schema, document.record)
            for value in list_free_strings(document.record, schema):
                assert value in document.text, (value, document.text)


@pytest.mark.parametrize("num_questions", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_document_holds_every_known_value_and_nothing_of_the_absent_fields(num_questions: int) -> None:
    rng, num_known, num_absent = Random(31), 0, 0
    for lines in read_worlds().values():
        telling = tell(lines, [pose_question(rng) for _ in range(num_questions)], rng)
        assert not set(telling.known) & set(telling.absent)
        known = [text for i in telling.known for text in telling.parts[i].slots.values()]
        for i, part in enumerate(telling.parts):
            if isinstance(part.value, str) and len(part.value) > 8 and "enum" not in part.schema:
                text = part.slots[part.names[0]]
                is_shared = any(text in other for other in known if other != text)
                num_known += i in telling.known
                num_absent += i in telling.absent
                assert i not in telling.absent or text not in telling.text or is_shared, telling.text
                assert i not in telling.known or text.lower() in telling.text.lower(), telling.text
    assert num_known > 2000
    assert num_absent > 200


@pytest.mark.soak
def test_a_field_may_be_null_when_its_text_is_silent_and_when_it_is_not() -> None:
    rng, counts = Random(41), Counter[tuple[str, bool]]()
    for _ in range(800):
        documents, schema = play(rng, rng.randrange(1, 5))
        for document in documents:
            counts.update(list_nullable(document.record, schema))
    for kind in ("string", "boolean", "integer", "number", "date", "enum", "array"):
        share = counts[kind, True] / (counts[kind, True] + counts[kind, False])
        assert 0.2 < share < 0.6, (kind, share)


@pytest.mark.soak
def test_every_document_behind_one_schema_answers_its_questions() -> None:
    rng, num_answers = Random(43), 0
    things = {
        re.sub("[^a-z]+", "_", thing.strip().lower()): thing.strip().lower()
        for family in FAMILIES
        for line in read_sections("truths")[family]
        for thing in line.split(",")
    }
    own = {name for lines in read_worlds().values() for name in list_names(lines)}
    for _ in range(200):
        documents, schema = play(rng, 4)
        for key in schema["properties"]:
            asked = [thing for name, thing in things.items() if f"_{name}_" in f"_{key}_"]
            for document in documents if asked and key not in own else []:
                if document.record[key] is not None:
                    num_answers += 1
                    text = document.text.lower().replace("'", " ")
                    assert any(thing.replace("'", " ") in text for thing in asked), (key, text)
    assert num_answers > 60


def test_a_statement_of_yes_or_no_names_its_thing_and_says_both_equally_often() -> None:
    rng, texts = Random(37), {True: set(), False: set()}
    for _ in range(4000):
        question = pose_question(rng)
        value, text = answer_question(question, rng)
        texts[value].add(text)
        assert not re.search("[<>{}|]", text + " ".join(question.descriptions + question.names))
        things = set.intersection(*(set(name.split("_")) for name in question.names))
        assert things and all(thing in text.lower() for thing in things), question
    assert not texts[True] & texts[False]
    assert all(len(found) > 1200 for found in texts.values())


@pytest.mark.soak
def test_documents_of_one_scene_share_a_schema_and_differ() -> None:
    rng, several = Random(23), 0
    for _ in range(300):
        documents, _ = play(rng, 4)
        assert len({document.text for document in documents}) == len(documents) <= 4
        several += len(documents) > 1
    assert several > 150


def test_every_field_of_a_world_is_written_by_one_of_its_documents() -> None:
    for world, lines in read_worlds().items():
        fields = {line.split(": ", 1)[0].split("|")[0] for line in lines if not line.startswith("> ")}
        documents = [line for line in lines if line.startswith("> ")]
        slots = {slot for line in documents for slot in SLOT.findall(line)}
        written = slots | {slot.removesuffix("_lines") for slot in slots}  # a list written as bullets
        assert len(documents) >= 2, world
        assert fields <= written, (world, fields - written)


def list_names(lines: tuple[str, ...]) -> list[str]:
    """All names of the fields of a world."""
    return [name for line in lines if not line.startswith("> ") for name in line.split(": ")[0].split("|")]


def list_nullable(record: Schema, schema: Schema) -> Iterator[tuple[str, bool]]:
    """The kind of each field that may be null, and whether it is."""
    for name, field in schema["properties"].items():
        if field.get("type") == "object":
            yield from list_nullable(record[name], field)
        kinds = [option.get("type") for option in field.get("anyOf", ())] or field["type"]
        if "null" in kinds:
            inner = next((option for option in field.get("anyOf", ())), field)
            yield inner.get("format") or ("enum" if "enum" in inner else kinds[0]), record[name] is None


def list_free_strings(value: Any, schema: Schema) -> Iterator[str]:
    """The strings of a record that are copied: neither chosen from a list nor rewritten."""
    schema = next((s for s in schema.get("anyOf", ()) if s.get("type") != "null"), schema)
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from list_free_strings(inner, schema["properties"][name])
    elif isinstance(value, list):
        for item in value:
            yield from list_free_strings(item, schema["items"])
    elif isinstance(value, str) and not {"enum", "format"} & schema.keys() and not REWRITTEN.fullmatch(value):
        yield value
