"""own_names: renames fields in errors of the chat route to those of the route that reuses it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from app.api.errors import ApiError, to_api_error
from app.api.fields import field_of
from engine import InvalidRequest
from grammar import GrammarError

# a place in a request, as in messages[0].content; messages begin with the one they are about
PLACE = re.compile(r"\w+(?:\[\d+\]|\.\w+)*")
NAMES = re.compile(r"\w+(?: \w+)*")  # a field, or a phrase that has one
LAST_STEP = re.compile(r"(?:\[\d+\]|\.?\w+)$")


@contextmanager
def own_names(renamed: Mapping[str, str]) -> Iterator[None]:
    """Make errors name this route's fields.

    Args:
        renamed: what a chat request calls a field or a place in one, and what it is called here; the longest
            that fits counts: {"messages": "input", "messages[1].content": "input[0].output"}.
    """
    try:
        yield
    except (ApiError, InvalidRequest, GrammarError) as error:
        known = to_api_error(error)
        # a field that this route does not know was written by the client, under just that name
        is_own = known.code == "unknown_field" and str(known).startswith(f"{known.param} ")
        message = rename(str(known), known.param or "", renamed, is_own)
        param = known.param if is_own else renamed.get(known.param or "", known.param)
        if (message, param) == (str(known), known.param):
            raise
        raise ApiError(
            known.status, message, param, known.code, known.retry_after_s, known.details
        ) from error


def rename(message: str, param: str, renamed: Mapping[str, str], is_own: bool = False) -> str:
    """Return the message with this route's names, for the place at its beginning and for field names after it.

    Args:
        is_own: the place it begins with is this route's already.
    """
    place = PLACE.match(message)
    start = place[0] if place is not None and field_of(place[0]) == param else ""
    names = [re.escape(name) for name in renamed if "_" in name and NAMES.fullmatch(name)]
    rest = message[len(start) :]
    if names:
        rest = re.sub(rf"\b(?:{'|'.join(names)})\b", lambda found: renamed[found[0]], rest)
    return (start if is_own else _find_own(start, renamed)) + rest


def _find_own(place: str, renamed: Mapping[str, str]) -> str:
    known = place
    while known and known not in renamed:
        known = LAST_STEP.sub("", known)
    return renamed[known] + place[len(known) :] if known else place
