"""The last check of a finished text: a JSON Schema validator independent of the grammar engines."""

from typing import Any

import jsonschema_rs

from .errors import InvalidGrammar, is_panic
from .json_schema.dialect import DRAFT_4, detect_dialect, with_dialect
from .json_schema.formats import ASSERTED_FORMATS
from .json_schema.identifiers import BASE_URI, encode_reference, join_uri, write_reference
from .json_schema.keywords import join_pointer
from .json_schema.references import map_schemas

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


_UNUSABLE = (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError)


def accept_anything(text: str) -> bool:
    """Stand in for the check of a format that is only an annotation."""
    return True


class SchemaDocument:
    """A schema, and the validators of the subschemas in it, in the draft it is written in; never fetches anything.

    Raises:
        InvalidGrammar: the schema is nested too deeply.
    """

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        self._dialect = detect_dialect(schema)
        try:
            self._schema = map_schemas(with_dialect(schema, self._dialect), encode_references)
        except RecursionError as error:
            raise InvalidGrammar(
                "the schema cannot be used for validation: it is nested too deeply"
            ) from error
        self._registry: jsonschema_rs.Registry | None = None

    def make_validator(self, pointer: str = "") -> jsonschema_rs.Validator:
        """Return the validator of the subschema at a JSON pointer; its references mean what they mean in the document.

        Raises:
            InvalidGrammar: the library cannot use the schema.
        """
        try:
            return self._dialect.validator_class(
                self._refer(pointer) if pointer else self._schema,
                registry=self._registry,
                formats=dict.fromkeys(_OTHER_FORMATS - ASSERTED_FORMATS, accept_anything),
                validate_formats=True,
                ignore_unknown_formats=True,
                offline=True,
            )
        except BaseException as error:
            # Over some references the library panics, which is no Exception.
            if not isinstance(error, _UNUSABLE) and not is_panic(error):
                raise
            raise InvalidGrammar(f"the schema cannot be used for validation: {error}") from error

    def _refer(self, pointer: str) -> dict[str, Any]:
        """Return a schema that is but a reference to a subschema."""
        uri = self._name()
        if self._registry is None:
            self._registry = jsonschema_rs.Registry([(uri, self._schema)])
        return {"$ref": uri + write_reference(pointer)}

    def _name(self) -> str:
        """Return the URI of the document: its own, since references in it may be relative to that."""
        schema = self._schema if isinstance(self._schema, dict) else {}
        identifier = schema.get("id" if self._dialect is DRAFT_4 else "$id")
        if not isinstance(identifier, str) or (self._dialect.ignores_ref_siblings and "$ref" in schema):
            return BASE_URI
        return join_uri(BASE_URI, identifier).partition("#")[0]


class SchemaValidator:
    """Validates parsed JSON against a schema.

    Args:
        pointer: JSON pointer to the subschema to validate against; its references mean what they mean in `schema`.
    """

    def __init__(self, schema: dict[str, Any] | bool, pointer: str = "") -> None:
        self._validator = SchemaDocument(schema).make_validator(pointer)

    def is_valid(self, instance: Any) -> bool:
        """Tell whether an instance is valid."""
        return self._validator.is_valid(instance)

    def first_error(self, instance: Any) -> tuple[str, str] | None:
        """Return (JSON pointer into the instance, message) of the first violation, or None."""
        for error in self._validator.iter_errors(instance):
            return join_pointer("", *error.instance_path), error.message
        return None


def encode_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema object whose `$ref` the library can read."""
    ref = schema.get("$ref")
    return {**schema, "$ref": encode_reference(ref)} if isinstance(ref, str) else schema
