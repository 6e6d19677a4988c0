"""own_names: errors of the chat path, told in the field names of the route that borrows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from app.api.errors import ApiError, to_api_error
from engine import InvalidRequest
from grammar import GrammarError


@contextmanager
def own_names(renamed: Mapping[str, str]) -> Iterator[None]:
    """Make errors name this route's fields.

    Args:
        renamed: what a chat request calls a field, and what it is called here.
    """
    try:
        yield
    except (ApiError, InvalidRequest, GrammarError) as error:
        known = to_api_error(error)
        own = renamed.get(known.param or "")
        if own is None or known.code == "unknown_field":
            raise
        message = str(known)
        if message.startswith(f"{known.param}="):
            message = own + message.removeprefix(known.param or "")
        raise ApiError(known.status, message, own, known.code, known.retry_after_s, known.details) from error
