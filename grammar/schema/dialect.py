"""Detects the draft of a schema, and checks the schema against that draft's meta-schema."""

from dataclasses import dataclass
from typing import Any

import jsonschema_rs

from ..errors import InvalidGrammar
from .keywords import iterate_objects, join_pointer


@dataclass(frozen=True, slots=True)
class Dialect:
    """One JSON Schema draft.

    Attributes:
        uri: its `$schema`.
        validator_class: the independent validator of this draft.
        ignores_ref_siblings: up to draft 7, keywords beside `$ref` assert nothing.
        annotates_formats: since draft 2019-09, formats are annotations by default.
    """

    uri: str
    validator_class: type[jsonschema_rs.Validator]
    ignores_ref_siblings: bool = False
    annotates_formats: bool = False


DRAFT_4 = Dialect("http://json-schema.org/draft-04/schema#", jsonschema_rs.Draft4Validator, True)
DRAFT_6 = Dialect("http://json-schema.org/draft-06/schema#", jsonschema_rs.Draft6Validator, True)
DRAFT_7 = Dialect("http://json-schema.org/draft-07/schema#", jsonschema_rs.Draft7Validator, True)
DRAFT_2019 = Dialect(
    "https://json-schema.org/draft/2019-09/schema", jsonschema_rs.Draft201909Validator, annotates_formats=True
)
DRAFT_2020 = Dialect(
    "https://json-schema.org/draft/2020-12/schema", jsonschema_rs.Draft202012Validator, annotates_formats=True
)


def strip_uri(uri: str) -> str:
    """Return a `$schema` without its optional parts."""
    return uri.removeprefix("http://").removeprefix("https://").rstrip("#")


# Forms that newer drafts replaced.
_CHANGED = frozenset(["exclusiveMinimum", "exclusiveMaximum", "dependencies", "items"])
DIALECTS = {strip_uri(d.uri): d for d in (DRAFT_4, DRAFT_6, DRAFT_7, DRAFT_2019, DRAFT_2020)}


def find_named(schema: Any) -> Dialect | None:
    named = schema.get("$schema") if isinstance(schema, dict) else None
    return DIALECTS.get(strip_uri(named)) if isinstance(named, str) else None


def detect_dialect(schema: dict[str, Any] | bool) -> Dialect:
    """Return the draft that `$schema` names, else the newest one that knows the forms the schema uses.

    Draft 2019-09 stands for draft 7's forms: unlike draft 7 it does not ignore keywords beside `$ref`.
    """
    if (named := find_named(schema)) is not None:
        return named
    found = DRAFT_2020
    # Look at every object, schema or not: a guess needs no more.
    for each in iterate_objects(schema):
        if _CHANGED.isdisjoint(each):
            continue
        if any(isinstance(each.get(bound), bool) for bound in ("exclusiveMinimum", "exclusiveMaximum")):
            return DRAFT_4
        if isinstance(each.get("dependencies"), dict) or isinstance(each.get("items"), list):
            found = DRAFT_2019
    return found


def with_dialect(schema: dict[str, Any] | bool, dialect: Dialect) -> dict[str, Any] | bool:
    """Return the schema under a `$schema` that is known: a foreign one would be fetched over the network."""
    return {**schema, "$schema": dialect.uri} if isinstance(schema, dict) else schema


def check_well_formed(schema: dict[str, Any] | bool, place: str = "") -> None:
    """Raise InvalidGrammar, with the pointer, when a schema breaks its draft's meta-schema.

    Documents of other drafts that are bundled in its definitions are each checked by their own.
    """
    dialect = detect_dialect(schema)
    written = dict(schema) if isinstance(schema, dict) else {}
    for keyword in {"$defs", "definitions"} & written.keys():
        definitions = written[keyword] if isinstance(written[keyword], dict) else {}
        bundled = {name: each for name, each in definitions.items() if find_named(each) not in (None, dialect)}
        others = {name: each for name, each in bundled.items() if "$id" in each or "id" in each}
        for name, each in others.items():
            check_well_formed(each, join_pointer(place, keyword, name))
        if others:
            written[keyword] = {**definitions, **{name: {} for name in others}}
    try:
        jsonschema_rs.meta.validate(with_dialect(written, dialect))
    except jsonschema_rs.ValidationError as error:
        pointer = join_pointer(place, *error.instance_path)
        message = f"the schema is malformed at {pointer or '#'}: {error.message}"
        raise InvalidGrammar(message, pointer) from error
    except jsonschema_rs.ReferencingError as error:
        raise InvalidGrammar(f"the schema's $schema or $id cannot be used: {error}") from error
