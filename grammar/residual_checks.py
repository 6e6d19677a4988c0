"""The checks of one document: which of them a complete value fails."""

import json
from typing import Any

from .json_schema.check import Check
from .json_schema.sites import Site
from .validator import SchemaValidator


class ResidualChecks:
    """Validates values against schemas within a document, with one validator for each."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._validators: dict[str, SchemaValidator] = {"": SchemaValidator(schema)}

    def find_violation(self, site: Site, value: bytes, before: bytes) -> Check | None:
        """Return the first check that a complete value fails.

        Args:
            before: the text from the bracket around the value to the value.
        """
        try:
            instance = json.loads(value)
        except (ValueError, RecursionError):
            # Not UTF-8, or a number of more digits than Python reads: what cannot be checked is not let through.
            return site.checks[0]
        return next((check for check in site.checks if not self._passes(check, instance, before)), None)

    def _passes(self, check: Check, instance: Any, before: bytes) -> bool:
        if check.is_distinct:
            known = (make_comparable(sibling) for sibling in read_elements(before))
            return make_comparable(instance) not in known
        return self._validator(check.pointer).is_valid({instance: None} if check.is_alone else instance)

    def _validator(self, pointer: str) -> SchemaValidator:
        if pointer not in self._validators:
            self._validators[pointer] = SchemaValidator(self._schema, pointer)
        return self._validators[pointer]


def read_elements(before: bytes) -> list[Any]:
    """Return the elements of an array up to a place in it."""
    elements: list[Any] = json.loads(before.rstrip(b", \t\r\n") + b"]")
    return elements


def make_comparable(value: Any) -> Any:
    """Return what is equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, dict):
        return "object", frozenset((name, make_comparable(child)) for name, child in value.items())
    if isinstance(value, list):
        return "array", tuple(map(make_comparable, value))
    return value
