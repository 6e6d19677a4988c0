"""Grounded strings: parts of a source text, from border to border of its words."""

import json
import random
import re

import pytest

from grammar import GrammarSpec, InvalidGrammar, PlanEntry, UnsupportedGrammar
from tests.grammar.vocabularies import accepts, allowed_tokens, check_refusal, check_texts, walk

SOURCE = 'The "old" house\n\tof é-tudes, C:\\dir  (ab_c 12.5)\u0001 naïve 日本語 x\u0301y.\x7f  '
GROUNDED = {"type": "string", "x-grounded": True}
RECORD = {
    "type": "object",
    "properties": {
        "name": GROUNDED, "note": {"anyOf": [{**GROUNDED, "maxLength": 9}, {"type": "null"}]},
        "tags": {"type": "array", "items": {**GROUNDED, "minLength": 4}, "maxItems": 3},
        "free": {"type": "string", "maxLength": 5},
    },
    "required": ["name", "note", "tags", "free"],
    "additionalProperties": False,
}


def is_quotation(part, source, least=0, most=10**6):
    """Look at every place of the source, character by character."""
    if not part:
        return least == 0
    if part[0].isspace() or part[-1].isspace() or not least <= len(part) <= most:
        return False
    if re.search("[\x00-\x07\x0b\x0e-\x1f\x7f]", part):
        return False
    places = (i for i in range(len(source)) if source.startswith(part, i))
    return any(is_border(source, i) and is_border(source, i + len(part)) for i in places)


def is_border(source, place):
    if place in (0, len(source)):
        return True
    return not all(re.fullmatch("[\\w\u0301]", c) and c not in "日本語" for c in source[place - 1 : place + 1])


def spell(part):
    return json.dumps(part, ensure_ascii=False).replace("\x7f", "\\u007f")


@pytest.mark.parametrize(("least", "most"), [(0, 10**6), (2, 7), (5, 5)])
def test_exactly_the_parts_between_word_borders_are_accepted(byte_compiler, least, most):
    schema = {**GROUNDED, "minLength": least, "maxLength": most}
    compiled = byte_compiler.compile(GrammarSpec.json_schema(schema, source=SOURCE))
    parts = {SOURCE[i:j] for i in range(len(SOURCE)) for j in range(i, min(i + 14, len(SOURCE)) + 1)}
    verdicts = {
        part: accepts(compiled.matcher(), byte_compiler.vocabulary, spell(part))
        for part in [*parts, SOURCE.strip()]
    }
    assert verdicts == {part: is_quotation(part, SOURCE, least, most) for part in verdicts}
    assert {True, False} == set(verdicts.values())


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_quotation_ends_before_a_control_character_without_a_short_escape(byte_compiler, is_closed):
    schema = {"type": "object", "properties": {"a": GROUNDED}, "additionalProperties": not is_closed}
    compiled = byte_compiler.compile(GrammarSpec.json_schema(schema, source="one \x1b two\tthree"))
    for text, ways in [("one", '"'), ("two", '"\\'), ("two\\t", "t")]:
        matcher = compiled.matcher()
        assert all(map(matcher.accept_token, f'{{"a": "{text}'.encode()))
        assert "".join(map(chr, allowed_tokens(matcher, byte_compiler.vocabulary))) == ways


@pytest.mark.parametrize("whitespace", ["spaced", "compact", "any"])
def test_every_walk_ends_with_parts_of_the_source(merged_compiler, whitespace):
    compiled = merged_compiler.compile(GrammarSpec.json_schema(RECORD, whitespace, source=SOURCE))
    assert PlanEntry("/properties/note/anyOf/0", "x-grounded", "grounding") in compiled.plan
    num_parts = 0
    for seed in range(60):
        # Only what is allowed counts here: no steering to the end, and never a state without a way on.
        text = walk(compiled.matcher(), merged_compiler.vocabulary, random.Random(seed), num_free=10_000)
        record = json.loads(text)
        assert is_quotation(record["name"], SOURCE)
        assert record["note"] is None or is_quotation(record["note"], SOURCE, most=9)
        assert all(is_quotation(tag, SOURCE, least=4) for tag in record["tags"])
        num_parts += len(record["tags"])
    assert num_parts > 20


def test_quotations_and_residual_checks_work_together(byte_compiler):
    schema = {"type": "array", "items": GROUNDED, "uniqueItems": True}
    matcher = byte_compiler.compile(GrammarSpec.json_schema(schema, source="to be or not to be")).matcher()
    assert all(map(matcher.accept_token, b'["to be", "to be'))
    assert not matcher.accept_token(ord('"'))
    assert all(map(matcher.accept_token, b' or", "not"]'))
    assert matcher.is_completed()


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"properties": {"a": {"not": GROUNDED}}}, "/properties/a/not", "x-grounded"),
        ({"anyOf": [GROUNDED, {"type": "string", "maxLength": 3}]}, "/anyOf/0", "x-grounded"),
        ({"anyOf": [{"x-grounded": True}, {"type": "string"}]}, "/anyOf/0", "x-grounded"),
        ({"patternProperties": {"a": GROUNDED}}, "/patternProperties/a", "x-grounded"),
        ({"propertyNames": GROUNDED}, "/propertyNames", "x-grounded"),
        ({"if": {}, "then": {"items": GROUNDED}}, "/then/items", "x-grounded"),
        ({"anyOf": [{"items": GROUNDED}, {"type": "array"}]}, "/anyOf/0/items", "x-grounded"),
        ({"items": {**GROUNDED, "pattern": "^a"}}, "/items", "pattern"),
        ({**GROUNDED, "allOf": [{"enum": ["a"]}]}, "/allOf/0", "enum"),
    ],
)
def test_an_annotation_that_cannot_be_kept_is_refused(byte_compiler, schema, pointer, keyword):
    check_refusal(byte_compiler, GrammarSpec.json_schema(schema, source="some text"), pointer, keyword)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"v": GROUNDED, "n": {"$ref": "#/$defs/n"}}}}},
        {"allOf": [{"properties": {"v": {"type": "string"}}}, {"properties": {"v": {"x-grounded": True}}}]},
        {"properties": {"v": {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/s"}]}}, "$defs": {"s": GROUNDED}},
        {"properties": {"v": {"type": ["string", "null"], "x-grounded": True}}},
        {"additionalProperties": GROUNDED},
        {"anyOf": [{"type": "object", "properties": {"v": GROUNDED}}, {"type": "array", "items": GROUNDED}]},
    ],
)
def test_an_annotation_is_kept_wherever_it_surely_applies(byte_compiler, schema):
    bad = ['{"v": "tex"}', *(['{"n": {"n": {"v": "tex"}}}'] if "n" in schema.get("$defs", {}) else [])]
    check_texts(byte_compiler, GrammarSpec.json_schema(schema, source="some text"), ['{"v": "text"}'], bad)


def test_without_a_source_it_is_refused(byte_compiler):
    with pytest.raises(UnsupportedGrammar, match="needs a source"):
        byte_compiler.compile(GrammarSpec.json_schema({"items": GROUNDED}))


@pytest.mark.parametrize("source", ["", "  \n", "ab cd"])
def test_a_source_too_short_for_the_schema_is_refused_and_the_empty_string_needs_none(byte_compiler, source):
    with pytest.raises(InvalidGrammar, match="no part of the source has at least 6 characters"):
        byte_compiler.compile(GrammarSpec.json_schema({"items": {**GROUNDED, "minLength": 6}}, source=source))
    check_texts(byte_compiler, GrammarSpec.json_schema(GROUNDED, source=source), ['""'])


def test_a_source_without_annotations_changes_nothing(byte_compiler):
    check_texts(byte_compiler, GrammarSpec.json_schema({"type": "string"}, source="abc"), ['"xyz"'])
