"""A schema that the model proposes for a text under a grammar, for a person to edit."""

from __future__ import annotations

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


async def propose_schema(extractor: Extractor, text: str, salt: str) -> Schema | None:
    """Return the model's proposal; None if it has no field.

    Raises:
        EngineError: the engine refused or lost the request.
    """
    result = await extractor.extract(PROPOSAL, text[:MAX_TEXT_CHARS], cache_salt=salt)
    record: Any = result.record if isinstance(result.record, dict) else {}
    properties: dict[str, Schema] = {}
    for each in record.get("fields", ()):
        kind = str(each.get("kind", ""))  # absent where the answer was cut off
        inner = KINDS.get(kind.removesuffix(LIST))
        if inner is not None:
            properties[str(each["name"])] = {"type": "array", "items": inner} if kind.endswith(LIST) else inner
    if not properties:
        return None
    title = str(record.get("title", ""))
    return {"title": title, "type": "object", "properties": properties, "required": list(properties)}
