"""Grammars as files and requests write them: one JSON value or text for each kind."""

from collections.abc import Mapping
from typing import Any

from .csv_table import Table
from .engines.lark import remove_quoted
from .errors import InvalidGrammar
from .spec import GrammarSpec, PropertyOrder, Whitespace, parse_json
from .xml.tree import Document

KINDS = ("json_schema", "regex", "choice", "grammar", "ebnf", "lark", "csv", "xml", "structural_tag")
# Kind -> the fields of its object.
PARTS = {"csv": Table.__struct_fields__, "xml": Document.__struct_fields__}


def read_spec(
    kind: str, value: Any, whitespace: Whitespace = "spaced", backend: str | None = None,
    property_order: PropertyOrder = "schema",
) -> GrammarSpec:
    """Return the spec of a kind from its value in a file or request, or raise GrammarError.

    Args:
        kind: one of KINDS; "grammar" is EBNF or Lark, whichever it proves to be.
        value: a text, or for kinds that are JSON the value or its text: {"columns": ...} for csv;
            {"root": ..., "definitions": ..., "declaration": ...} or an element alone for xml.
    """
    if kind not in KINDS:
        raise InvalidGrammar(f"unknown kind of grammar {kind!r}; choose from {list(KINDS)}")
    if kind == "grammar":
        # EBNF has ::= in every rule, Lark in none; the first one precedes any string.
        kind = "ebnf" if isinstance(value, str) and "::=" in remove_quoted(value) else "lark"
    if kind == "json_schema":
        return GrammarSpec.json_schema(value, whitespace, backend, property_order=property_order)
    if kind == "structural_tag":
        return GrammarSpec.structural_tag(value, whitespace, backend)
    if kind in ("regex", "ebnf", "lark"):
        make = {"regex": GrammarSpec.regex, "ebnf": GrammarSpec.ebnf, "lark": GrammarSpec.lark}[kind]
        return make(value, backend)
    parsed = parse_json(value, kind) if isinstance(value, str) else value
    if kind == "choice":
        if not isinstance(parsed, list):
            raise InvalidGrammar("a choice is a list of strings")
        return GrammarSpec.choice(parsed, backend)
    if not isinstance(parsed, Mapping):
        raise InvalidGrammar(f"{kind} is an object, not {type(parsed).__name__}")
    fields: dict[str, Any] = {"root": parsed} if kind == "xml" and "name" in parsed else dict(parsed)
    unknown = [str(key) for key in fields if key not in PARTS[kind]]
    if unknown:
        known = ", ".join(PARTS[kind])
        raise InvalidGrammar(f"{kind} has the unknown field {unknown[0][:80]!r}; known are {known}")
    # The first one has no default.
    fields.setdefault(PARTS[kind][0], None)
    if kind == "csv":
        return GrammarSpec.csv(**fields, backend=backend)
    return GrammarSpec.xml(**fields, whitespace=whitespace, backend=backend)
