"""A schema for a text, which a person edits: by its labels and patterns, or by the model under a grammar."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from app.extraction import Extractor, Schema
from app.extraction.dates import find_dates
from app.ui.schema.form import KINDS

MAX_FIELDS = 24
MAX_LABEL_CHARS, MAX_LABEL_WORDS = 40, 5
MAX_TEXT_CHARS = 6000  # a schema shows in the beginning of a text
LIST = " (list)"
SIMPLE = [kind for kind in KINDS if kind not in ("choice", "group")]
ITEM = re.compile(r"\s*[-*•]?\s*\d{1,5} ?[x×] \S")
AMOUNT = re.compile(r"[-−]?(?:[€$£¥] ?)?\d(?:[\d.,']{0,20}\d)?(?: ?(?:[€$£¥%]|[A-Z]{3}\b))?")
MAIL, LINK, CLOCK = (
    re.compile(r"[^\s@]+@[^\s@]+\.\w+"),
    re.compile(r"https?://\S+"),
    re.compile(r"\d{1,2}:\d{2}"),
)
MAX_DIGITS = 9  # longer runs of digits are identifiers
ITEMS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "description": KINDS["text"],
            "quantity": KINDS["whole number"],
            "price": KINDS["number"],
        },
        "required": ["description", "quantity"],
    },
}
TASK = (
    "The record describes a form for documents like this one: its title, and a field for each fact that such documents "
    "state. A field has a short name in snake_case and the kind of its values; lists have a kind that ends in (list)."
)
PROPOSAL: Schema = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 40},
        "fields": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_FIELDS,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,29}$"},
                    "kind": {"enum": [*SIMPLE, *(kind + LIST for kind in SIMPLE)]},
                },
                "required": ["name", "kind"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "fields"],
    "additionalProperties": False,
}


async def propose_schema(extractor: Extractor, text: str, salt: str) -> Schema | None:
    """Return the model's proposal; None if it has no field.

    Raises:
        EngineError: the engine refused or lost the request.
    """
    result = await extractor.extract(PROPOSAL, text[:MAX_TEXT_CHARS], cache_salt=salt)
    record: Any = result.record if isinstance(result.record, dict) else {}
    # An answer that was cut off may have a field without a kind.
    whole = [
        each for each in record.get("fields", ()) if each.get("kind") in KINDS or LIST in each.get("kind", "")
    ]
    found = ((str(each["name"]), str(each["kind"])) for each in whole)
    return _make_schema(str(record.get("title", "")), found)


def suggest_schema(text: str) -> Schema | None:
    """Return a schema with the labelled values of a text, its dates, addresses, amounts and items; None without any."""
    return _make_schema("Record", _list_fields(text[:MAX_TEXT_CHARS]))


def _list_fields(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and kinds in the order of the text."""
    for line in text.splitlines():
        label, mark, value = line.partition(":")
        name = _name(label)
        is_label = name and len(label) <= MAX_LABEL_CHARS and len(label.split()) <= MAX_LABEL_WORDS
        if ITEM.match(line):
            yield "items", "items"
        elif is_label and mark and value[:1].isspace() and value.strip():
            yield name, _find_kind(value.strip())
        else:
            yield from _list_patterns(line)


def _list_patterns(line: str) -> Iterator[tuple[str, str]]:
    if MAIL.search(line):
        yield "email", "email"
    if LINK.search(line):
        yield "link", "link"
    if any(find_dates(line)):
        yield "date", "date"
    if CLOCK.search(line):
        yield "time", "time"
    found = [each.lstrip("-−") for each in AMOUNT.findall(line)]
    if not all(each[0].isdigit() and each[-1].isdigit() for each in found):
        yield "amount", "number"


def _find_kind(value: str) -> str:
    """Return the kind of the form that fits a value."""
    if value.lower() in ("yes", "no", "true", "false"):
        return "yes or no"
    for kind, pattern in (("email", MAIL), ("link", LINK), ("time", CLOCK)):
        if pattern.fullmatch(value):
            return kind
    if any(start == 0 and end == len(value) for _, start, end in find_dates(value)):
        return "date"
    if value.isdecimal() and len(value) <= MAX_DIGITS and not value.startswith("0"):
        return "whole number"
    return "number" if AMOUNT.fullmatch(value) and not value.isdecimal() else "text"


def _name(label: str) -> str:
    """Return a label in snake_case; "" if it does not begin with a letter."""
    plain = unicodedata.normalize("NFKD", label.strip(" \t-*•#>")).encode("ascii", "ignore").decode().lower()
    name = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    return name if name[:1].isalpha() else ""


def _make_schema(title: str, fields: Iterable[tuple[str, str]]) -> Schema | None:
    """Return the schema of named kinds; a name with two values is a list."""
    properties: dict[str, Schema] = {}
    for name, kind in fields:
        if kind == "items":
            properties[name] = ITEMS
        elif name in properties:
            inner = properties[name]
            properties[name] = inner if inner.get("type") == "array" else {"type": "array", "items": inner}
        elif len(properties) < MAX_FIELDS:
            inner = KINDS[kind.removesuffix(LIST)]
            properties[name] = {"type": "array", "items": inner} if kind.endswith(LIST) else inner
    if not properties:
        return None
    return {"title": title, "type": "object", "properties": properties, "required": list(properties)}
