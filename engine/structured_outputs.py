"""StructuredOutputsParams: a constraint under vLLM's names, of which a GrammarSpec is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from engine.errors import InvalidRequest
from grammar import GrammarSpec, read_spec

_FIELD = "structured_outputs"


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """One of the first six fields says what the output must be."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False  # without effect: there is one backend
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def read_structured_outputs(given: object) -> GrammarSpec:
    """Return the grammar of a StructuredOutputsParams, or of a mapping with its fields.

    Raises:
        InvalidRequest: it has none or several constraints, an unknown field, or one that is not supported.
        GrammarError: the constraint is malformed.
    """
    names = [each.name for each in fields(StructuredOutputsParams)]
    if isinstance(given, dict):
        if unknown := [key for key in given if key not in names]:
            raise InvalidRequest(f"{_FIELD} has no field {unknown[0]!r}; known are {', '.join(names)}", _FIELD)
        given = StructuredOutputsParams(**given)
    if not isinstance(given, StructuredOutputsParams):
        raise InvalidRequest(f"{_FIELD} must be a StructuredOutputsParams, not {type(given).__name__}", _FIELD)
    for name in ("disable_additional_properties", "whitespace_pattern"):
        if getattr(given, name):
            raise InvalidRequest(f"{_FIELD}.{name} is not supported; write it into the schema", _FIELD)
    found = [name for name in names[:6] if getattr(given, name) not in (None, False)]
    if len(found) != 1:
        raise InvalidRequest(f"{_FIELD} needs one constraint, not {' and '.join(found) or 'none'}", _FIELD)
    kind, value = found[0], getattr(given, found[0])
    whitespace = "compact" if given.disable_any_whitespace else "spaced"
    if kind == "json_object":
        return GrammarSpec.json_object(whitespace)  # type: ignore[arg-type]
    return read_spec("json_schema" if kind == "json" else kind, value, whitespace)  # type: ignore[arg-type]
