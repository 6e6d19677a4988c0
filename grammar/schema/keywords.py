"""The JSON Schema keywords: where subschemas live, what asserts, and which types they speak about."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Keywords whose value is a schema, a list of schemas, or a map from names to schemas.
SCHEMA_KEYWORDS = frozenset(
    [
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
        *("then", "unevaluatedItems", "unevaluatedProperties"),
    ]
)
SCHEMA_LIST_KEYWORDS = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
SCHEMA_MAP_KEYWORDS = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)

# A keyword asserts nothing about an instance of a type that is not its own.
NUMERIC_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
TYPES_OF_KEYWORD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), ("integer", "number")
    ),
    **dict.fromkeys(
        (
            *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains"),
            *("maxContains", "minItems", "maxItems", "uniqueItems"),
        ),
        ("array",),
    ),
    **dict.fromkeys(
        (
            *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
            *("propertyNames", "required", "minProperties", "maxProperties", "dependencies"),
            *("dependentRequired", "dependentSchemas"),
        ),
        ("object",),
    ),
}

# Applicators that look at the same instance as the schema they stand in.
IN_PLACE_APPLICATORS = frozenset(
    [
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("dependencies", "dependentSchemas"),
    ]
)
ASSERTIONS = frozenset(TYPES_OF_KEYWORD) | IN_PLACE_APPLICATORS | {"type", "enum", "const"}

# Keywords that define names and references for other schemas; they assert nothing about an instance.
STRUCTURE_KEYWORDS = frozenset(
    [*("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$defs"), "definitions"]
)


def join_pointer(pointer: str, *parts: str | int) -> str:
    """Extend a JSON pointer, escaping as RFC 6901 does."""
    for part in parts:
        text = str(part)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{text}"
    return pointer


def split_pointer(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


# Keyword, and the name or index below it.
Path = tuple[str] | tuple[str, str] | tuple[str, int]


def iterate_subschemas(keywords: Mapping[str, Any], kind: type) -> Iterator[tuple[Path, Any]]:
    """Yield (path, subschema) of the keywords of a schema, in their order.

    Args:
        kind: of a schema that is not a boolean.
    """
    kinds = (kind, bool)
    for keyword, value in keywords.items():
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            # `dependencies` maps names to schemas or to lists of names.
            yield from (((keyword, name), sub) for name, sub in value.items() if isinstance(sub, kinds))
        elif keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            yield from (((keyword, index), sub) for index, sub in enumerate(value) if isinstance(sub, kinds))
        elif keyword in SCHEMA_KEYWORDS and isinstance(value, kinds):
            yield (keyword,), value


def iterate_objects(document: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, whether it is a schema or not."""
    # The list grows while it is read.
    values = [document]
    for value in values:
        if isinstance(value, dict):
            yield value
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values.extend([child for child in children if isinstance(child, dict | list)])


def map_subschemas(keyword: str, value: Any, convert: Callable[[Path, Any], Any]) -> Any:
    """Return the value of a keyword with each subschema, or what stands in its place, converted."""
    if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
        return {name: convert((keyword, name), each) for name, each in value.items()}
    if keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
        return [convert((keyword, index), each) for index, each in enumerate(value)]
    return convert((keyword,), value) if keyword in SCHEMA_KEYWORDS else value


def is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)
