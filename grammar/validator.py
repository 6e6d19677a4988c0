"""The last check of a finished text: a JSON Schema validator independent of the grammar engines."""

from collections.abc import Iterable
from typing import Any

import jsonschema_rs

from .errors import InvalidGrammar, is_panic
from .regex.dialects import read_ecma, read_names
from .regex.text import may_backtrack
from .schema.dialect import Dialect, detect_dialect, find_named, with_dialect
from .schema.formats import CHECKED_FORMATS
from .schema.identifiers import encode_reference
from .schema.keywords import SCHEMA_MAP_KEYWORDS, iterate_objects, join_pointer, split_pointer

# Patterns with look-around or back references can take exponential time, during which every thread waits. After
# these steps, about a millisecond, the library gives up; ordinary patterns take three steps a character.
MAX_BACKTRACKS = 50_000
# A pattern that reaches them over a text this short takes exponential time, or the fourth power of the length.
PROBE_LENGTH = 32
MAX_NUM_PROBED = 32  # characters of a pattern
_PATTERN_OPTIONS = jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS)

_UNUSABLE = (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, KeyError)


class SchemaValidator:
    """Validates parsed JSON against a schema, in the draft it is written in; never fetches anything.

    Attributes:
        backtracking: the patterns in the schema that may take more than linear time.

    Args:
        pointer: JSON pointer to the subschema to validate against; its references mean what they mean in `schema`.
        dialect: the draft, where the schema does not say it; all formats are asserted then.

    Raises:
        InvalidGrammar: the library cannot use the schema.
    """

    def __init__(self, schema: dict[str, Any] | bool, pointer: str = "", dialect: Dialect | None = None) -> None:
        draft = dialect or detect_dialect(schema)
        is_annotating = dialect is None and find_named(schema) is not None and draft.annotates_formats
        try:
            written = translate(with_dialect(schema, draft))
            self.backtracking = list_backtracking(written)
            options: dict[str, Any] = {
                # A format that is only an annotation accepts any value.
                "formats": dict.fromkeys(CHECKED_FORMATS, lambda text: True) if is_annotating else {},
                "validate_formats": True,
                "ignore_unknown_formats": True,
                "pattern_options": _PATTERN_OPTIONS,
                "offline": True,
            }
            if pointer:
                place = _translate_pointer(pointer, schema, written)
                self._validator = jsonschema_rs.validator_map_for(written, **options)[place]
            else:
                self._validator = draft.validator_class(written, **options)
        except RecursionError as error:
            reason = "it is nested too deeply"
            raise InvalidGrammar(f"the schema cannot be used for validation: {reason}") from error
        except BaseException as error:
            # For some references the library panics with an error that is not an Exception.
            if not isinstance(error, _UNUSABLE) and not is_panic(error):
                raise
            raise InvalidGrammar(f"the schema cannot be used for validation: {error}") from error

    def is_valid(self, instance: Any) -> bool:
        """Return whether an instance is valid; raise InvalidGrammar where a pattern takes too long."""
        if self._validator.is_valid(instance):
            return True
        if self.backtracking:
            check_steps(self._validator.iter_errors(instance))
        return False

    def first_error(self, instance: Any) -> tuple[str, str] | None:
        """Return (JSON pointer into the instance, message) of the first violation, or None.

        Raises:
            InvalidGrammar: a pattern takes too long.
        """
        errors = list(self._validator.iter_errors(instance))
        check_steps(errors)
        return (join_pointer("", *errors[0].instance_path), errors[0].message) if errors else None


def _translate_pointer(pointer: str, schema: Any, written: Any) -> str:
    """Return a place as the library names it: not percent-encoded, with patterns as names in its own syntax."""
    names = []
    for name in split_pointer(pointer):
        key: Any = int(name) if isinstance(schema, list) else name
        ours = key if isinstance(schema, list) or key in written else list(written)[list(schema).index(key)]
        names.append(str(ours))
        schema, written = schema[key], written[ours]
    return "#" + join_pointer("", *names)


def check_steps(errors: Iterable[jsonschema_rs.ValidationError]) -> None:
    """Raise InvalidGrammar if a pattern reached the limit of steps, because its result is then unknown."""
    for error in errors:
        if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.BacktrackLimitExceeded):
            raise InvalidGrammar(
                f"a pattern backtracks more than {MAX_BACKTRACKS} steps over the value at "
                f"{join_pointer('', *error.instance_path) or '#'}"
            )


def list_backtracking(schema: dict[str, Any] | bool) -> list[str]:
    """Return the patterns in a schema that may take more than linear time."""
    found: dict[str, None] = {}
    # References may point below any keyword, so the whole document is searched.
    for each in iterate_objects(schema):
        names = each.get("patternProperties")
        patterns = [each.get("pattern"), *(names if isinstance(names, dict) else ())]
        found.update(dict.fromkeys(pattern for pattern in patterns if isinstance(pattern, str)))
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


def translate(value: Any) -> Any:
    """Return a document in which all references and patterns of schemas are written as the library reads them."""
    if isinstance(value, list):
        return [translate(child) for child in value]
    if not isinstance(value, dict):
        return value
    encoded: dict[str, Any] = {}
    for name, child in value.items():
        if name in SCHEMA_MAP_KEYWORDS and isinstance(child, dict):
            encoded[name] = {key: translate(each) for key, each in child.items()}
            if name == "patternProperties":
                encoded[name] = read_names(encoded[name])
        elif name == "pattern" and isinstance(child, str):
            encoded[name] = read_ecma(child)
        else:
            encoded[name] = child if name in ("const", "enum") else translate(child)
    ref = encoded.get("$ref")
    return {**encoded, "$ref": encode_reference(ref)} if isinstance(ref, str) else encoded
