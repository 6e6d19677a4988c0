"""Schemas that lead only to each other, by references and the applicators around them.

They may be read as anything: a validator takes every value for valid, and an engine finds none to write.
"""

from collections import defaultdict
from typing import Any

from .keywords import ASSERTIONS, iterate_children, join_pointer
from .multiples import iterate_schemas
from .references import find_targets
from .rules import is_trivial

_PASSING = frozenset(["$ref", "allOf", "anyOf", "oneOf"])


def find_loop(schema: dict[str, Any]) -> str | None:
    """Return the pointer of a reference that leads back to itself and asserts nothing on the way; None for none.

    Args:
        schema: normalised, so that its references are JSON pointers.
    """
    schemas = iterate_schemas(schema)
    passing = {place: list_receivers(each, place) for place, each in schemas if is_passing(each)}
    for place in find_asserting(passing):
        del passing[place]
    pointer: str | None = next(iter(passing), None)
    seen: set[str] = set()
    # No schema stands within itself, so the way round leads through a reference.
    while pointer is not None and not (pointer in seen and leads_out(pointer, passing[pointer])):
        seen.add(pointer)
        pointer = next(receiver for receiver in passing[pointer] if receiver in passing)
    return pointer


def is_passing(schema: dict[str, Any]) -> bool:
    """Return whether a schema asserts nothing itself and only applies other schemas to the same value."""
    keywords = schema.keys() & ASSERTIONS
    return bool(keywords) and keywords <= _PASSING


def list_receivers(schema: dict[str, Any], pointer: str) -> list[str]:
    """Return the pointers of the schemas that a schema applies to the same value."""
    branches = (
        join_pointer(pointer, *path)
        for path, child in iterate_children(schema)
        # Trivial schemas in `allOf` have no effect.
        if path[0] in _PASSING and not (path[0] == "allOf" and is_trivial(child))
    )
    return [*find_targets(schema), *branches]


def leads_out(pointer: str, receivers: list[str]) -> bool:
    """Tell whether a schema hands a value on to one that does not stand in it."""
    return not all(receiver.startswith(pointer + "/") for receiver in receivers)


def find_asserting(passing: dict[str, list[str]]) -> set[str]:
    """Return the pointers of those schemas that hand a value on to one that asserts something, however far away."""
    senders: defaultdict[str, list[str]] = defaultdict(list)
    for pointer, receivers in passing.items():
        for receiver in receivers:
            senders[receiver].append(pointer)
    found = {pointer for pointer, receivers in passing.items() if not receivers}
    pending = [*found, *(receiver for receiver in senders if receiver not in passing)]
    while pending:
        new = set(senders[pending.pop()]) - found
        found |= new
        pending.extend(new)
    return found
