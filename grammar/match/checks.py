"""The checks of one document: which of them a complete value fails."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema_rs

from ..errors import InvalidGrammar
from ..regex.assertions import find_excluded_starts
from ..regex.linear_pattern import LinearPattern, read_pattern
from ..schema.check import Check
from ..schema.places import Site
from ..schema.weaken import find_at
from ..validator import SchemaDocument


class ResidualChecks:
    """Validates values against schemas within a document, with one validator for each.

    Attributes:
        may_backtrack: a pattern in the document may take more than linear time.

    Args:
        first: checks whose validators are made at once; more are made when they are needed.

    Raises:
        InvalidGrammar: the schema cannot be used for validation.
    """

    def __init__(self, schema: dict[str, Any], first: Iterable[Check] = ()) -> None:
        self._schema = schema
        self._document = SchemaDocument(schema)
        self.may_backtrack = bool(self._document.backtracking)
        pointers = dict.fromkeys(["", *(check.pointer for check in first)])
        self._validators = {pointer: self._document.make_validator(pointer) for pointer in pointers}
        self._excluded: dict[Check, tuple[LinearPattern, ...]] = {}

    def find_violation(self, site: Site, value: bytes, before: bytes) -> Check | None:
        """Return the first check that a complete value fails.

        Args:
            before: the text from the bracket around the value to the value.

        Raises:
            InvalidGrammar: a pattern takes too many steps over the value.
        """
        try:
            instance = json.loads(value)
        except (ValueError, RecursionError):
            # Not UTF-8, or a number of more digits than Python reads: what cannot be checked is not let through.
            return site.checks[0]
        return next((check for check in site.checks if not self._passes(check, instance, before)), None)

    def find_doomed(self, site: Site, content: bytes) -> Check | None:
        """Return a check that a string fails whatever is added to what stands of it.

        Args:
            content: what stands of the string, behind its quote.
        """
        excluded = [(check, pattern) for check in site.checks for pattern in self._excluded_starts(check)]
        if not excluded:
            return None
        try:
            text = json.loads(b'"%b"' % content, strict=False)
        except ValueError:
            # It ends in the middle of a character or an escape, and there will be more.
            return None
        return next((check for check, pattern in excluded if pattern.matches(text)), None)

    def _excluded_starts(self, check: Check) -> tuple[LinearPattern, ...]:
        """Return the patterns of texts with which no string may begin that passes the check."""
        found = self._excluded.get(check)
        if found is None:
            found = self._excluded[check] = tuple(self._read_excluded_starts(check))
        return found

    def _read_excluded_starts(self, check: Check) -> Iterator[LinearPattern]:
        schema = {} if check.is_alone or check.is_distinct else find_at(self._schema, check.pointer)
        # Beside a reference a pattern asserts nothing in the older drafts.
        if isinstance(schema, dict) and "pattern" in schema and "$ref" not in schema:
            patterns = map(read_pattern, find_excluded_starts(schema["pattern"]))
            yield from (pattern for pattern in patterns if pattern is not None)

    def _passes(self, check: Check, instance: Any, before: bytes) -> bool:
        if check.is_distinct:
            known = (make_comparable(sibling) for sibling in read_elements(before))
            return make_comparable(instance) not in known
        try:
            validator = self._find_validator(check.pointer)
        except InvalidGrammar:
            # As above: a document whose parts cannot be read alone ends the text, not the engine.
            return False
        return self._document.is_valid(validator, {instance: None} if check.is_alone else instance)

    def _find_validator(self, pointer: str) -> jsonschema_rs.Validator:
        if pointer not in self._validators:
            self._validators[pointer] = self._document.make_validator(pointer)
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
