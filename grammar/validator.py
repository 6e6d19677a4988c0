"""The last check of a finished text: a JSON Schema validator independent of the grammar engines."""

from collections.abc import Iterable
from typing import Any

import jsonschema_rs

from .errors import InvalidGrammar, is_panic
from .regex.linear_pattern import may_backtrack
from .schema.dialect import DRAFT_4, Dialect, detect_dialect, is_dialect_named, with_dialect
from .schema.formats import CHECKED_FORMATS
from .schema.identifiers import BASE_URI, encode_reference, join_uri, write_reference
from .schema.keywords import SCHEMA_MAP_KEYWORDS, join_pointer

# Patterns with look-around or back references can take exponential time, during which every thread waits. After
# these steps, about a millisecond, the library gives up; ordinary patterns take three steps a character.
MAX_BACKTRACKS = 50_000
# A pattern that reaches them over a text this short takes exponential time, or the fourth power of the length.
PROBE_LENGTH = 32
MAX_NUM_PROBED = 32  # characters of a pattern
_PATTERN_OPTIONS = jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS)

_UNUSABLE = (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError)


def accept_anything(text: str) -> bool:
    """Stand in for the check of a format that is only an annotation."""
    return True


class SchemaDocument:
    """A schema, and the validators of the subschemas in it, in the draft it is written in; never fetches anything.

    Attributes:
        backtracking: the patterns in it that may take more than linear time.

    Args:
        dialect: the draft, where the schema does not say it; all formats are asserted then.

    Raises:
        InvalidGrammar: the schema is nested too deeply.
    """

    def __init__(self, schema: dict[str, Any] | bool, dialect: Dialect | None = None) -> None:
        self._dialect = dialect or detect_dialect(schema)
        is_annotating = dialect is None and is_dialect_named(schema) and self._dialect.annotates_formats
        self._annotations = CHECKED_FORMATS if is_annotating else frozenset()
        try:
            self._schema = encode_references(with_dialect(schema, self._dialect))
        except RecursionError as error:
            raise InvalidGrammar(
                "the schema cannot be used for validation: it is nested too deeply"
            ) from error
        self.backtracking = list_backtracking(self._schema)

    def make_validator(self, pointer: str = "") -> jsonschema_rs.Validator:
        """Return the validator of the subschema at a JSON pointer; its references mean what they mean in the document.

        Raises:
            InvalidGrammar: the library cannot use the schema.
        """
        try:
            return self._dialect.validator_class(
                {"$ref": self._name() + write_reference(pointer)} if pointer else self._schema,
                registry=jsonschema_rs.Registry([(self._name(), self._schema)]) if pointer else None,
                formats=dict.fromkeys(self._annotations, accept_anything),
                validate_formats=True,
                ignore_unknown_formats=True,
                pattern_options=_PATTERN_OPTIONS,
                offline=True,
            )
        except BaseException as error:
            # Over some references the library panics, which is no Exception.
            if not isinstance(error, _UNUSABLE) and not is_panic(error):
                raise
            raise InvalidGrammar(f"the schema cannot be used for validation: {error}") from error

    def is_valid(self, validator: jsonschema_rs.Validator, instance: Any) -> bool:
        """Tell whether an instance is valid for one of this document's validators.

        Raises:
            InvalidGrammar: a pattern reached the limit of steps, so nothing is known.
        """
        if validator.is_valid(instance):
            return True
        if self.backtracking:
            check_steps(validator.iter_errors(instance))
        return False

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
        dialect: the draft, where the schema does not say it; all formats are asserted then.
    """

    def __init__(
        self, schema: dict[str, Any] | bool, pointer: str = "", dialect: Dialect | None = None
    ) -> None:
        self._document = SchemaDocument(schema, dialect)
        self._validator = self._document.make_validator(pointer)

    def is_valid(self, instance: Any) -> bool:
        """Tell whether an instance is valid; raise InvalidGrammar where a pattern takes too long."""
        return self._document.is_valid(self._validator, instance)

    def first_error(self, instance: Any) -> tuple[str, str] | None:
        """Return (JSON pointer into the instance, message) of the first violation, or None.

        Raises:
            InvalidGrammar: a pattern takes too long.
        """
        errors = list(self._validator.iter_errors(instance))
        check_steps(errors)
        return (join_pointer("", *errors[0].instance_path), errors[0].message) if errors else None


def check_steps(errors: Iterable[jsonschema_rs.ValidationError]) -> None:
    """Raise InvalidGrammar if a pattern reached the limit of steps: that is no verdict on the instance."""
    for error in errors:
        if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded):
            raise InvalidGrammar(
                f"a pattern backtracks more than {MAX_BACKTRACKS} steps over the value at "
                f"{join_pointer('', *error.instance_path) or '#'}"
            )


def list_backtracking(schema: dict[str, Any] | bool) -> list[str]:
    """Return the patterns in a schema that may take more than linear time."""
    found: dict[str, None] = {}
    # References may lead to schemas below any keyword, so everything is searched.
    pending: list[Any] = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            names = each.get("patternProperties")
            patterns = [each.get("pattern"), *(names if isinstance(names, dict) else ())]
            found.update(dict.fromkeys(pattern for pattern in patterns if isinstance(pattern, str)))
        pending.extend(each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
    return list(filter(may_backtrack, found))


def find_slow_text(pattern: str) -> str | None:
    """Return a text of a few characters over which a pattern reaches the limit of steps, None where none is found."""
    validator = SchemaValidator({"pattern": pattern})
    for character in list(dict.fromkeys(pattern))[:MAX_NUM_PROBED]:
        for text in (character * PROBE_LENGTH, character * PROBE_LENGTH + "\n!"):
            try:
                validator.is_valid(text)
            except InvalidGrammar:
                return text
    return None


def encode_references(value: Any) -> Any:
    """Return a document in which every `$ref` of what may be a schema is written as the library reads it."""
    if isinstance(value, list):
        return [encode_references(child) for child in value]
    if not isinstance(value, dict):
        return value
    encoded = {}
    for name, child in value.items():
        if name in SCHEMA_MAP_KEYWORDS and isinstance(child, dict):
            encoded[name] = {key: encode_references(each) for key, each in child.items()}
        else:
            encoded[name] = child if name in ("const", "enum") else encode_references(child)
    ref = encoded.get("$ref")
    return {**encoded, "$ref": encode_reference(ref)} if isinstance(ref, str) else encoded
