"""Random JSON schemas and instances for property tests."""

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "ab", "é", "x y", "p/q"])
_PLAIN = ["^a", "b$", "^[a-c]{2,4}$", "x|y", "^(ab|é)+$", "[0-9]{3}", "^$", "a.c"]
PATTERNS = st.sampled_from([*_PLAIN, '^[^"]+$', r'^([^"\\]|x)*$', r"^\S+$", r"^[^a-z]"])
FORMATS = st.sampled_from(
    ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "my-format"]
)
SCALARS = (st.none() | st.booleans() | st.integers(-5, 20) | st.sampled_from([0.5, -1.25, 3.0, "", "a", "é", "abc"]))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6,
)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
COUNTS = st.integers(0, 3)
BOUNDS = st.integers(-3, 9) | st.sampled_from([0.5, -1.5, 2.0])


def optional(**keywords: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=keywords)


STRINGS = optional(minLength=COUNTS, maxLength=st.integers(2, 6), pattern=PATTERNS, format=FORMATS)
NUMBERS = optional(
    minimum=BOUNDS, maximum=BOUNDS, exclusiveMinimum=BOUNDS | st.booleans(), exclusiveMaximum=BOUNDS,
    multipleOf=st.sampled_from([1, 2, 0.5, 3]),
)


def objects(inner: st.SearchStrategy) -> st.SearchStrategy:
    return optional(
        properties=st.dictionaries(NAMES, inner, max_size=3), required=st.lists(NAMES, unique=True, max_size=2),
        additionalProperties=st.booleans() | inner, patternProperties=st.dictionaries(PATTERNS, inner, max_size=1),
        minProperties=COUNTS, maxProperties=COUNTS,
        propertyNames=inner | PATTERNS.map(lambda pattern: {"pattern": pattern}), unevaluatedProperties=st.booleans(),
    )


def arrays(inner: st.SearchStrategy) -> st.SearchStrategy:
    return optional(
        items=inner | st.booleans() | st.lists(inner, max_size=2),
        prefixItems=st.lists(inner, min_size=1, max_size=2), additionalItems=inner | st.booleans(),
        minItems=COUNTS, maxItems=COUNTS, uniqueItems=st.booleans(), contains=inner, minContains=COUNTS,
        unevaluatedItems=st.booleans(),
    )


def applicators(inner: st.SearchStrategy) -> st.SearchStrategy:
    branches = st.lists(inner, min_size=1, max_size=3)
    kind = st.sampled_from(["anyOf", "oneOf", "allOf"])
    lists = st.builds(lambda name, subs: {name: subs}, kind, branches)
    rest = st.sampled_from([{"$ref": "#/$defs/d"}, {"not": False}, {"if": {}}, {"if": {"type": "null"}, "then": {}}])
    return lists | rest


def merge(*parts: dict[str, Any]) -> dict[str, Any]:
    return {keyword: value for part in parts for keyword, value in part.items()}


def make_layer(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Return schemas around other schemas; the first form has a type that fits, the second has not."""
    typed = (
        st.builds(merge, st.just({"type": "object"}), objects(inner))
        | st.builds(merge, st.just({"type": "array"}), arrays(inner))
        | st.builds(merge, st.just({"type": "string"}), STRINGS)
        | st.builds(merge, st.sampled_from([{"type": "integer"}, {"type": "number"}]), NUMBERS)
    )
    types = st.just({}) | TYPES.map(lambda name: {"type": name}) | st.just({"type": ["string", "null"]})
    mixed = st.builds(merge, types, applicators(inner), st.just({}) | objects(inner) | STRINGS | arrays(inner))
    values = st.lists(VALUES, min_size=1, max_size=4).map(lambda found: {"enum": found})
    return typed | mixed | st.builds(merge, types, values) | VALUES.map(lambda value: {"const": value})


LEAVES = st.just({}) | TYPES.map(lambda name: {"type": name})
SCHEMAS = st.builds(
    lambda schema, definition: {**schema, "$defs": {"d": definition}},
    st.recursive(LEAVES, make_layer, max_leaves=5), LEAVES | STRINGS | NUMBERS,
)
