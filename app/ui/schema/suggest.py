"""A schema from a description: its names as fields, or what the model proposes for a text under a grammar."""

from __future__ import annotations

import re
from typing import Any

from app.extraction import Extractor, Schema
from app.ui.schema.form import KINDS

MAX_FIELDS = 24
MAX_TEXT_CHARS = 6000  # a schema shows in the beginning of a text
LIST = " (list)"
SIMPLE = [kind for kind in KINDS if kind not in ("choice", "group")]
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


# Words in a field's name, and the kind that they suggest.
KIND_WORDS = {
    "date": "date", "birthday": "date", "deadline": "date", "time": "time", "email": "email", "mail": "email",
    "url": "link", "link": "link", "website": "link", "total": "number", "price": "number", "amount": "number",
    "cost": "number", "salary": "number", "sum": "number", "tax": "number", "fee": "number", "rate": "number",
    "quantity": "whole number", "count": "whole number", "age": "whole number", "year": "whole number",
    "is": "yes or no", "has": "yes or no",
}
A_COUNT, AN_AMOUNT = re.compile(r"\b(number|count|quantity) of\b|\bhow many\b"), re.compile(r"\bhow much\b")
MAX_WORDS = 4
SENTENCE = re.compile(r"[.!?]\s|[.!?]$")


def read_names(wish: str) -> Schema | None:
    """Return a schema with a field for each name in a list such as "customer, order date, skills (list)".

    None for what is not a list of names, as a sentence.
    """
    names = [name.strip() for name in re.split(r"[,;\n]| and ", wish) if name.strip()]
    if SENTENCE.search(wish) or not names or any(len(name.split()) > MAX_WORDS for name in names):
        return None
    properties: dict[str, Schema] = {}
    for name in names:
        is_list = name.endswith(LIST.strip())
        words = re.findall(r"[^\W_]+", name.removesuffix(LIST.strip()).lower())
        kind = _find_kind(words)
        if words:
            inner = KINDS[kind]
            properties["_".join(words)] = {"type": "array", "items": inner} if is_list else inner
    return _make_schema("", properties)


def _find_kind(words: list[str]) -> str:
    """Return the kind that a name suggests: the last word that does, but a count in "number of due dates"."""
    name = " ".join(words)
    if A_COUNT.search(name):
        return "whole number"
    if AN_AMOUNT.search(name):
        return "number"
    kinds = (KIND_WORDS.get(word) or KIND_WORDS.get(word.removesuffix("s")) for word in reversed(words))
    return next(filter(None, kinds), "text")


def _make_schema(title: str, properties: dict[str, Schema]) -> Schema | None:
    named = {"title": title} if title else {}
    return {**named, "type": "object", "properties": properties, "required": list(properties)} if properties else None


async def propose_schema(extractor: Extractor, text: str, salt: str) -> Schema | None:
    """Return the model's proposal; None if it has no field.

    Raises EngineError: the engine refused or lost the request.
    """
    result = await extractor.extract(PROPOSAL, text[:MAX_TEXT_CHARS], cache_salt=salt)
    record: Any = result.record if isinstance(result.record, dict) else {}
    properties: dict[str, Schema] = {}
    for each in record.get("fields", ()):
        kind = str(each.get("kind", ""))  # absent where the answer was cut off
        inner = KINDS.get(kind.removesuffix(LIST))
        if inner is not None:
            properties[str(each["name"])] = {"type": "array", "items": inner} if kind.endswith(LIST) else inner
    return _make_schema(str(record.get("title", "")), properties)
