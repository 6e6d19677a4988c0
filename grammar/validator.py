"""The last check of a finished text: a JSON Schema validator independent of the grammar engines."""

from typing import Any
from urllib.parse import quote

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
# Stands for the document while a subschema of it is the schema.
_BASE_URI = "urn:troupe:schema"


def accept_anything(text: str) -> bool:
    """Stand in for the check of a format that is only an annotation."""
    return True


class SchemaValidator:
    """Validates parsed JSON against a schema, in the draft it is written in; never fetches anything.

    Args:
        pointer: JSON pointer to the subschema to validate against; its references mean what they mean in `schema`.
    """

    def __init__(self, schema: dict[str, Any] | bool, pointer: str = "") -> None:
        dialect = detect_dialect(schema)
        document = with_dialect(schema, dialect)
        registry = None
        try:
            if pointer:
                registry = jsonschema_rs.Registry([(_BASE_URI, document)])
                document = {"$ref": f"{_BASE_URI}#{quote(pointer)}"}
            self._validator = dialect.validator_class(
                document,
                registry=registry,
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
