"""Grammars as files and requests write them: one JSON value or text for each kind."""

from collections.abc import Mapping
from typing import Any

from .engines.lark import remove_quoted
from .errors import InvalidGrammar
from .spec import GrammarSpec, PropertyOrder, Whitespace, parse_json

KINDS = ("json_schema", "regex", "choice", "grammar", "ebnf", "lark", "csv", "xml", "structural_tag")
CSV_PARTS = ("columns", "has_header", "delimiter", "is_quoting")
XML_PARTS = ("root", "definitions", "declaration")


def read_spec(
    kind: str,
    value: Any,
    whitespace: Whitespace = "spaced",
    backend: str | None = None,
    property_order: PropertyOrder = "schema",
) -> GrammarSpec:
    """Return the spec of a kind from what is written for it, or raise GrammarError.

    Args:
        kind: one of KINDS; "grammar" is EBNF or Lark, whichever it proves to be.
        value: a text, or for kinds that are JSON the value or its text: {"columns": ...} for csv;
            {"root": ..., "definitions": ..., "declaration": ...} or an element alone for xml.
    """
    if kind not in KINDS:
        raise InvalidGrammar(f"unknown kind of grammar {kind!r}; choose from {list(KINDS)}")
    if kind in ("regex", "grammar", "ebnf", "lark"):
        return _read_text(kind, value, backend)
    if kind == "json_schema":
        return GrammarSpec.json_schema(value, whitespace, backend, property_order=property_order)
    if kind == "structural_tag":
        return GrammarSpec.structural_tag(value, whitespace, backend)
    parsed = parse_json(value, kind) if isinstance(value, str) else value
    if kind == "choice":
        if not isinstance(parsed, list):
            raise InvalidGrammar("a choice is a list of strings")
        return GrammarSpec.choice(parsed, backend)
    if not isinstance(parsed, Mapping):
        raise InvalidGrammar(f"{kind} is an object, not {type(parsed).__name__}")
    return _read_csv(parsed, backend) if kind == "csv" else _read_xml(parsed, whitespace, backend)


def _read_text(kind: str, text: Any, backend: str | None) -> GrammarSpec:
    if kind == "regex":
        return GrammarSpec.regex(text, backend)
    if kind == "grammar":
        # EBNF has ::= in every rule, Lark in none; the first one stands before any string.
        kind = "ebnf" if isinstance(text, str) and "::=" in remove_quoted(text) else "lark"
    return GrammarSpec.ebnf(text, backend) if kind == "ebnf" else GrammarSpec.lark(text, backend)


def _read_csv(table: Mapping[str, Any], backend: str | None) -> GrammarSpec:
    _check_parts(table, "csv", CSV_PARTS)
    columns = table.get("columns")
    if not isinstance(columns, Mapping):
        raise InvalidGrammar("csv.columns is an object: name -> type, or a list of values")
    for name in ("has_header", "is_quoting"):
        if not isinstance(table.get(name, True), bool):
            raise InvalidGrammar(f"csv.{name} is true or false, not {str(table[name])[:80]!r}")
    return GrammarSpec.csv(**table, backend=backend)


def _read_xml(tree: Mapping[str, Any], whitespace: Whitespace, backend: str | None) -> GrammarSpec:
    document = {"root": tree} if "name" in tree else tree
    _check_parts(document, "xml", XML_PARTS)
    root, definitions = document.get("root"), document.get("definitions")
    if not isinstance(root, Mapping):
        raise InvalidGrammar("xml.root is an element: an object with a name")
    declaration: Any = document.get("declaration", "none")
    return GrammarSpec.xml(root, definitions, declaration, whitespace, backend)


def _check_parts(value: Mapping[str, Any], kind: str, known: tuple[str, ...]) -> None:
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise InvalidGrammar(
            f"{kind} has the unknown field {unknown[0][:80]!r}; known are {', '.join(known)}"
        )
