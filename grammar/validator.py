"""The last check of a finished text: a JSON Schema validator independent of the grammar engines."""

from typing import Any

import jsonschema_rs

from .errors import InvalidGrammar
from .json_schema.dialect import detect_dialect, with_dialect
from .json_schema.formats import ASSERTED_FORMATS
from .json_schema.keywords import join_pointer

# Formats the library would assert and we treat as annotations, as the grammar does.
_OTHER_FORMATS = frozenset(
    [
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)


def accept_anything(text: str) -> bool:
    """Stand in for the check of a format that is only an annotation."""
    return True


class SchemaValidator:
    """Validates parsed JSON against a schema, in the draft it is written in; never fetches anything."""

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        dialect = detect_dialect(schema)
        try:
            self._validator = dialect.validator_class(
                with_dialect(schema, dialect),
                formats=dict.fromkeys(_OTHER_FORMATS - ASSERTED_FORMATS, accept_anything),
                validate_formats=True,
                ignore_unknown_formats=True,
                offline=True,
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            raise InvalidGrammar(f"the schema cannot be used for validation: {error}") from error

    def is_valid(self, instance: Any) -> bool:
        """Tell whether an instance is valid."""
        return self._validator.is_valid(instance)

    def first_error(self, instance: Any) -> tuple[str, str] | None:
        """Return (JSON pointer into the instance, message) of the first violation, or None."""
        for error in self._validator.iter_errors(instance):
            return join_pointer("", *error.instance_path), error.message
        return None
