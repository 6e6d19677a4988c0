"""The small worlds of the demo model's recipe: what a record holds stands in its document."""

import re
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from assets.demo_model.recipe.writing.phrases import SLOT
from assets.demo_model.recipe.writing.scenes import make_parts, play, write_statement
from assets.demo_model.recipe.writing.schemas import Schema
from assets.demo_model.recipe.writing.tables import read_worlds
from assets.demo_model.recipe.writing.truths import state_truth

REWRITTEN = re.compile(r"\d\d:\d\d|\d{4}-\d\d-\d\d")  # times and dates take one form in a record


def test_documents_hold_every_free_string_of_their_record() -> None:
    rng = Random(17)
    for _ in range(1500):
        documents, schema = play(rng, rng.randrange(1, 5))
        for document in documents:
            jsonschema_rs.validate(schema, document.record)
            for value in list_free_strings(document.record, schema):
                assert value in document.text, (value, document.text)


def test_a_statement_holds_every_known_value_and_nothing_of_the_other_fields() -> None:
    rng, num_left_out = Random(31), 0
    for lines in read_worlds().values():
        telling = write_statement(make_parts(lines, rng), rng)
        texts = [" ".join(part.slots.values()) for part in telling.parts]
        for i, part in enumerate(telling.parts):
            if isinstance(part.value, str) and len(part.value) > 8 and "enum" not in part.schema:
                text = part.slots[part.names[0]]
                is_written = i in telling.known or any(text in texts[k] for k in telling.known)
                assert (text in telling.text) is is_written, telling.text
                num_left_out += not is_written
    assert num_left_out > 50


def test_a_statement_of_yes_or_no_names_its_thing_and_says_both_equally_often() -> None:
    rng, texts = Random(37), {True: set(), False: set()}
    for _ in range(4000):
        truth = state_truth(rng)
        texts[truth.value].add(truth.text)
        assert not re.search("[<>{}|]", truth.text + " ".join(truth.descriptions + truth.names))
        things = set.intersection(*(set(name.split("_")) for name in truth.names))
        assert things and all(thing in truth.text.lower() for thing in things), truth
    assert not texts[True] & texts[False]
    assert all(len(found) > 1200 for found in texts.values())


def test_documents_of_one_scene_share_a_schema_and_differ() -> None:
    rng, several = Random(23), 0
    for _ in range(300):
        documents, _ = play(rng, 4)
        assert len({document.text for document in documents}) == len(documents) <= 4
        several += len(documents) > 1
    assert several > 150


@pytest.mark.parametrize("world", read_worlds())
def test_every_field_of_a_world_is_written_by_one_of_its_documents(world: str) -> None:
    lines = read_worlds()[world]
    fields = {line.split(": ", 1)[0].split("|")[0] for line in lines if not line.startswith("> ")}
    documents = [line for line in lines if line.startswith("> ")]
    slots = {slot for line in documents for slot in SLOT.findall(line)}
    written = slots | {slot.removesuffix("_lines") for slot in slots}  # a list written as bullets
    assert len(documents) >= 2
    assert fields <= written, f"never written: {fields - written}"


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
