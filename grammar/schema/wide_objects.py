"""Objects with too many optional properties: llguidance takes every one for a possible first one, four items each.

Where at least one property is required, it needs no more items than there are properties.
"""

from typing import Any

from ..plan import Problem
from .keywords import list_properties
from .refusal import iterate_inside_out
from .weaken import find_at

Schema = dict[str, Any]

# The items that llguidance follows at once; beyond, accepting the bracket fails.
MAX_NUM_ITEMS = 2_000


def find_wide_object(document: Schema) -> Problem | None:
    """Return the first object of a normalised schema, or union of objects, that takes too many items at once."""
    for pointer, schema in iterate_inside_out(document):
        unions = [keyword for keyword in ("anyOf", "oneOf") if keyword in schema]
        branches = [schema, *(follow(document, branch) for keyword in unions for branch in schema[keyword])]
        distinct = {id(branch): branch for branch in branches if isinstance(branch, dict)}
        if sum(map(count_items, distinct.values())) > MAX_NUM_ITEMS:
            num_optional = sum(len(list_optional(branch)) for branch in distinct.values())
            reason = (
                f"{num_optional} optional properties where none is required are too many; the limit is about "
                f"{MAX_NUM_ITEMS // 4}, and none where a property is required"
            )
            return Problem(pointer, "properties" if count_items(schema) else unions[0], reason)
    return None


def follow(document: Schema, branch: Any) -> Any:
    """Return the schema that a branch refers to, or the branch itself."""
    ref = branch.get("$ref") if isinstance(branch, dict) else None
    return find_at(document, ref[1:]) if isinstance(ref, str) and ref.startswith("#/") else branch


def list_optional(schema: Schema) -> list[str]:
    """Return the properties of an object that requires none."""
    return (
        []
        if schema.get("required")
        else [n for n, part in list_properties(schema).items() if part is not False]
    )


def count_items(schema: Schema) -> int:
    """Return how many items llguidance follows at the start of an object."""
    num_optional, patterns = len(list_optional(schema)), schema.get("patternProperties", {})
    is_open = bool(patterns) or schema.get("additionalProperties") is not False
    return 4 * num_optional - 1 + 8 * is_open + max(len(patterns) - 1, 0) if num_optional else 0
