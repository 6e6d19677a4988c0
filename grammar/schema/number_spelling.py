"""Let a whole number in `const` or `enum` be written with a fraction of zero too: 2.0 is the same number as 2.

llguidance writes the values of `enum` in one way. Where a number is meant, a range around it does the same and
takes both spellings: the only multiple of 0.5 within 0.25 of 2 is 2. Types that say `integer` keep the short one.
"""

from typing import Any

MAX_NUM_VALUES = 16
# Doubles this small have no rounding in a range around them.
MAX_NUMBER = 2**40


def spell_numbers(schema: dict[str, Any]) -> None:
    """Rewrite `const` or `enum` in place, if it holds whole numbers that may be spelt in two ways."""
    types = schema.get("type", "number")
    if not {"number", "array", "object"}.intersection([types] if isinstance(types, str) else types):
        return
    keyword = "enum" if "enum" in schema else "const"
    values = schema["enum"] if keyword == "enum" else [schema["const"]]
    if len(values) > MAX_NUM_VALUES or not any(map(has_whole_number, values)):
        return
    kept = [value for value in values if not has_whole_number(value)]
    branches = [{"enum": kept}] if kept else []
    branches.extend(make_schema(value) for value in values if has_whole_number(value))
    del schema[keyword]
    if "anyOf" in schema or "$ref" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
    else:
        schema["anyOf"] = branches


def has_whole_number(value: Any) -> bool:
    """Return whether a number with two spellings is in a value."""
    if isinstance(value, dict):
        return any(map(has_whole_number, value.values()))
    if isinstance(value, list):
        return any(map(has_whole_number, value))
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < MAX_NUMBER
        and not value % 1
    )


def make_schema(value: Any) -> dict[str, Any]:
    """Return a schema of which only this value is an instance."""
    if not has_whole_number(value):
        return {"const": value}
    if isinstance(value, dict):
        properties = {name: make_schema(child) for name, child in value.items()}
        closed: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**closed, "required": list(value)}
    if isinstance(value, list):
        items = [make_schema(child) for child in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    # Zero has no sign: beside 0, which is the same number, -0 would be a dead end where items are distinct.
    least = value - 0.25 if value else 0
    return {"type": "number", "multipleOf": 0.5, "minimum": least, "maximum": value + 0.25}
