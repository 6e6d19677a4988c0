"""SchemaValidator: the independent last check."""

import pytest

from grammar import InvalidGrammar, SchemaValidator

# After forty letters it takes a hundred million steps to find the match.
SLOW = r"^(?!(?:a|aa)+(?=a*z)c)[\s\S]*$"


def test_the_first_error_names_the_place_in_the_instance():
    validator = SchemaValidator({"properties": {"a/b": {"items": {"type": "integer"}}}})
    assert validator.is_valid({"a/b": [1]})
    assert validator.first_error({"a/b": [1]}) is None
    pointer, message = validator.first_error({"a/b": [1, "x"]})
    assert pointer == "/a~1b/1"
    assert "integer" in message


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("date", "2023-02-30"),
        ("time", "25:00:00Z"),
        ("date-time", "2023-02-30T00:00:00Z"),
        ("email", "x"),
        ("uuid", "x"),
        ("ipv4", "1.2.3"),
        ("ipv6", "1"),
        ("uri", "x y"),
    ],
)
def test_formats_are_asserted(name, bad):
    assert not SchemaValidator({"format": name}).is_valid(bad)


@pytest.mark.parametrize("name", ["regex", "json-pointer", "iri", "my-format"])
def test_other_formats_are_annotations(name):
    assert SchemaValidator({"format": name}).is_valid("(")


def test_old_forms_are_read_in_their_own_draft():
    assert not SchemaValidator({"minimum": 1, "exclusiveMinimum": True}).is_valid(1)
    assert not SchemaValidator({"items": [{"type": "null"}], "additionalItems": False}).is_valid([None, 1])
    assert not SchemaValidator({"dependencies": {"a": ["b"]}}).is_valid({"a": 1})


@pytest.mark.parametrize(
    "schema", [{"$ref": "http://127.0.0.1:9/x"}, {"$ref": "#/nowhere"}, {"pattern": "("}]
)
def test_a_schema_that_cannot_be_used_is_invalid_and_nothing_is_fetched(schema):
    with pytest.raises(InvalidGrammar, match="cannot be used"):
        SchemaValidator(schema)


def test_a_schema_nested_too_deeply_is_invalid():
    schema: dict = {}
    for _ in range(3_000):
        schema = {"items": schema}
    with pytest.raises(InvalidGrammar, match="cannot be used"):
        SchemaValidator(schema)


@pytest.mark.parametrize(
    "schema", [{"pattern": SLOW}, {"not": {"pattern": SLOW}}, {"propertyNames": {"pattern": SLOW}}]
)
def test_a_pattern_that_takes_too_many_steps_is_an_error_and_no_verdict(schema):
    validator = SchemaValidator(schema)
    instance = {"a" * 40: 1} if "propertyNames" in schema else "a" * 40
    for check in (validator.is_valid, validator.first_error):
        with pytest.raises(
            InvalidGrammar, match="a pattern backtracks more than 50000 steps over the value at"
        ):
            check(instance)


def test_ordinary_patterns_with_look_around_read_long_texts():
    text = "ab, cd. " * 1000
    assert SchemaValidator({"pattern": r"^(?:(?!\bfoo\b)[\s\S])*$"}).is_valid(text)
    assert not SchemaValidator({"pattern": r"^(?:(?!\bfoo\b)[\s\S])*$"}).is_valid(text + "foo")


def test_boolean_schemas_are_schemas():
    assert SchemaValidator(True).is_valid(1)
    assert not SchemaValidator(False).is_valid(1)


@pytest.mark.parametrize("identifier", [None, "person.schema.json", "http://e.com/d/r.json", "urn:a:b"])
def test_a_part_is_read_with_the_references_of_the_whole(identifier):
    schema = {
        "properties": {"a": {"$ref": f"{identifier or ''}#/$defs/ä b"}},
        "$defs": {"ä b": {"type": "null"}},
    }
    if identifier is not None:
        schema["$id"] = identifier
    validator = SchemaValidator(schema, "/properties/a")
    assert validator.is_valid(None) and not validator.is_valid(1)
