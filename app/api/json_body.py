"""Rejects what json.loads accepts but JSON forbids: NaN, infinities, lone surrogates, duplicate keys.

All routes check this before they build the request model. Otherwise the tokenizer, the template or the reply would
fail on such values.
"""

from __future__ import annotations

import math
from typing import Any

from fastapi import Request

from app.api.errors import ApiError, BadRequest
from app.api.wording import Path, say_place
from app.json_text import TOO_MANY_VALUES, DuplicateKey, check_values, has_too_many_values, load_json
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
            return  # not JSON: the route says what it expects
        check_json(body)
        parse_body(await request.body())


def parse_body(text: bytes) -> Any:
    """The value of a JSON text in which no object has a key twice.

    Raises:
        ApiError: 400 with the key.
        ValueError, RecursionError: it is not JSON.
    """
    try:
        return load_json(text)
    except DuplicateKey as error:
        raise BadRequest(str(error), None, "invalid_json") from error


def parse_part(name: str, text: str) -> Any:
    """The value of a form's part, under the rules of a whole body.

    Raises:
        ApiError: 413 for too many values, 400 for a text that is not JSON; both name the part.
    """
    data = text.encode()
    if has_too_many_values(data):
        raise ApiError(413, f"{name} {TOO_MANY_VALUES}", name, "body_too_large")
    try:
        value = load_json(data)
    except DuplicateKey as error:
        raise BadRequest(f"{name}: {error}", name, "invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{name} is not JSON: {error}", name, "invalid_json") from error
    check_json({name: value})
    return value


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
        where, reason = _find_wrong(body)
        place = say_place(where)[:MAX_PLACE_CHARS] or "the body"
        raise BadRequest(f"{place}{reason}", str(where[0]) if where else None) from None


def _find_wrong(body: object) -> tuple[Path, str]:
    """Return the place of the first wrong value and the reason. A body has few enough values to look at all."""
    waiting: list[tuple[Path, Any]] = [((), body)]
    while waiting:
        place, value = waiting.pop()
        if reason := _refuse(value):
            return place, reason
        if isinstance(value, dict):
            waiting += [((*place, key), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [((*place, i), inner) for i, inner in reversed([*enumerate(value)])]
    return (), " holds a number that is not finite, or an unpaired surrogate (invalid Unicode)"


def _refuse(value: object) -> str:
    match value:
        case float() if not math.isfinite(value):
            return f"={value} must be a finite number"
        case str() if not is_unicode(value):
            return " contains an unpaired surrogate (invalid Unicode)"
        case dict() if not all(map(is_unicode, value)):
            return " has a name with an unpaired surrogate (invalid Unicode)"
    return ""
