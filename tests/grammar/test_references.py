"""References, and definitions and places that nothing satisfies."""

import json

import pytest

from grammar import GrammarSpec, InvalidGrammar, SchemaValidator, UnsupportedGrammar
from grammar.schema.reader import read_schema
from tests.grammar.vocabularies import check_refusal, check_texts, check_verdicts

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
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
    {"$id": "urn:a:b", "$ref": "urn:a:b#/components/x", "components": {"x": X}},
    {"$ref": "urn:y#/components/x", "$defs": {"y": {"$id": "urn:y", "components": {"x": X}}}},
    {"$ref": "urn:y", "$defs": {"y": {"$id": "urn:y", "$ref": "#/$defs/x", "$defs": {"x": X}}}},
    {"$ref": "#x", "$defs": {"y": {"$anchor": "x", "allOf": [X]}}},
    {"$ref": "#x", "$schema": DRAFT_7, "definitions": {"y": {"$id": "#x", "allOf": [X]}}},
    {"$ref": "#/definitions/x", "$id": "urn:y", "$schema": DRAFT_7, "definitions": {"x": X}},
    {"$ref": "#/components/x", "$schema": DRAFT_7, "components": {"x": {"$id": "#x", "allOf": [X]}}},
    {"$ref": "#/components/a b", "components": {"a b": X}},
    {"$ref": "#/components/Größe", "components": {"Größe": X}},
    {"$ref": "#/components/100%25", "components": {"100%": X}},
]


def put(schema, place, part):
    return json.loads(json.dumps(schema).replace(json.dumps(place), json.dumps(part)))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["$ref"])
@pytest.mark.parametrize(("target", "good", "bad"), TARGETS)
def test_what_a_reference_reaches_is_read_as_in_place(byte_compiler, document, target, good, bad):
    document = put(document, X, target)
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


@pytest.mark.parametrize("identifier", ["a b", "é", "http://[/x", "1:x"])
def test_an_identifier_that_no_validator_reads_is_refused_with_its_place(byte_compiler, identifier):
    schema = {"properties": {"a": {"$id": identifier, "type": "integer"}}}
    with pytest.raises(InvalidGrammar) as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer == "/properties/a"


@pytest.mark.parametrize("malformed", [{"type": 5, "not": {}}, {"not": {"anyOf": 1}}, {"enum": 1}, {"pattern": 1}])
def test_what_only_a_reference_reaches_is_well_formed_too(byte_compiler, malformed):
    schema = {"$ref": "#/components/x", "components": {"x": {"items": malformed}}}
    with pytest.raises(InvalidGrammar, match="malformed") as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer.startswith("/components/x/items/")


def test_a_chain_of_references_is_longer_than_python_recurses():
    schemas = {str(i): {"allOf": [{"$ref": f"#/{i + 1}"}]} for i in range(2_000)}
    ended = {"$ref": "#/0", **schemas, "2000": {"type": "null"}}
    assert read_schema(ended, json.dumps(ended)).keywords
    looped = {"$ref": "#/0", **schemas, "2000": {"$ref": "#/1"}}
    with pytest.raises(UnsupportedGrammar, match="refers back to itself"):
        read_schema(looped, json.dumps(looped))


A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
# Definitions of a, with b = a; each with the place of a reference in the loop.
LOOPS = [
    (A, "/$defs/a"), ({"title": "a", **B}, "/$defs/b"), ({"allOf": [A]}, "/$defs/a/allOf/0"),
    ({"anyOf": [A, {"oneOf": [A, B]}]}, "/$defs/a/anyOf/0"),
    ({"allOf": [{}, {"allOf": [{"title": "a", **A}, True]}]}, "/$defs/a/allOf/1/allOf/0"),
]


@pytest.mark.parametrize(("first", "pointer"), LOOPS)
def test_references_that_lead_only_to_each_other_are_refused_where_they_stand(byte_compiler, first, pointer):
    """They may be read as anything: a validator takes all values for valid, and an engine finds none to write."""
    shared = {"a": first, "b": A}
    schema = {"type": "object", "properties": {"x": B}, "$defs": shared}
    with pytest.raises(UnsupportedGrammar, match="refers back to itself") as caught:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert caught.value.keyword == "$ref"
    assert caught.value.pointer in (pointer, "/$defs/b")
    shared["a"] = {"anyOf": [first, {"type": "null"}]}
    assert byte_compiler.compile(GrammarSpec.json_schema(schema)).backend == "llguidance"


@pytest.mark.parametrize(
    "first",
    [{"allOf": [A, {"type": "null"}]}, {"type": "null", "anyOf": [A]}, {"anyOf": [{"allOf": [A]}, {"type": "null"}]}],
)
def test_a_loop_beside_something_that_is_asserted_is_read_as_that(byte_compiler, first):
    schema = {"type": "object", "properties": {"x": A}, "$defs": {"a": first}}
    check_texts(byte_compiler, schema, ['{"x": null}'], ['{"x": 1}'])


INTEGER = {"type": "integer"}
# Nothing satisfies N; A and B contradict each other.
NOTHINGS = [
    False, {"enum": []}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "string", "minLength": 3, "maxLength": 1}, {"$ref": "#/$defs/F"},
    {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    {"type": "object", "properties": {"f": {"$ref": "#/$defs/F"}}, "required": ["f"]},
]
OTHERS = {"F": False, "A": {"type": "string"}, "B": {"type": "integer"}}
REF = {"$ref": "#/$defs/N"}
# With {"$ref": "#/$defs/N"} or N itself at the place of REF.
AROUND = [
    ({"type": "object", "properties": {"a": INTEGER, "x": REF}}, '{"a": 1}', '{"a": 1, "x": 1}'),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": REF}, '{"a": 1}', '{"a": 1, "x": 1}'),
    ({"type": "array", "items": REF}, "[]", "[1]"),
    ({"anyOf": [REF, {"type": "object", "properties": {"a": INTEGER}}]}, '{"a": 1}', '{"a": "x"}'),
    ({"type": "object", "properties": {"x": {"anyOf": [REF, {"type": "string"}]}}}, '{"x": "s"}', '{"x": 1}'),
    ({"type": "object", "properties": {"x": {"not": {"const": "t"}, "anyOf": [REF, {"type": "string"}]}}},
     '{"x": "s"}', '{"x": "t"}'),
]  # fmt: skip


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("is_inline", [False, True])
@pytest.mark.parametrize("nothing", NOTHINGS, ids=str)
@pytest.mark.parametrize(("around", "good", "bad"), AROUND)
def test_what_nothing_satisfies_may_stay_away(byte_compiler, around, good, bad, nothing, is_inline, order):
    schema = {**put(around, REF, nothing if is_inline else REF), "$defs": {"N": nothing, **OTHERS}}
    spec = GrammarSpec.json_schema(schema, property_order=order)
    check_texts(byte_compiler, spec, [good], [bad])


@pytest.mark.parametrize("name", ["const", "enum", "properties", "$defs"])
def test_a_property_may_have_the_name_of_a_keyword(byte_compiler, name):
    schema = {"properties": {name: REF, "b": INTEGER}, "$defs": {"N": {"allOf": [INTEGER, {"type": "null"}]}}}
    check_texts(byte_compiler, schema, ['{"b": 1}'], [f'{{"{name}": 1}}'])


# Nothing satisfies N, which is an integer and a D; something satisfies D, or only an N that it needs would.
@pytest.mark.parametrize(
    "others",
    [
        {"D": {"type": "object", "required": ["a"], "properties": {"b": {"$ref": "#/$defs/D"}}}},
        {"D": {"type": "object", "required": ["a"], "properties": {"a": REF}}},
        {"D": {"$ref": "#/$defs/E"}, "E": {"type": "object", "properties": {"e": {"$ref": "#/$defs/E"}}}},
        {"D": {"type": "object", "properties": {"a": REF, "d": {"$ref": "#/$defs/D"}}}},
    ],
)
@pytest.mark.parametrize("ref", ["#/$defs/N", "#n"])
def test_definitions_that_wait_for_each_other_are_decided(byte_compiler, others, ref):
    nothing = {"$anchor": "n", "type": "integer", "$ref": "#/$defs/D"}
    schema = {"type": "object", "properties": {"x": {"$ref": ref}}, "$defs": {"N": nothing, **others}}
    check_texts(byte_compiler, schema, ["{}"], ['{"x": 1}'])


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"$ref": "#/$defs/N", "$defs": {"N": {"enum": []}}}, "/$defs/N", "enum"),
        ({"type": "object", "properties": {"x": REF}, "required": ["x"], "$defs": {"N": False}}, "", "required"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "", "minLength"),
        ({"type": "array", "minItems": 1, "items": {"enum": []}}, "", "items"),
        ({"anyOf": [{"type": "integer", "minimum": 5, "maximum": 2}]}, "/anyOf/0", "minimum"),
        ({"allOf": [{"allOf": [{"type": "integer"}, {"type": "null"}]}]}, "/allOf/0", "allOf"),
        ({"not": {}}, "", "not"),
        ({"type": "array", "minItems": 1, "items": {"type": "integer", "maximum": 2, "not": {}}}, "/items", "not"),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_its_place(byte_compiler, schema, pointer, keyword):
    with pytest.raises(InvalidGrammar, match=r"no (?:text|value) satisfies the schema") as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer == pointer
    assert f"'{keyword}' at {pointer or '#'}: " in str(refusal.value)


E_COM = "https://e.com/"
INTEGER_PAIR = [{"type": "integer"}, {"type": "string"}]
# Documents that refer to each other, bundled in the definitions of one (compound documents).
BUNDLES = {
    "a part of another document": (
        {"$id": E_COM + "order", "type": "object", "properties": {"c": {"$ref": "customer"}}, "required": ["c"],
         "$defs": {"1": {"$id": E_COM + "customer", "$ref": "address#/$defs/zip"},
                   "2": {"$id": "address", "$defs": {"zip": {"type": "string", "pattern": "^[0-9]$"}}}}},
        '{"c": "1"}', '{"c": "x"}',
    ),
    "documents in a circle": (
        {"$id": E_COM + "tree", "type": "object", "properties": {"k": {"items": {"$ref": "node"}}},
         "additionalProperties": False,
         "$defs": {"n": {"$id": "node", "required": ["t"], "properties": {"t": {"$ref": "tree"}}}}},
        '{"k": [{"t": {"k": []}}]}', '{"k": [{"t": {"x": 1}}]}',
    ),
    "an older draft in a newer one": (
        {"$id": E_COM + "new", "type": "array", "items": {"$ref": "old"},
         "$defs": {"o": {"$schema": DRAFT_7, "$id": E_COM + "old", "items": INTEGER_PAIR, "additionalItems": False}}},
        '[[1, "a"]]', '[["a", 1]]',
    ),
    "a newer draft in an older one": (
        {"$id": E_COM + "old", "$schema": DRAFT_7, "type": "array", "items": {"$ref": "new"},
         "definitions": {"n": {"$schema": DRAFT_2020, "$id": "new", "prefixItems": INTEGER_PAIR, "items": False}}},
        '[[1, "a"]]', '[["a", 1]]',
    ),
    "a dynamic reference out of another document": (
        {"$id": E_COM + "strict", "$ref": "tree", "$dynamicAnchor": "node", "unevaluatedProperties": False,
         "$defs": {"t": {"$id": "tree", "$dynamicAnchor": "node", "type": "object",
                         "properties": {"k": {"items": {"$dynamicRef": "#node"}}}}}},
        '{"k": [{"k": []}]}', '{"k": [{"e": 2}]}',
    ),
}  # fmt: skip


@pytest.mark.parametrize("order", ["schema", "any"])
@pytest.mark.parametrize("name", BUNDLES)
def test_bundled_documents_are_read_each_in_its_draft(byte_compiler, name, order):
    schema, good, bad = BUNDLES[name]
    check_verdicts(byte_compiler, schema, [good], property_order=order)
    check_texts(byte_compiler, GrammarSpec.json_schema(schema, property_order=order), [good], [bad])


def test_a_malformed_document_in_a_bundle_is_refused_with_its_place():
    bundled = {"$schema": DRAFT_7, "$id": E_COM + "old", "items": [1]}
    with pytest.raises(InvalidGrammar, match="malformed at /\\$defs/a/items"):
        GrammarSpec.json_schema({"$defs": {"a": bundled}})


def test_branches_of_one_of_that_refer_to_objects_with_a_discriminator_are_the_engine_s(byte_compiler):
    pets = {
        name: {"type": "object", "properties": {"kind": {"const": name}, more: {"$ref": "#/$defs/pet"}},
               "required": ["kind"], "additionalProperties": False}
        for name, more in (("cat", "friend"), ("dog", "enemy"))
    }  # fmt: skip
    branches = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    compiled = byte_compiler.compile(
        GrammarSpec.json_schema({"$ref": "#/$defs/pet", "$defs": {**pets, "pet": {"oneOf": branches}}})
    )
    assert {entry.enforced_by for entry in compiled.plan} == {"llguidance"}
    for text, is_right in (
        ('{"kind": "cat", "friend": {"kind": "dog"}}', True), ('{"kind": "dog", "friend": {"kind": "dog"}}', False)
    ):  # fmt: skip
        matcher = compiled.matcher()
        assert (all(map(matcher.accept_token, text.encode())) and matcher.is_completed()) == is_right


def test_a_schema_beside_a_reference_to_itself_is_counted_once(byte_compiler):
    schema = {"$ref": "#", "anyOf": [{"type": "integer"}, {"$ref": "#"}], "$defs": {}}
    check_texts(byte_compiler, schema, ["1"], ['"a"'])
    check_texts(byte_compiler, {"$ref": "#", "not": {"type": "string"}}, ["1", "{}"], ['"a"'])
    for references in ({"$ref": "#", "$dynamicRef": "#n"}, {"$dynamicRef": "#n", "$ref": "#"}):
        both = {**references, "$defs": {"n": {"$dynamicAnchor": "n", "type": "integer"}}}
        check_texts(byte_compiler, both, ["1"], ['"a"'])
