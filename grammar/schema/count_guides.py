"""Guides for propertyNames, contains, minProperties, maxProperties, uniqueItems and bounds of integers."""

import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, pairwise
from typing import Any

from ..errors import InvalidGrammar
from ..validator import SchemaValidator
from .dialect import DRAFT_2020, with_dialect
from .keywords import list_properties
from .references import find_targets
from .rules import types_of

Schema = dict[str, Any]

# Combinations that a guide may list.
MAX_NUM_CHOICES = 20
# Characters of JSON that a guide may spend on copies of the `contains` schema.
MAX_NUM_REPEATED = 4096
MAX_NUM_VALUES = 64
# Integers of a range that are validated one by one; takes about 1 ms.
MAX_NUM_TRIED = 1024
MAX_DEPTH = 4
# Doubles represent all integers up to this one exactly.
MAX_EXACT = 2**53
TYPES = ("object", "array", "string", "number", "boolean", "null")


def guide_names(schema: Schema, names: Any) -> Schema:
    """Forbid properties whose names `propertyNames` rejects; if it enumerates names, forbid all other names."""
    if names is False:
        return {"maxProperties": 0}
    if not isinstance(names, dict) or "$ref" in str(names):
        return {}
    validator = make_validator(names)
    if validator is None:
        return {}
    listed = dict.fromkeys([*list_properties(schema), *schema.get("required", [])])
    guide: Schema = {"properties": {name: False for name in listed if not validator.is_valid(name)}}
    values = list_values(names)
    if (
        values is None
        and names.get("type", "string") not in ("string", ["string"])
        and "string" not in names["type"]
    ):
        values = []
    if values is None:
        return guide if guide["properties"] else {}
    guide["properties"] = {name: validator.is_valid(name) for name in list_properties(schema)} | guide[
        "properties"
    ]
    fine = [value for value in values if isinstance(value, str) and validator.is_valid(value)]
    others = [value for value in fine if value not in guide["properties"]]
    if others:
        guide["patternProperties"] = {f"^(?:{'|'.join(map(re.escape, others))})$": True}
    return guide | {"additionalProperties": False}


def guide_contains(schema: Schema, wanted: Any) -> Schema:
    """Enumerate the positions of the `minContains` items that match `contains`, if `maxItems` bounds them."""
    least, most = schema.get("minContains", 1), schema.get("maxItems")
    if not least:
        return {}
    if most is not None and most < least:
        return exclude("array")
    if most is None or most > MAX_NUM_CHOICES:
        return {"minItems": least}
    # Count the combinations before listing them: listing very many would hold the GIL.
    num_choices = math.comb(most, least)
    if num_choices > MAX_NUM_CHOICES or num_choices * least * len(json.dumps(wanted)) > MAX_NUM_REPEATED:
        return {"minItems": least}
    branches = [
        {"prefixItems": [wanted if place in choice else True for place in range(choice[-1] + 1)]}
        | {"minItems": choice[-1] + 1}
        for choice in combinations(range(most), least)
    ]
    return {"anyOf": branches} if len(branches) > 1 else branches[0]


def guide_number(schema: Schema, keyword: str) -> Schema:
    """Enumerate which properties of a closed object are present (minProperties) or absent (maxProperties)."""
    names, number = list(list_properties(schema)), schema[keyword]
    if keyword == "maxProperties" and number == 0:
        return {"properties": dict.fromkeys(names, False), "additionalProperties": False}
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        return {}
    if keyword == "minProperties" and number > len(names):
        return exclude("object")
    size = number if keyword == "minProperties" else len(names) - number
    if not 0 <= size <= len(names) <= MAX_NUM_CHOICES or math.comb(len(names), size) > MAX_NUM_CHOICES:
        return {}
    chosen = combinations(names, size)
    if keyword == "minProperties":
        return {"anyOf": [{"required": list(choice)} for choice in chosen]}
    return {"anyOf": [{"properties": dict.fromkeys(choice, False)} for choice in chosen]}


def guide_distinct(schema: Schema) -> Schema:
    """Limit an array of distinct items to the number of values that the items can have."""
    count = count_values(schema.get("items"), MAX_DEPTH)
    return {} if count is None else {"maxItems": len(schema.get("prefixItems", ())) + count}


def count_values(schema: Any, depth: int) -> int | None:
    """Return an upper bound of the number of values a schema allows, None if it is large or unknown."""
    if not isinstance(schema, dict) or not depth:
        return None
    values = list_values(schema)
    if values is not None:
        return len(values)
    kind = schema.get("type")
    if kind in ("boolean", "null"):
        return 2 if kind == "boolean" else 1
    if kind in ("integer", "number"):
        return count_multiples(schema)
    if "anyOf" in schema and isinstance(schema["anyOf"], list):
        counts = [count_values(branch, depth - 1) for branch in schema["anyOf"]]
        return None if None in counts else sum(count or 0 for count in counts)
    if kind != "object" or schema.get("patternProperties") or [*find_targets(schema)]:
        return None
    if schema.get("maxProperties") == 0:
        return 1
    if schema.get("additionalProperties") is not False:
        return None
    count, required = 1, schema.get("required", [])
    for name, part in list_properties(schema).items():
        found = count_values(part, depth - 1)
        if found is None or count > MAX_NUM_VALUES:
            return None
        count *= found + (name not in required)
    return count if count <= MAX_NUM_VALUES else None


def count_multiples(schema: Schema) -> int | None:
    """Return an upper bound of the number of multiples between the schema's bounds, None if large or unknown."""
    step = schema.get("multipleOf", 1 if schema.get("type") == "integer" else 0)
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if not step or low is None or high is None or max(abs(low), abs(high), step) > MAX_EXACT:
        return None
    # Use the decimal digits: as doubles, 0.3 / 0.1 is less than 3.
    low, high, step = (Fraction(str(number)) for number in (low, high, step))
    if (high - low) / step >= MAX_NUM_VALUES:
        return None
    return max(math.floor(high / step) - math.ceil(low / step) + 1, 0)


def guide_integers(schema: Schema) -> Schema:
    """Enumerate the integers that satisfy a schema: between its bounds, near its one bound, or near 0."""
    typed = [schema] if "type" in schema else schema.get("oneOf", [])
    types = {name for part in typed for name in list_types(part)}
    if "integer" not in types or "number" in types or "$ref" in str(schema):
        return {}
    low, high = find_bound(schema, "minimum", math.ceil), find_bound(schema, "maximum", math.floor)
    # Without a bound the model can always add digits, so values beyond this range need no check.
    first = low if low is not None else (0 if high is None else high) - MAX_NUM_VALUES + 1
    last = high if high is not None else first + 2 * MAX_NUM_VALUES
    if last - first >= MAX_NUM_TRIED:
        return {}
    validator = make_validator(schema)
    if validator is None:
        return {}
    values = [value for value in range(first, last + 1) if validator.is_valid(value)]
    parts = list_runs(values)
    if len(parts) > MAX_NUM_CHOICES:
        if len(values) > 2 * MAX_NUM_VALUES:
            return {}
        parts = [{"enum": values}]
    parts += [{"type": "integer", "maximum": first - 1}] if low is None else []
    parts += [{"type": "integer", "minimum": last + 1}] if high is None else []
    parts += [{"type": sorted(types - {"integer"})}] if len(types) > 1 else []
    return {"anyOf": parts} if parts else exclude("number")


def make_validator(schema: Schema) -> SchemaValidator | None:
    """Return the validator of a part of a normalised schema, None if the library does not support a pattern in it."""
    try:
        return SchemaValidator(with_dialect(schema, DRAFT_2020))
    except InvalidGrammar:
        return None


def list_types(schema: Any) -> list[str]:
    """Return the types that a schema lists, or all types if it lists none."""
    found = schema.get("type", TYPES) if isinstance(schema, dict) else TYPES
    return [found] if isinstance(found, str) else list(found)


def list_runs(values: list[int]) -> list[Schema]:
    """Return a schema for each run of consecutive integers in a sorted list."""
    starts = [place for place, value in enumerate(values) if place == 0 or value > values[place - 1] + 1]
    runs = [(values[start], values[end - 1]) for start, end in pairwise([*starts, len(values)])]
    return [{"type": "integer", "minimum": low, "maximum": high} for low, high in runs]


def find_bound(schema: Schema, keyword: str, make_whole: Callable[[float], int]) -> int | None:
    """Return the schema's integer bound, None if it has none. An exclusive bound is returned as if inclusive."""
    bounds = [schema[name] for name in (keyword, "exclusive" + keyword.capitalize()) if name in schema]
    if not bounds or max(map(abs, bounds)) > MAX_EXACT:
        return None
    whole = map(make_whole, bounds)
    return max(whole) if keyword == "minimum" else min(whole)


def exclude(kind: str) -> Schema:
    """Return the schema of all types but one."""
    return {"type": [name for name in TYPES if name != kind]}


def list_values(schema: Any) -> list[Any] | None:
    """Return the value of `const`, or the `enum` values that a single `type` allows; None if it has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    types = schema.get("type")
    if not isinstance(values, list):
        return None
    return [value for value in values if types is None or isinstance(types, list) or types in types_of(value)]
