"""JSON schemas: accepted ones, refused ones, and the messages of refusals."""

import json
import math
import re
from contextlib import suppress

import pytest

from grammar import (
    GrammarCompiler,
    GrammarSpec,
    InvalidGrammar,
    PlanEntry,
    SchemaValidator,
    UnsupportedGrammar,
)
from grammar.engines.llguidance_backend import LLGuidanceBackend
from tests.grammar.vocabularies import (
    CLOSED,
    accepts,
    check_refusal,
    check_texts,
    check_verdicts,
    make_byte_vocabulary,
)

TEXT, OPEN = {"type": "string"}, {"type": "object"}
PERSON = {
    **CLOSED, "properties": {"name": TEXT, "tags": {"type": "array", "items": TEXT}}, "required": ["name", "tags"],
}
PERSON_VALUE = {"name": "Zoë", "tags": ["a", "b"]}


def is_accepted(compiler, schema, text, **options):
    compiled = compiler.compile(GrammarSpec.json_schema(schema, **options))
    return accepts(compiled.matcher(), compiler.vocabulary, text)


NULL = {"type": "null"}
BOTH_NULL = {**CLOSED, "properties": {"c": NULL, "d": NULL}, "required": ["c", "d"], "maxProperties": 1}
LEAST, DRAFT_7 = -(2**63), "http://json-schema.org/draft-07/schema#"
PAIR = {"items": [NULL], "additionalItems": False}
REFERRING = {"$ref": "#/definitions/s", "maxLength": 2, "definitions": {"s": TEXT}}
TAKEN = {
    "objects alone": ({"type": "object"}, ["{}", '{"": {"b": [1.5e3, "x", true]}}'], ["[]", "1", '{"a"}', "{a: 1}"]),
    "a reference under a rewritten keyword": (
        {"items": [{"type": "null"}, {"$ref": "#/items/0"}]}, ["[null, null]"], ["[null, 1]"]),
    "anything": (True, ['{"a": [1, null]}'], []),
    "both a format and a pattern": (
        {"type": "string", "format": "date", "pattern": "^2024"}, ['"2024-02-29"'], ['"2023-02-28"', '"2024-02-30"']),
    "formats beside names and keywords that look like one": (
        {**CLOSED, "$id": "urn:x", "nobody": {"format": "date"}, "required": ["format"], "properties": {
            "format": {"type": "string", "format": "date", "example": 1},
            "date": {"format": "int32", "enum": ["date"]}}},
        ['{"format": "2024-02-29", "date": "date"}'], ['{"format": "2023-02-29"}', '{"format": "date"}', "{}"]),
    "engine options inside a schema do not loosen it": (
        {"x-guidance": {"lenient": True, "coerce_one_of": True}, "uniqueItems": True}, ["[1, 2]"], ["[1, 1]"]),
    "references reach places that are no schema keywords": (
        {"$ref": "#/components/x", "components": {"x": PAIR}}, ["[null]"], ["[null, null]", "[1]"]),
    "keywords beside a reference": (REFERRING, ['"ab"'], ['"abc"']),
    "not in an old draft": ({"$schema": DRAFT_7, **REFERRING}, ['"abc"'], []),
    "an identifier beside a reference in an old draft": (
        {"$schema": DRAFT_7, "items": {"$id": "http://e.com/x", "$ref": "#/definitions/x"}, "definitions": {"x": TEXT}},
        ['["x"]'], ["[1]"]),
    "bounds of 64 bits": (
        {"type": "integer", "minimum": LEAST, "maximum": 2**63 - 1}, [str(2**63 - 1), str(LEAST)],
        [str(2**63), str(LEAST - 1)]),
    "a choice beyond doubles": ({"enum": [2**53 + 1, 2**53 + 3]}, [str(2**53 + 1)], []),
    "a constant of 64 bits": ({"const": LEAST}, [str(LEAST)], []),
    "a choice of 64 bits": ({"type": "integer", "enum": [LEAST]}, [str(LEAST)], []),
    "a type beside such a choice": ({"type": "integer", "enum": [LEAST, "a"]}, [], ['"a"']),
    "zero has no sign": (
        {"type": "array", "items": {"enum": [0, 1]}, "uniqueItems": True}, ["[0, 1]", "[0.0, 1.0]"],
        ["[0, -0]", "[-0]"]),
    # xgrammar, which counts the properties, refuses all where a part is impossible.
    "an impossible part stays away": (
        {**CLOSED, "properties": {"a": BOTH_NULL, "b": NULL, "e": NULL}, "maxProperties": 2},
        ["{}", '{"b": null}', '{"b": null, "e": null}'], ['{"a": {"c": 1}}']),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_schema_takes_what_it_says_and_nothing_else(byte_compiler, name):
    check_texts(byte_compiler, *TAKEN[name])


def test_a_plain_schema_is_not_read_into_nodes(monkeypatch):
    monkeypatch.setattr("grammar.json_route.read_schema", None)
    compiler = GrammarCompiler(make_byte_vocabulary())
    assert compiler.compile(GrammarSpec.json_schema(TAKEN["formats beside names and keywords that look like one"][0]))


def test_whitespace_modes_separate_as_they_say(byte_compiler):
    spaced = json.dumps(PERSON_VALUE, ensure_ascii=False)
    compact = json.dumps(PERSON_VALUE, ensure_ascii=False, separators=(",", ":"))
    indented = json.dumps(PERSON_VALUE, ensure_ascii=False, indent=2)
    for whitespace, expected in (
        ("spaced", [True, False, False]), ("compact", [False, True, False]), ("any", [True, True, True]),
    ):
        found = [
            is_accepted(byte_compiler, PERSON, text, whitespace=whitespace)
            for text in (spaced, compact, indented)
        ]
        assert found == expected, whitespace
    assert not is_accepted(byte_compiler, {"type": "array"}, "[" + "\n" * 100 + "]", whitespace="any")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "24-1-1"]),
        ("time", ["23:59:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "12:60:00Z", "12:00:00", "12:00:00+24:00"]),
        ("date-time", ["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29 12:00:00Z"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-42661417400"]),
        ("ipv4", ["127.0.0.1"], ["127.0.0.256", "1.2.3"]),
        ("ipv6", ["::1", "2001:db8::1"], ["12345::", ":::"]),
        ("email", ["a@example.com"], ["a@", "example.com"]),
        ("uri", ["https://example.com/a?b#c"], ["//example.com", "a b"]),
        ("hostname", ["example.com", "a-b.c"], ["-a", "a..b", "a_b", "xn--x"]),
    ],
)  # fmt: skip
def test_formats_are_enforced_and_checked(byte_compiler, name, good, bad):
    schema = {"type": "string", "format": name}
    check_texts(byte_compiler, schema, map(json.dumps, good), map(json.dumps, bad))
    validator = SchemaValidator(schema)
    assert all(map(validator.is_valid, good)) and not any(map(validator.is_valid, bad))


PATTERNS = [
    *(
        '^[^"]*$', r"^[^\\]+$", r'^[^"\n]$', r'^(?:[^"\\]|x)*$', r'^(\s|[^"\s])$', r"^[^\W]$",
        r"^[^\p{L}']+$", r"^\S+$",
    ),
    *(
        r"^\s$", r"^\S$", r"^[\s]$", r"^[^\s]$", r"^[\S ]$", r"^[^\S\t]$", r"^[\s-]$", r"^[^-\Sx]$", r"^\\s$",
    ),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_hold_for_what_json_escapes_and_for_the_white_space_of_ecma_262(byte_compiler, pattern):
    texts = [*"a\"\\\n\t\x01é'1\ufeff\x85\xa0\u180e\u200b\u2028\u3000\u1680\v\r -]xs\U0001f600", ""]
    texts += ['a"b', "a\\b", '"a', "x\\", r"\s", "  "]
    written = [json.dumps(text, ensure_ascii=False) for text in texts]
    check_verdicts(byte_compiler, {"type": "string", "pattern": pattern}, written)


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": r"^[\x00-\x1f]*$"},
        {"pattern": r'^(\x00|[^"])$'}, {"patternProperties": {'^[^"]$': {}}},
        {"oneOf": [{"type": "null"}, {"type": "string", "pattern": '^[^"]$'}]},
    ],
)
def test_patterns_that_would_be_misread_are_left_to_residual_checks(byte_compiler, schema):
    plan = byte_compiler.compile(GrammarSpec.json_schema(schema)).plan
    assert [entry for entry in plan if "attern" in entry.keyword and entry.enforced_by == "residual"]


def test_the_plan_names_an_enforcer_for_every_keyword(byte_compiler):
    schema = {
        "title": "t",
        "type": "object",
        "properties": {"a/b": {"type": "integer", "exclusiveMinimum": True, "minimum": 3, "maxLength": 5},
                       "c": {"format": "my-format"}},
        "required": ["a/b"],
    }
    plan = byte_compiler.compile(GrammarSpec.json_schema(schema)).plan
    engine = [*(("", name) for name in ("type", "properties", "required"))]
    engine += [("/properties/a~1b", name) for name in ("type", "minimum")]
    others = {PlanEntry("", "title", "annotation"), PlanEntry("/properties/c", "format", "annotation")}
    others.add(PlanEntry("/properties/a~1b", "maxLength", "no effect"))
    assert set(plan) == others | {PlanEntry(*pair, "llguidance") for pair in engine}


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"items": {"$ref": "https://example.com/schema"}}, "/items", "$ref"),
        ({"$dynamicRef": "#node"}, "", "$dynamicRef"),
        # The library that checks reads it as little as the engines do, while guides are looked for too.
        ({"type": ["integer", "string"], "pattern": r"(?<n>a)\k<n>", "not": {"const": 3}}, "", "pattern"),
        ({**OPEN, "propertyNames": {"pattern": r"(?<n>a)\k<n>", "minLength": 1}}, "/propertyNames", "pattern"),
    ],
)
def test_a_refusal_names_pointer_and_keyword_as_the_user_wrote_them(byte_compiler, schema, pointer, keyword):
    check_refusal(byte_compiler, schema, pointer, keyword)


@pytest.mark.parametrize(
    ("schema", "pointer", "message"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type", "malformed"),
        ({"items": {"type": "string", "pattern": "a\\"}, "type": "array"}, "/items", "backslash"),
        ({"items": {"$ref": "#/type"}, "type": "array"}, "/items", r"\$ref at /items points to #/type"),
        ({"$ref": "#/$defs/missing"}, "", r"\$ref at # points to #/\$defs/missing"),
    ],
)
def test_a_malformed_or_contradictory_schema_has_the_pointer_to_the_fault(byte_compiler, schema, pointer, message):
    with pytest.raises(InvalidGrammar, match=message) as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer == pointer


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_where_doubles_tell_few_integers_apart_stay_where_they_are(byte_compiler, kind, keyword):
    for bound in (2**53 - 1, 2**53, -(2**53), 2**56, -(2**56), 10**18, -(2**62)):
        schema = {"type": [kind, "null"], keyword: bound}
        values = (None, 0, *(bound + step for step in (-300, -2, -1, 0, 1, 2, 300)))
        check_verdicts(byte_compiler, schema, map(json.dumps, values))


@pytest.mark.parametrize("value", [102.79329386273997, 90881996274707.73, 5.1631277221398636e-08, 2e-40])
def test_a_decimal_of_many_digits_is_not_taken_for_its_neighbour(byte_compiler, value):
    listed = {"type": ["number", "null"], "enum": [None, value, 1.5]}
    for schema in ({"const": value}, listed, {"type": "number", "minimum": value}):
        compiled, validator = byte_compiler.compile(GrammarSpec.json_schema(schema)), SchemaValidator(schema)
        for number in (value, math.nextafter(value, 0), math.nextafter(value, 1e99), 1.5):
            # Engines write a constant in one way, each in its own.
            spellings = {json.dumps(number), f"{number:.17g}", f"{number:.80f}".rstrip("0")}
            found = [accepts(compiled.matcher(), byte_compiler.vocabulary, text) for text in spellings]
            assert any(found) == validator.is_valid(number), (schema, number)


def test_a_backend_that_was_asked_for_takes_its_exact_subset_and_is_not_replaced(byte_compiler):
    with pytest.raises(UnsupportedGrammar) as refusal:
        byte_compiler.compile(GrammarSpec.json_schema({}, backend="outlines_core"))
    assert refusal.value.keyword == "json_schema"


def number_properties(count, start=0):
    return {f"p{number}": {"type": "integer"} for number in range(start, start + count)}


HALVES = [{**CLOSED, "properties": number_properties(250, start)} for start in (0, 250)]


@pytest.mark.parametrize(
    "schema",
    [
        {**CLOSED, "properties": number_properties(1_000)},
        {**OPEN, "properties": number_properties(600), "required": ["p599"]},
        {**CLOSED, "properties": number_properties(600), "patternProperties": {"^x": {}, "^y": {}}},
        {"anyOf": [HALVES[0], {"$ref": "#/$defs/half"}, {**CLOSED, "properties": {"z": {}}}]},
    ],
    ids=["closed", "required", "patterns", "branches"],
)
def test_an_object_may_have_many_optional_properties(byte_compiler, schema):
    document = {"properties": {"in": schema}, "required": ["in"], **OPEN, "$defs": {"half": HALVES[1]}}
    matcher = byte_compiler.compile(GrammarSpec.json_schema(document)).matcher()
    assert all(map(matcher.accept_token, b'{"in": {"p1'))


@pytest.mark.parametrize(
    ("bounds", "good"),
    [
        ({"minimum": 0.3, "maximum": 0.3}, ["0.3"]), ({"minimum": 0.2, "maximum": 0.4}, ["0.2", "0.3", "0.4"]),
        ({"exclusiveMinimum": 0.2, "exclusiveMaximum": 0.35}, ["0.3"]), ({"minimum": 0.95, "maximum": 1}, ["1", "1.0"]),
    ],
)
def test_multiples_of_a_fraction_are_those_in_decimals(byte_compiler, bounds, good):
    texts = ["0.1", "0.2", "0.25", "0.3", "0.35", "0.4", "0.9", "0.95", "1", "1.0"]
    schema = {"type": "number", "multipleOf": 0.1, **bounds}
    check_texts(byte_compiler, schema, good, [text for text in texts if text not in good])
    assert [text for text in texts if SchemaValidator(schema).is_valid(json.loads(text))] == good


WIDE = [
    *({"type": "integer", "enum": [-(2**63)]}, {"type": "integer", "const": -(2**63)}),
    *({"type": "number", "enum": [-(2**63), 5]}, {"type": ["integer", "null"], "enum": [-1e30, None]}),
    *({"type": "integer", "minimum": -1e19, "maximum": -1e19}, {"const": 1311768467463790321}),
    *({"enum": [2**53 + 1, 2**53 + 3]}, {"enum": [12345678901234567890, "x"]}),
    {**CLOSED, "properties": {"id": {"const": 2**63 + 2**12 + 1}}, "required": ["id"]},
    {"type": "object", "const": {"id": [2**53 + 1]}},
]


@pytest.mark.parametrize("schema", WIDE, ids=json.dumps)
def test_no_number_beyond_a_double_is_taken_for_another(byte_compiler, schema):
    numbers = [-(2**63), -(2**63) - 1, -(10**19), -(10**30), 2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3, 5]
    numbers += [1311768467463790321, 1311768467463790336, 12345678901234567890, 12345678901234567000]
    numbers += [2**63 + 2**12, 2**63 + 2**12 + 1]
    texts = [json.dumps(value) for number in numbers for value in (number, {"id": number}, {"id": [number]})]
    validator = SchemaValidator(schema)
    check_texts(byte_compiler, schema, bad=[text for text in texts if not validator.is_valid(json.loads(text))])


DIGITS = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
BEYOND = [2**63, -(2**63) - 1, 2**64, -(10**40), 10**400, -(10**400), 1e300]
# Around a schema with a number that 64 bits do not hold; in the last ones guides repeat it.
AROUND_BEYOND = [
    lambda part: {"type": "integer", **part},
    lambda part: {"oneOf": [{"type": "integer", **part}, {"type": ["integer", "null"], "maximum": 0}]},
    lambda part: {
        "properties": {"a": {"type": ["integer", "null"]}}, "if": {"properties": {"a": part}}, "then": False,
    },
    lambda part: {"type": "integer", "not": part},
]


@pytest.mark.parametrize("around", AROUND_BEYOND)
@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMaximum", "multipleOf", "const", "enum"])
def test_no_number_beyond_64_bits_gets_to_llguidance(byte_compiler, monkeypatch, around, keyword):
    texts = []
    make_engine = LLGuidanceBackend.make_engine
    monkeypatch.setattr(
        LLGuidanceBackend, "make_engine",
        lambda self, text, *more: texts.append(text) or make_engine(self, text, *more),
    )
    for number in BEYOND:
        schema = around({keyword: [number] if keyword == "enum" else number})
        for order in ("schema", "any"):
            # Refused schemas are not compiled; a negative step is malformed.
            with suppress(UnsupportedGrammar, InvalidGrammar):
                byte_compiler.compile(GrammarSpec.json_schema(schema, property_order=order))
    numbers = [abs(float(digits)) for text in texts for digits in DIGITS.findall(text)]
    assert texts and all(number < 2**63 for number in numbers)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_an_annotation_may_hold_a_number_beyond_doubles(byte_compiler, number):
    for rest in ({}, {"not": {"const": 1}}):
        schema = {"type": "integer", **rest, "default": number, "examples": [2, {"a": [number]}]}
        plan = check_texts(byte_compiler, schema, ["2"], ['"x"']).plan
        assert {("", "default", "annotation"), ("", "examples", "annotation")} <= set(plan)
