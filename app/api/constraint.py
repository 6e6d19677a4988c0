"""Turns a request's constraint fields into one GrammarSpec, or a 400 that names the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from app.api.errors import BadRequest, to_api_error
from app.api.protocol import GenerationFields, StructuredOutputs
from grammar import GrammarError, GrammarSpec, read_spec

Whitespace = Literal["spaced", "compact", "any"]
PropertyOrder = Literal["schema", "any"]

# names of other engines for the backends
BACKENDS = {"guidance": "llguidance", "outlines": "outlines_core", "auto": None}

# constraints with optional whitespace
SPACED = ("json", "json_object", "xml", "structural_tag")
TAG_PARTS = ("format", "structures", "triggers")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the request field that an error about it should name."""

    param: str
    spec: GrammarSpec


def read_constraint(body: GenerationFields) -> Constraint | None:
    """Find the request's one constraint.

    Raises:
        ApiError: 400 for two constraints, a malformed one, or one that cannot be honoured.
    """
    found = [
        (param, make) for param, make in (*_response_format(body), *_structured_outputs(body), *_guided(body))
    ]
    if len(found) > 1:
        names = " and ".join(param for param, _ in found)
        raise BadRequest(
            f"a request can have one constraint, not {names}", found[1][0], "too_many_constraints"
        )
    if not found:
        return None
    param, make = found[0]
    try:
        return Constraint(param, make())
    except GrammarError as error:
        raise to_api_error(error, param) from error


Candidates = list[tuple[str, Callable[[], GrammarSpec]]]


def _response_format(body: GenerationFields) -> Candidates:
    asked = body.response_format
    if asked is None:
        return []
    if asked.json_schema is not None and asked.type != "json_schema":
        message = f"response_format.json_schema is a part of the type json_schema, not {asked.type}"
        raise BadRequest(message, "response_format")
    parts = {name: getattr(asked, name) for name in TAG_PARTS if getattr(asked, name) is not None}
    if asked.type == "structural_tag":
        return [("response_format", lambda: GrammarSpec.structural_tag(parts))]
    if parts:
        message = (
            f"response_format.{next(iter(parts))} is a part of the type structural_tag, not {asked.type}"
        )
        raise BadRequest(message, "response_format")
    if asked.type == "text":
        return []
    if asked.type == "json_object":
        return [("response_format", GrammarSpec.json_object)]
    if asked.json_schema is None:
        raise BadRequest("response_format.json_schema is required", "response_format", "missing_field")
    schema = asked.json_schema.schema_
    return [("response_format", lambda: GrammarSpec.json_schema(schema))]


def _structured_outputs(body: GenerationFields) -> Candidates:
    asked = body.structured_outputs
    if asked is None:
        return []
    for name in ("whitespace_pattern", "disable_additional_properties"):
        if getattr(asked, name):
            raise BadRequest(
                f"structured_outputs.{name} is not supported", "structured_outputs", "unsupported_field"
            )
    backend = _backend(asked.backend, "structured_outputs")
    whitespace: Whitespace = "compact" if asked.disable_any_whitespace else asked.whitespace or "spaced"
    given = (asked.json_, asked.regex, asked.choice, asked.grammar, asked.json_object)
    candidates = _candidates(
        "structured_outputs.", given, backend, whitespace, asked.property_order or "schema"
    )
    if asked.property_order is not None and asked.json_ is None:
        message = "structured_outputs.property_order belongs to structured_outputs.json"
        raise BadRequest(message, "structured_outputs")
    for kind in ("csv", "xml", "structural_tag"):
        if (value := getattr(asked, kind)) is not None:
            candidates.append(
                (f"structured_outputs.{kind}", partial(read_spec, kind, value, whitespace, backend))
            )
    if not candidates:
        raise BadRequest("structured_outputs names no constraint", "structured_outputs", "missing_field")
    _check_whitespace(asked, {param.removeprefix("structured_outputs.") for param, _ in candidates})
    return candidates


def _guided(body: GenerationFields) -> Candidates:
    if body.guided_whitespace_pattern is not None:
        name = "guided_whitespace_pattern"
        raise BadRequest(f"{name} is not supported", name, "unsupported_field")
    backend = _backend(body.guided_decoding_backend, "guided_decoding_backend")
    given = (
        *(body.guided_json, body.guided_regex, body.guided_choice),
        *(body.guided_grammar, body.guided_json_object),
    )
    return _candidates("guided_", given, backend)


def _candidates(
    prefix: str,
    given: Sequence[Any],
    backend: str | None,
    whitespace: Whitespace = "spaced",
    order: PropertyOrder = "schema",
) -> Candidates:
    """The constraints that are not None among a schema, a regex, a choice, a grammar and whether to write JSON."""
    schema, regex, choice, grammar, json_object = given
    found: Candidates = []
    if schema is not None:
        make = partial(GrammarSpec.json_schema, schema, whitespace, backend, property_order=order)
        found.append((prefix + "json", make))
    if regex is not None:
        found.append((prefix + "regex", lambda: GrammarSpec.regex(regex, backend)))
    if choice is not None:
        found.append((prefix + "choice", lambda: GrammarSpec.choice(choice, backend)))
    if grammar is not None:
        found.append((prefix + "grammar", partial(read_spec, "grammar", grammar, backend=backend)))
    if json_object:
        found.append((prefix + "json_object", lambda: GrammarSpec.json_object(whitespace, backend)))
    return found


def _check_whitespace(asked: StructuredOutputs, kinds: set[str]) -> None:
    """Reject whitespace options for constraints without optional whitespace, and conflicting values."""
    given = {"whitespace": asked.whitespace, "disable_any_whitespace": asked.disable_any_whitespace or None}
    options = [f"structured_outputs.{name}={value!r}" for name, value in given.items() if value is not None]
    if options and kinds.isdisjoint(SPACED):
        message = f"{options[0]} belongs to {', '.join(SPACED[:-1])} or {SPACED[-1]}"
        raise BadRequest(message, "structured_outputs")
    if len(options) == 2 and asked.whitespace != "compact":
        raise BadRequest(f"{' and '.join(options)} exclude each other", "structured_outputs")


def _backend(name: str | None, param: str) -> str | None:
    if name is None:
        return None
    # vLLM's old form carries options behind a colon, such as "guidance:no-fallback"
    plain = name.split(":", 1)[0]
    if plain == "lm-format-enforcer":
        raise BadRequest(f"{name!r} is not a backend of this server", param, "unsupported_field")
    return BACKENDS.get(plain, plain)
