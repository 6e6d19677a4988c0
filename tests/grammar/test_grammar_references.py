"""References: wherever they lead and however they are written, what they reach is enforced as if it stood in place."""

import json
import sys

import pytest

from grammar import GrammarSpec, InvalidGrammar, SchemaValidator, UnsupportedGrammar
from grammar.json_schema.loops import find_loop
from grammar.json_schema.normalise import normalise
from tests.grammar.vocabularies import check_refusal, check_texts

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
# Each with a text that llguidance alone would let through; over the last it would end the process.
TARGETS = [
    ({"type": "string", "pattern": '^[^"]*$'}, '"ab"', '"a\\"b"'),
    ({"type": "object", "minProperties": 2}, '{"a": 1, "b": 1}', '{"b": 1, "b": 1}'),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.5", "0"),
    ({"type": "array", "uniqueItems": True}, "[1, 2]", "[1, 1]"),
    ({"type": "integer", "minimum": -(2**64), "maximum": -(2**63)}, str(-(2**63)), str(-(2**63) + 1)),
]
# Documents around a target: it takes the place of X.
X = {"const": "X"}
DOCUMENTS = [
    {"$ref": "#/components/x", "components": {"x": X}, "$defs": {"y": {"$id": "urn:y"}}},
    {"$ref": "#/components/x", "components": {"x": X}, "not": {"$id": "y", "const": "none"}},
    {"$id": "http://e.com/r", "$ref": "http://e.com/r#/components/x", "components": {"x": X}},
    {"$id": "http://e.com/d/r.json", "$ref": "r.json#/components/x", "components": {"x": X}},
    {"$id": "r.json", "$ref": "r.json#/components/x", "components": {"x": X}},
    {"$id": "urn:a:b", "$ref": "urn:a:b#/components/x", "components": {"x": X}},
    {"$ref": "urn:y#/components/x", "$defs": {"y": {"$id": "urn:y", "components": {"x": X}}}},
    {"$ref": "urn:y", "$defs": {"y": {"$id": "urn:y", "$ref": "#/$defs/x", "$defs": {"x": X}}}},
    {"$ref": "#x", "$defs": {"y": {"$anchor": "x", "allOf": [X]}}},
    {"$ref": "#x", "$schema": DRAFT_7, "definitions": {"y": {"$id": "#x", "allOf": [X]}}},
    {"$ref": "#/definitions/x", "$id": "urn:y", "$schema": DRAFT_7, "definitions": {"x": X}},
    {"$ref": "#/components/x", "$schema": DRAFT_7, "components": {"x": {"$id": "#x", "allOf": [X]}}},
    {"$ref": "#/components/a%20b", "components": {"a b": X}},
    {"$ref": "#/components/a b", "components": {"a b": X}},
    {"$ref": "#/components/Größe", "components": {"Größe": X}},
    {"$ref": "#/components/100%25", "components": {"100%": X}},
]


def put(document, target):
    """Put a schema in the place of X."""
    return json.loads(json.dumps(document).replace(json.dumps(X), json.dumps(target)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["$ref"])
@pytest.mark.parametrize(("target", "good", "bad"), TARGETS)
def test_what_a_reference_reaches_is_read_as_in_place(byte_compiler, document, target, good, bad):
    document = put(document, target)
    found = {problem.keyword for problem in normalise(put(document, target)).problems}
    # Before anything is compiled: an engine could end the process.
    assert found - {"not"} == {problem.keyword for problem in normalise(dict(target)).problems}
    validator = SchemaValidator(document)
    assert validator.is_valid(json.loads(good)) and not validator.is_valid(json.loads(bad))
    check_texts(byte_compiler, document, [good], [bad])


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"$ref": "http://e.com/r"}, ""),
        ({"items": {"$ref": "#name"}, "components": {"x": {"$anchor": "name"}}}, "/items"),
        ({"items": {"$ref": "urn:x"}, "components": {"x": {"$id": "urn:x"}}}, "/items"),
        ({"$ref": "urn:x", "$defs": {"a": {"$id": "urn:x"}, "b": {"$id": "urn:x"}}}, ""),
        ({"$ref": "urn:x#n", "$defs": {"a": {"$id": "urn:x", "$anchor": "n"}, "b": {"$id": "urn:x"}}}, ""),
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}}, ""),
        ({"$ref": "http://[", "$id": "http://e.com/r"}, ""),
        ({"$schema": DRAFT_7, "$ref": "#x", "definitions": {"x": {"$anchor": "x"}}}, ""),
    ],
)
def test_a_reference_to_what_is_not_named_once_within_the_schema_is_refused(byte_compiler, schema, pointer):
    check_refusal(byte_compiler, schema, pointer, "$ref")


def test_an_identifier_beside_a_reference_means_nothing_in_an_old_draft(byte_compiler):
    inner = {"$id": "http://e.com/other", "$ref": "#/definitions/x"}
    schema = {"$schema": DRAFT_7, "items": inner, "definitions": {"x": {"type": "integer"}}}
    check_texts(byte_compiler, schema, ["[1]"], ['["x"]'])


@pytest.mark.parametrize("identifier", ["a b", "é", "http://[/x", "1:x"])
def test_an_identifier_that_no_validator_reads_is_refused_with_its_place(byte_compiler, identifier):
    schema = {"properties": {"a": {"$id": identifier, "type": "integer"}}}
    with pytest.raises(InvalidGrammar) as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer == "/properties/a"


@pytest.mark.parametrize(
    "malformed", [{"type": 5, "not": {}}, {"not": {"anyOf": 1}}, {"enum": 1}, {"pattern": 1}]
)
def test_what_only_a_reference_reaches_is_well_formed_too(byte_compiler, malformed):
    schema = {"$ref": "#/components/x", "components": {"x": {"items": malformed}}}
    with pytest.raises(InvalidGrammar, match="malformed") as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer.startswith("/components/x/items/")


def test_a_value_that_looks_like_a_reference_stays_a_value(byte_compiler):
    schema = {"const": {"$ref": "#/a b"}}
    check_texts(byte_compiler, schema, ['{"$ref": "#/a b"}'])
    assert SchemaValidator(schema).is_valid({"$ref": "#/a b"})


def count_calls(function, *arguments):
    """Return how many calls of functions a call takes: as many on every machine."""
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return num_calls


def refer(num_properties):
    properties = {f"r{i}": {"$ref": "#/$defs/x"} for i in range(num_properties)}
    properties |= {f"f{i}": {"format": "x"} for i in range(num_properties)}
    normalise({"properties": properties, "$defs": {"x": {}}})


def follow(num_schemas):
    schemas = {str(i): {"allOf": [{"$ref": f"#/{i + 1}"}]} for i in range(num_schemas)}
    assert find_loop({"$ref": "#/0", **schemas, str(num_schemas): {"type": "null"}}) is None
    assert find_loop({"$ref": "#/0", **schemas, str(num_schemas): {"$ref": "#/1"}}) is not None


@pytest.mark.parametrize("use", [refer, follow])
def test_the_work_for_references_grows_with_their_number(use):
    assert count_calls(use, 2_000) < 5 * count_calls(use, 500)


def test_a_chain_of_references_is_longer_than_python_recurses():
    follow(5_000)


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
# Of a, which b is; each with the place of a reference on the way round.
LOOPS = [
    (A, "/$defs/a"),
    ({"title": "a", **B}, "/$defs/b"),
    ({"allOf": [A]}, "/$defs/a/allOf/0"),
    ({"anyOf": [A, {"oneOf": [A, B]}]}, "/$defs/a/anyOf/0"),
    ({"allOf": [{}, {"allOf": [{"title": "a", **A}, True]}]}, "/$defs/a/allOf/1/allOf/0"),
]


@pytest.mark.parametrize(("first", "pointer"), LOOPS)
def test_references_that_lead_only_to_each_other_are_refused_where_they_stand(byte_compiler, first, pointer):
    """They may be read as anything: a validator takes all values for valid, and an engine finds none to write."""
    shared = {"a": first, "b": A}
    schema = {"type": "object", "properties": {"x": B}, "$defs": shared}
    with pytest.raises(UnsupportedGrammar, match="leads back to itself") as caught:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert caught.value.keyword == "$ref"
    assert caught.value.pointer in (pointer, "/$defs/b")
    shared["a"] = {"anyOf": [first, {"type": "null"}]}
    assert byte_compiler.compile(GrammarSpec.json_schema(schema)).backend == "llguidance"


@pytest.mark.parametrize(
    "first",
    [
        {"allOf": [A, {"type": "null"}]},
        {"type": "null", "anyOf": [A]},
        {"anyOf": [{"allOf": [A]}, {"type": "null"}]},
    ],
)
def test_a_loop_beside_something_that_is_asserted_is_read_as_that(byte_compiler, first):
    schema = {"type": "object", "properties": {"x": A}, "$defs": {"a": first}}
    check_texts(byte_compiler, schema, ['{"x": null}'], ['{"x": 1}'])
