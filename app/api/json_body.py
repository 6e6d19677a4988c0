"""Rejects what json.loads accepts but JSON forbids: NaN, infinities, lone surrogates, duplicate keys.

All routes check this before they build the request model. Otherwise the tokenizer, the template or the reply would
fail on such values. json.loads keeps the last of duplicate keys, so a schema would silently lose a part.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from fastapi import Request

from app.api.errors import BadRequest
from app.api.fields import field_of
from engine import is_unicode

MAX_PLACE_CHARS = 200


async def check_body(request: Request) -> None:
    """The dependency by which every route has its body checked.

    Raises:
        ApiError: 400, as `check_json`.
    """
    # only what FastAPI has read: a body that no route waits for may never come
    if request.method == "POST" and "json" in request.headers.get("content-type", "").lower():
        try:
            body = await request.json()  # parsed already, and kept
        except (ValueError, RecursionError):
            return  # no JSON: the route says what it wants
        check_json(body)
        parse_body(await request.body())


def parse_body(text: bytes) -> Any:
    """The value of a JSON text in which no object has a name twice.

    Raises:
        ApiError: 400 with the name.
        ValueError, RecursionError: it is no JSON.
    """
    return json.loads(text, object_pairs_hook=_refuse_twice)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise BadRequest(f"an object has the name {twice[:80]!r} twice", None, "invalid_json")
    return found


def check_json(body: object) -> None:
    """Refuse a body that could not be written as JSON again.

    Raises:
        ApiError: 400 naming the place of the value, as in messages[0].content.
    """
    try:
        check_values(body)
    except RecursionError:
        raise BadRequest("the body is nested too deeply", None, "invalid_json") from None
    except ValueError:
        place, reason = _find_wrong(body)
        place = place[:MAX_PLACE_CHARS]
        raise BadRequest(f"{place or 'the body'}{reason}", field_of(place) or None) from None


def check_values(value: object) -> None:
    """Write a value as JSON would have it, in C: the cheapest walk over a large one.

    Raises:
        ValueError: a number in it is not finite, or a text is not Unicode.
        RecursionError: it is nested too deeply.
    """
    json.dumps(value, ensure_ascii=False, allow_nan=False, check_circular=False).encode()


def _find_wrong(body: object) -> tuple[str, str]:
    """Return the place of the first wrong value and the reason. A body has few enough values to look at all."""
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        place, value = waiting.pop()
        if reason := _refuse(value):
            return place.removeprefix("."), reason
        if isinstance(value, dict):
            waiting += [(f"{place}.{key}", inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{place}[{i}]", inner) for i, inner in reversed([*enumerate(value)])]
    return "", " holds a number that is not finite, or half of a surrogate pair"


def _refuse(value: object) -> str:
    match value:
        case float() if not math.isfinite(value):
            return f"={value} must be a finite number"
        case str() if not is_unicode(value):
            return " holds half of a surrogate pair, which is no text"
        case dict() if not all(map(is_unicode, value)):
            return " has a name with half of a surrogate pair, which is no text"
    return ""
