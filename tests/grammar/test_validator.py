"""The independent checks of a finished text: SchemaValidator and OutputCheck."""

import random
import time
from functools import reduce

import pytest

from grammar import GrammarSpec, InvalidGrammar, OutputCheck, SchemaValidator
from tests.grammar.vocabularies import accepts, walk

DEEP = reduce(lambda schema, _: {"items": schema}, range(3_000), {})
# After forty letters it takes a hundred million steps to find the match.
SLOW = r"^(?!(?:a|aa)+(?=a*z)c)[\s\S]*$"


def test_the_first_error_names_the_place_in_the_instance():
    validator = SchemaValidator({"properties": {"a/b": {"items": {"type": "integer"}}}})
    assert validator.is_valid({"a/b": [1]})
    assert validator.first_error({"a/b": [1]}) is None
    pointer, message = validator.first_error({"a/b": [1, "x"]})
    assert pointer == "/a~1b/1"
    assert "integer" in message


DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("keyword", ["properties", "patternProperties"])
@pytest.mark.parametrize("name", ["größe", "a b", "a%b", "a/b~", "a#b", "😀", "", r"^\d+$", "^x_"])
def test_a_place_is_found_by_its_pointer_whatever_its_name(keyword: str, name: str) -> None:
    place = name.replace("~", "~0").replace("/", "~1")
    validator = SchemaValidator({keyword: {name: {"minimum": 3}}}, f"/{keyword}/{place}")
    assert (validator.is_valid(3), validator.is_valid(2)) == (True, False)


@pytest.mark.parametrize("name", ["regex", "json-pointer", "iri"])
def test_a_rare_format_is_asserted_unless_the_draft_named_takes_it_for_an_annotation(name):
    assert not SchemaValidator({"format": name}).is_valid("( {")
    assert SchemaValidator({"format": name, "$schema": DRAFT_2020}).is_valid("( {")
    assert SchemaValidator({"format": "my-format"}).is_valid("( {")


def test_booleans_and_old_forms_are_schemas_each_in_its_draft():
    assert SchemaValidator(True).is_valid(1) and not SchemaValidator(False).is_valid(1)
    assert not SchemaValidator({"minimum": 1, "exclusiveMinimum": True}).is_valid(1)
    assert not SchemaValidator({"items": [{"type": "null"}], "additionalItems": False}).is_valid([None, 1])
    assert not SchemaValidator({"$schema": "urn:mine", "items": [{"type": "null"}]}).is_valid([1])
    assert not SchemaValidator({"dependencies": {"a": ["b"]}}).is_valid({"a": 1})


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#/nowhere"}, {"pattern": "("}, DEEP], ids=range(4)
)
def test_a_schema_that_cannot_be_used_is_invalid_and_nothing_is_fetched(schema):
    with pytest.raises(InvalidGrammar, match="cannot be used"):
        SchemaValidator(schema)


@pytest.mark.parametrize(
    "schema", [{"pattern": SLOW}, {"not": {"pattern": SLOW}}, {"propertyNames": {"pattern": SLOW}}]
)
def test_a_pattern_that_takes_too_many_steps_is_an_error_and_no_verdict(schema):
    validator = SchemaValidator(schema)
    instance = {"a" * 40: 1} if "propertyNames" in schema else "a" * 40
    for check in (validator.is_valid, validator.first_error):
        with pytest.raises(InvalidGrammar, match="a pattern backtracks more than 50000 steps over the value at"):
            check(instance)


def test_ordinary_patterns_with_look_around_read_long_texts():
    text = "ab, cd. " * 1000
    assert SchemaValidator({"pattern": r"^(?:(?!\bfoo\b)[\s\S])*$"}).is_valid(text)
    assert not SchemaValidator({"pattern": r"^(?:(?!\bfoo\b)[\s\S])*$"}).is_valid(text + "foo")


@pytest.mark.parametrize("identifier", [None, "person.schema.json", "http://e.com/d/r.json", "urn:a:b"])
def test_a_part_is_read_with_the_references_of_the_whole(identifier):
    schema = {"properties": {"a": {"$ref": f"{identifier or ''}#/$defs/ä b"}}, "$defs": {"ä b": {"type": "null"}}}
    if identifier is not None:
        schema["$id"] = identifier
    validator = SchemaValidator(schema, "/properties/a")
    assert validator.is_valid(None) and not validator.is_valid(1)


BARE = {"has_header": False, "delimiter": ";", "is_quoting": False}
SPECS = {
    "json_schema": (GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
                    "[1, 2]", ["[1, 1]", "[1", '["a"]']),
    "json_object": (GrammarSpec.json_object(), '{"a": 1}', ["[]", "{"]),
    "regex": (GrammarSpec.regex(r"[a-c]+(\.[0-9]{2})?"), "ab.12", ["ab.1", "d", "ab\n"]),
    "choice": (GrammarSpec.choice(["yes", "no"]), "yes", ["ye", "maybe", ""]),
    "csv": (GrammarSpec.csv({"s, t": "string", "n": "integer", "k": ["a", 'b"']}), '"s, t",n,k\n"x,y",1,"b"""\n,-2,a',
            ["s,n,k", '"s, t",n,k\nx,1', '"s, t",n,k\nx,1.5,a', '"s, t",n,k\nx,1,c', '"s, t",n,k\n"x,1,a']),
    "csv without quotes": (GrammarSpec.csv({"n": "number", "d": "date"}, **BARE), "1.5;2024-02-29",
                           ["1.5;2023-02-29", "1,2024-02-29", "1.5"]),
    "xml": (GrammarSpec.xml({"name": "a", "children": [{"name": "b", "text": "integer", "max": 2}]}), "<a><b>1</b></a>",
            ["<a/>", "<a><b>x</b></a>", "<a>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_good_texts_are_valid_and_others_are_not(name):
    spec, good, bad = SPECS[name]
    check = OutputCheck(spec)
    assert check.is_valid(good) is True
    assert [check.is_valid(text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize("name", SPECS)
def test_whatever_a_grammar_lets_through_passes(merged_compiler, name):
    spec, check = SPECS[name][0], OutputCheck(SPECS[name][0])
    for seed in range(6):
        matcher = merged_compiler.compile(spec).matcher()
        text = walk(matcher, merged_compiler.vocabulary, random.Random(seed), num_free=20)
        assert text is None or check.is_valid(text.decode()), text


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.ebnf('root ::= "a"'), GrammarSpec.lark('start: "a"'), GrammarSpec.regex(r"\p{Lu}+"),
        GrammarSpec.regex("[[:alpha:]]"), GrammarSpec.structural_tag({"format": {"type": "any_text"}}),
    ],
    ids=lambda spec: spec.kind,
)
def test_what_cannot_be_read_otherwise_is_said_not_to_be_checked(spec):
    assert OutputCheck(spec).is_valid("anything") is None


@pytest.mark.parametrize("text", ["9" * 5000, "1e999", '[{"a": -1e400}]', "-" + "1" * 4500])
def test_a_number_that_nobody_can_hold_is_not_checked(byte_compiler, text):
    """The grammar lets it through, so that invalid would be the wrong verdict."""
    spec = GrammarSpec.json_schema({"type": ["number", "array"]})
    assert accepts(byte_compiler.compile(spec).matcher(), byte_compiler.vocabulary, text)
    assert OutputCheck(spec).is_valid(text) is None


def test_a_table_without_header_has_a_row(byte_compiler):
    spec = GrammarSpec.csv({"a": "integer"}, has_header=False)
    assert not byte_compiler.compile(spec).matcher().is_completed()
    assert [OutputCheck(spec).is_valid(text) for text in ("", "1")] == [False, True]


@pytest.mark.parametrize("pattern", ["(a+)+b", "(.*a){30}", "(?:a|a)*b", "(a|aa)+$b", "a*a*a*a*a*a*b"])
def test_a_hostile_pattern_is_checked_in_no_time(pattern):
    text = "a" * 20 + "!" * 20_000
    tree = GrammarSpec.xml({"name": "a", "text": {"pattern": pattern}})
    for spec, written in ((GrammarSpec.regex(pattern), text), (tree, f"<a>{text}</a>")):
        start = time.process_time()
        assert OutputCheck(spec).is_valid(written) is False
        assert time.process_time() - start < 2, "it went back and tried again"


def test_beyond_ascii_a_shorthand_is_not_checked():
    check = OutputCheck(GrammarSpec.regex(r"\d+"))
    assert check.is_valid("12") is True and check.is_valid("x") is False
    assert check.is_valid("\u0661") is None  # a digit to the engines, none to JSON Schema
