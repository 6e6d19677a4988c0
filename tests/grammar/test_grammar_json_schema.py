"""JSON schemas: what is accepted, what is refused and how the refusal reads."""

import json
import math
import subprocess
import sys

import pytest

from grammar import (
    GrammarCompiler,
    GrammarSpec,
    InvalidGrammar,
    PlanEntry,
    SchemaValidator,
    UnsupportedGrammar,
)
from grammar.backends.xgrammar_backend import XGrammarBackend
from tests.grammar.vocabularies import (
    CLOSED,
    accepts,
    check_refusal,
    check_texts,
    check_verdicts,
    make_byte_vocabulary,
)

TEXT = {"type": "string"}
PERSON = {
    **CLOSED,
    "properties": {"name": TEXT, "tags": {"type": "array", "items": TEXT}},
    "required": ["name", "tags"],
}
PERSON_VALUE = {"name": "Zoë", "tags": ["a", "b"]}


def is_accepted(compiler, schema, text, **options):
    compiled = compiler.compile(GrammarSpec.json_schema(schema, **options))
    return accepts(compiled.matcher(), compiler.vocabulary, text)


def compare_with_validator(compiler, schema, values):
    check_verdicts(compiler, schema, [json.dumps(value, ensure_ascii=False) for value in values])


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_whitespace_modes_separate_as_they_say(byte_compiler, backend):
    spaced = json.dumps(PERSON_VALUE, ensure_ascii=False)
    compact = json.dumps(PERSON_VALUE, ensure_ascii=False, separators=(",", ":"))
    indented = json.dumps(PERSON_VALUE, ensure_ascii=False, indent=2)
    for whitespace, expected in (
        ("spaced", [True, False, False]),
        ("compact", [False, True, False]),
        ("any", [True, True, True]),
    ):
        found = [
            is_accepted(byte_compiler, PERSON, text, whitespace=whitespace, backend=backend)
            for text in (spaced, compact, indented)
        ]
        assert found == expected, whitespace


def test_any_whitespace_is_bounded(byte_compiler):
    assert not is_accepted(byte_compiler, {"type": "array"}, "[" + "\n" * 100 + "]", whitespace="any")


@pytest.mark.parametrize("whitespace", ["spaced", "compact", "any"])
def test_json_object_accepts_objects_and_nothing_else(byte_compiler, whitespace):
    separators = (",", ":") if whitespace == "compact" else (", ", ": ")
    values = ({}, {"a": None}, {"": {"b": [1.5e3, "x", True]}})
    good = [json.dumps(value, separators=separators) for value in values]
    bad = ["[]", "1", '"a"', "{", "{}}", '{"a"}', "{a: 1}"]
    check_texts(byte_compiler, GrammarSpec.json_object(whitespace=whitespace), good, bad)


def test_boolean_schemas_mean_anything_and_nothing(byte_compiler):
    assert is_accepted(byte_compiler, True, '{"a": [1, null]}')
    with pytest.raises(InvalidGrammar, match="no text satisfies"):
        byte_compiler.compile(GrammarSpec.json_schema(False))


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
def test_formats_are_enforced(byte_compiler, name, good, bad):
    schema = {"type": "string", "format": name}
    check_texts(byte_compiler, schema, map(json.dumps, good), map(json.dumps, bad))


def test_a_format_and_a_pattern_are_both_enforced(byte_compiler):
    schema = {"type": "string", "format": "date", "pattern": "^2024"}
    check_texts(byte_compiler, schema, ['"2024-02-29"'], ['"2023-02-28"', '"2024-02-30"'])


QUOTES = ['^[^"]*$', r"^[^\\]+$", r'^[^"\n]$', r'^(?:[^"\\]|x)*$', r'^(\s|[^"\s])$']


@pytest.mark.parametrize("pattern", [*QUOTES, r"^[^\W]$", r"^[^\p{L}']+$", r"^\S+$"])
def test_patterns_hold_for_characters_that_json_escapes(byte_compiler, pattern):
    texts = ["a", '"', "\\", 'a"b', "a\\b", '"a', "\n", "\t", "\x01", "x\\", "é", "'", "1", ""]
    compare_with_validator(byte_compiler, {"type": "string", "pattern": pattern}, texts)


SPACES = [r"^\s$", r"^\S$", r"^[\s]$", r"^[^\s]$", r"^[\S ]$", r"^[^\S\t]$"]


@pytest.mark.parametrize("pattern", [*SPACES, r"^[\s-]$", r"^[^-\Sx]$", r"^\\s$", r"^[]\S]$"])
def test_white_space_in_a_pattern_is_that_of_ecma_262(byte_compiler, pattern):
    texts = [*'\ufeff\x85\xa0\u180e\u200b\u2028\u3000\u1680\v\r \t-]xs"\\\U0001f600', r"\s", "  "]
    compare_with_validator(byte_compiler, {"type": "string", "pattern": pattern}, texts)


def test_white_space_in_a_pattern_is_the_engines(byte_compiler):
    plan = byte_compiler.compile(GrammarSpec.json_schema({"type": "string", "pattern": r"^\S[\S\s]*$"})).plan
    assert PlanEntry("", "pattern", "llguidance") in plan


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^[[:alpha:]]$"},
        {"pattern": "^[a-z&&[^b]]$"},
        {"pattern": r"^[\x00-\x1f]*$"},
        {"pattern": r'^(\x00|[^"])$'},
        {"patternProperties": {'^[^"]$': {}}},
        {"oneOf": [{"type": "null"}, {"type": "string", "pattern": '^[^"]$'}]},
    ],
)
def test_patterns_that_would_be_misread_are_left_to_residual_checks(byte_compiler, schema):
    plan = byte_compiler.compile(GrammarSpec.json_schema(schema)).plan
    assert [entry for entry in plan if "attern" in entry.keyword and entry.enforced_by == "residual"]


def test_an_unknown_format_is_an_annotation_and_the_plan_says_so(byte_compiler):
    schema = {"properties": {"a": {"type": "string", "format": "my-format"}}}
    plan = check_texts(byte_compiler, schema, ['{"a": "x"}']).plan
    assert PlanEntry("/properties/a", "format", "annotation") in plan


def test_the_plan_names_an_enforcer_for_every_keyword(byte_compiler):
    schema = {
        "title": "t",
        "type": "object",
        "properties": {"a/b": {"type": "integer", "exclusiveMinimum": True, "minimum": 3, "maxLength": 5}},
        "required": ["a/b"],
    }
    plan = byte_compiler.compile(GrammarSpec.json_schema(schema)).plan
    engine = [*(("", name) for name in ("type", "properties", "required"))]
    engine += [("/properties/a~1b", name) for name in ("type", "minimum")]
    others = {PlanEntry("", "title", "annotation"), PlanEntry("/properties/a~1b", "maxLength", "no effect")}
    assert set(plan) == others | {PlanEntry(*pair, "llguidance") for pair in engine}


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({"items": {"$ref": "https://example.com/schema"}}, "/items", "$ref"),
        ({"$dynamicRef": "#node"}, "", "$dynamicRef"),
        # The library that checks reads it as little as the engines do, while guides are looked for too.
        ({"type": ["integer", "string"], "pattern": "[\\b]", "not": {"const": 3}}, "", "pattern"),
        (
            {"type": "object", "propertyNames": {"pattern": r"\0", "minLength": 1}},
            "/propertyNames",
            "pattern",
        ),
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
        ({"enum": []}, "", "no text satisfies"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "", "no text satisfies"),
    ],
)
def test_a_malformed_or_contradictory_schema_has_the_pointer_to_the_fault(
    byte_compiler, schema, pointer, message
):
    with pytest.raises(InvalidGrammar, match=message) as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema))
    assert refusal.value.pointer == pointer


def test_engine_options_inside_a_schema_do_not_loosen_it(byte_compiler):
    schema = {"x-guidance": {"lenient": True, "coerce_one_of": True}, "uniqueItems": True}
    check_texts(byte_compiler, schema, ["[1, 2]"], ["[1, 1]"])


def test_references_reach_places_that_are_no_schema_keywords(byte_compiler):
    schema = {
        "$ref": "#/components/schemas/Pair",
        "components": {"schemas": {"Pair": {"items": [{"type": "null"}], "additionalItems": False}}},
    }
    check_texts(byte_compiler, schema, ["[null]"], ["[null, null]", "[1]"])


def test_a_reference_under_a_rewritten_keyword_is_refused(byte_compiler):
    schema = {"items": [{"type": "null"}, {"$ref": "#/items/0"}]}
    with pytest.raises(UnsupportedGrammar, match="rewritten"):
        byte_compiler.compile(GrammarSpec.json_schema(schema))


def test_bounds_of_64_bit_integers_are_enforced(byte_compiler):
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    good, bad = [2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]
    check_texts(byte_compiler, schema, map(str, good), map(str, bad))


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


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_range_of_numbers_accepts_only_what_is_in_it(byte_compiler, keyword):
    texts = [
        "0",
        "-0",
        "0.0",
        "-0.0",
        "1",
        "1.0",
        "0.99",
        "1.01",
        "0.5",
        "0.50",
        "0.51",
        "-0.5",
        "10",
        "5e-1",
    ]
    for bound in (-1, 0, 0.5, 1, 10, -0.25):
        for other in ({}, {"minimum": -0.5}, {"exclusiveMaximum": 1.5}):
            schema = {"type": "number", **other, keyword: bound}
            try:
                compiled = byte_compiler.compile(GrammarSpec.json_schema(schema))
            except (InvalidGrammar, UnsupportedGrammar):
                continue
            for text in texts:
                is_valid = SchemaValidator(schema).is_valid(json.loads(text))
                assert is_valid or not accepts(compiled.matcher(), byte_compiler.vocabulary, text), text


def test_keywords_beside_ref_count_except_in_a_named_old_draft(byte_compiler):
    schema = {"$ref": "#/definitions/s", "maxLength": 2, "definitions": {"s": {"type": "string"}}}
    assert not is_accepted(byte_compiler, schema, '"abc"')
    old = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert is_accepted(byte_compiler, old, '"abc"')


def test_a_part_that_nothing_satisfies_stays_away_where_xgrammar_refuses_all(byte_compiler):
    nulls = {"c": {"type": "null"}, "d": {"type": "null"}}
    part = {**CLOSED, "properties": nulls, "required": ["c", "d"], "maxProperties": 1}
    properties = {"a": part, "b": {"type": "null"}, "e": {"type": "null"}}
    good = ["{}", '{"b": null}', '{"b": null, "e": null}']
    check_texts(
        byte_compiler, {**CLOSED, "properties": properties, "maxProperties": 2}, good, ['{"a": {"c": 1}}']
    )


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("pattern", {"type": "string", "pattern": "a"}),
        ("minLength", {"type": "string", "minLength": 1}),
        ("required", {**CLOSED, "properties": {"a": {}}, "required": ["b"]}),
    ],
)
def test_xgrammar_takes_a_schema_only_from_its_exact_subset(byte_compiler, keyword, schema):
    with pytest.raises(UnsupportedGrammar) as refusal:
        byte_compiler.compile(GrammarSpec.json_schema(schema, backend="xgrammar"))
    assert refusal.value.keyword == keyword


def test_what_llguidance_cannot_count_goes_to_xgrammar(byte_compiler):
    properties = {name: {"type": "integer"} for name in "abc"}
    schema = {**CLOSED, "properties": properties, "minProperties": 1, "maxProperties": 2}
    good, bad = ['{"b": 1}', '{"a": 1, "b": 2}'], ["{}", '{"a": 1, "b": 2, "c": 3}']
    compiled = check_texts(byte_compiler, schema, good, bad)
    assert PlanEntry("", "minProperties", compiled.backend) in compiled.plan


def test_xgrammar_is_not_asked_to_count_many_properties(byte_compiler, monkeypatch):
    def fail(*arguments):
        raise AssertionError("xgrammar was asked")

    monkeypatch.setattr(XGrammarBackend, "compile", fail)
    schema = {**CLOSED, "properties": number_properties(60), "minProperties": 25}
    assert byte_compiler.compile(GrammarSpec.json_schema(schema)).backend == "llguidance"


def number_properties(count, start=0):
    return {f"p{number}": {"type": "integer"} for number in range(start, start + count)}


HALVES = [{**CLOSED, "properties": number_properties(250, start)} for start in (0, 250)]
OPEN = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "is_taken"),
    [
        ({**CLOSED, "properties": number_properties(500)}, True),
        ({**CLOSED, "properties": number_properties(501)}, False),
        ({**OPEN, "properties": number_properties(498)}, True),
        ({**OPEN, "properties": number_properties(499)}, False),
        ({**OPEN, "properties": number_properties(600), "required": ["p599"]}, True),
        ({**CLOSED, "properties": number_properties(498), "patternProperties": {"^x": {}, "^y": {}}}, True),
        ({**CLOSED, "properties": number_properties(499), "patternProperties": {"^x": {}, "^y": {}}}, False),
        ({"anyOf": HALVES}, True),
        ({"anyOf": [HALVES[0], {"$ref": "#/$defs/half"}]}, True),
        ({"anyOf": [HALVES[0], {"$ref": "#/$defs/half"}, {**CLOSED, "properties": {"z": {}}}]}, False),
    ],
)
def test_as_many_optional_properties_as_the_engine_takes_work_and_more_are_refused(
    byte_compiler, schema, is_taken
):
    document = {"properties": {"in": schema}, "required": ["in"], **OPEN, "$defs": {"half": HALVES[1]}}
    spec = GrammarSpec.json_schema(document)
    if not is_taken:
        with pytest.raises(UnsupportedGrammar, match="optional properties where none is required") as refusal:
            byte_compiler.compile(spec)
        assert refusal.value.pointer == "/properties/in"
        assert refusal.value.keyword == ("anyOf" if "anyOf" in schema else "properties")
        return
    matcher = byte_compiler.compile(spec).matcher()
    assert all(map(matcher.accept_token, b'{"in": {"p1'))


def test_a_backend_that_was_asked_for_is_not_replaced(byte_compiler):
    with pytest.raises(UnsupportedGrammar, match="outlines_core"):
        byte_compiler.compile(GrammarSpec.json_schema({}, backend="outlines_core"))


WIDE = [
    *({"type": "integer", "enum": [-(2**63)]}, {"type": "integer", "const": -(2**63)}),
    *({"type": "number", "enum": [-(2**63), 5]}, {"type": ["integer", "null"], "enum": [-1e30, None]}),
    *({"type": "integer", "minimum": -1e19, "maximum": -1e19}, {"const": 1311768467463790321}),
    *({"enum": [2**53 + 1, 2**53 + 3]}, {"enum": [12345678901234567890, "x"]}),
    {**CLOSED, "properties": {"id": {"const": 2**63 + 2**12 + 1}}, "required": ["id"]},
    {"type": "object", "const": {"id": [2**53 + 1]}},
]


def test_no_number_beyond_a_double_is_taken_for_another():
    """In a process of its own: llguidance ends the process over some of them."""
    script = "from tests.grammar.test_grammar_json_schema import check_wide; check_wide()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def check_wide():
    compiler = GrammarCompiler(make_byte_vocabulary(), num_threads=1)
    numbers = [-(2**63), -(2**63) - 1, -(10**19), -(10**30), 2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3, 5]
    numbers += [1311768467463790321, 1311768467463790336, 12345678901234567890, 12345678901234567000]
    numbers += [2**63 + 2**12, 2**63 + 2**12 + 1]
    texts = [json.dumps(value) for number in numbers for value in (number, {"id": number}, {"id": [number]})]
    for schema in WIDE:
        print(schema, flush=True)
        validator = SchemaValidator(schema)
        check_texts(
            compiler, schema, bad=[text for text in texts if not validator.is_valid(json.loads(text))]
        )
    compiler.close()


def test_whole_numbers_of_64_bits_can_be_written(byte_compiler):
    least = -(2**63)
    schemas = [({"enum": [2**53 + 1, 2**53 + 3]}, 2**53 + 1), ({"const": least}, least)]
    for schema, number in (*schemas, ({"type": "integer", "enum": [least]}, least)):
        assert is_accepted(byte_compiler, schema, str(number))
    mixed = {"type": "integer", "enum": [least, "a"]}
    assert not is_accepted(byte_compiler, mixed, '"a"')


@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema"]
)
@pytest.mark.parametrize("root", [{}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}])
def test_a_draft_named_inside_does_not_undo_the_rewriting(byte_compiler, draft, root):
    pair = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False, "minItems": 1}
    inner = {"$schema": draft, "type": "object", "properties": {"p": pair}, "required": ["p"]}
    schema = root | {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": inner}}
    schema |= {"type": "object", "required": ["a"]}
    if root:
        with pytest.raises(InvalidGrammar, match="malformed"):
            byte_compiler.compile(GrammarSpec.json_schema(schema))
        return
    check_texts(byte_compiler, schema, ['{"a": {"p": [1]}}'], ['{"a": {"p": ["a"]}}', '{"a": {"p": []}}'])


def test_zero_has_no_sign(byte_compiler):
    schema = {"type": "array", "items": {"enum": [0, 1]}, "uniqueItems": True}
    check_texts(byte_compiler, schema, ["[0, 1]", "[0.0, 1.0]"], ["[0, -0]", "[-0]"])
