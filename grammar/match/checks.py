"""The checks of one document: which of them a complete value fails."""

import json
from typing import Any

from ..errors import InvalidGrammar
from ..schema.dialect import DRAFT_2020
from ..schema.emit import write_for_validator
from ..schema.places import Check, Place, PlaceMap
from ..validator import SchemaValidator
from .closing_tokens import ClosingTokens


class ResidualChecks:
    """Validates values against nodes, with one validator for each, made when it is first needed.

    Attributes:
        places: where a check applies.
        tokens: the tokens that can complete a value.
        may_backtrack: a pattern in the document may take more than linear time.

    Args:
        document: the schema as the user wrote it; the whole text is validated against it.

    Raises:
        InvalidGrammar: the schema cannot be used for validation.
    """

    def __init__(self, document: Any, places: PlaceMap, tokens: ClosingTokens) -> None:
        self.places = places
        self.tokens = tokens
        whole = SchemaValidator(document)
        self.may_backtrack = bool(whole.backtracking)
        self._validators = {places.root_check.node: whole}

    def find_violation(self, place: Place, value: bytes, before: bytes) -> Check | None:
        """Return the first check that a complete value fails.

        Args:
            before: the text from the bracket around the value to the value.

        Raises:
            InvalidGrammar: a pattern takes too many steps over the value.
        """
        try:
            instance = json.loads(value)
        except (ValueError, RecursionError):
            # Refuse values that cannot be checked: invalid UTF-8, or numbers with more digits than Python reads.
            return place.checks[0]
        return next((check for check in place.checks if not self._passes(check, instance, before)), None)

    def _passes(self, check: Check, instance: Any, before: bytes) -> bool:
        if check.is_distinct:
            known = (make_comparable(sibling) for sibling in read_elements(before))
            return make_comparable(instance) not in known
        try:
            if check.node not in self._validators:
                written = write_for_validator(check.node)
                self._validators[check.node] = SchemaValidator(written, dialect=DRAFT_2020)
        except InvalidGrammar:
            # As above, a schema that cannot be used alone ends the text with an error instead of crashing the engine.
            return False
        return self._validators[check.node].is_valid(instance)


def read_elements(before: bytes) -> list[Any]:
    elements: list[Any] = json.loads(before.rstrip(b", \t\r\n") + b"]")
    return elements


def make_comparable(value: Any) -> Any:
    """Return a representation that is equal for equal JSON values: 1 equals 1.0, but not true."""
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, dict):
        return "object", frozenset((name, make_comparable(child)) for name, child in value.items())
    if isinstance(value, list):
        return "array", tuple(map(make_comparable, value))
    return value
