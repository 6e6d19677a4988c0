"""ResponseStore: recent responses, in memory, for previous_response_id and GET /v1/responses/ID."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from app.api.errors import ApiError

Json = dict[str, Any]

MAX_RESPONSES = 1000
MAX_CHARS = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        items: the whole conversation as input items, the output included.
        num_before: how many of them came from the response before; the request's own input follows.
        num_chars: size as JSON.
    """

    reply: Json
    items: list[Json]
    num_before: int
    key_number: int
    num_chars: int

    @property
    def input_items(self) -> list[Json]:
        """Return the items of the request's own input."""
        return self.items[self.num_before : len(self.items) - len(self.reply["output"])]


class ResponseStore:
    """The latest responses; the oldest are dropped. A response is visible only under the key that created it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_chars = 0

    def put(self, reply: Json, before: list[Json], given: str | list[Json], key_number: int) -> None:
        """Store a response with the items before it and its own input."""
        own = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        items = [*before, *own, *reply["output"]]
        stored = StoredResponse(reply, items, len(before), key_number, len(json.dumps([reply, items])))
        self._kept[reply["id"]] = stored
        self._num_chars += stored.num_chars
        while len(self._kept) > MAX_RESPONSES or self._num_chars > MAX_CHARS:
            self._num_chars -= self._kept.popitem(last=False)[1].num_chars

    def get(self, response_id: str, key_number: int, param: str | None = None) -> StoredResponse:
        """Return a response by id.

        Raises:
            ApiError: 404, the response is not stored; 400 if a request's `param` refers to it.
        """
        stored = self._kept.get(response_id)
        if stored is None or stored.key_number != key_number:
            kept = f"this server keeps the latest {MAX_RESPONSES} in memory"
            message = f"there is no response {response_id[:80]!r}; {kept}"
            raise ApiError(400 if param else 404, message, param, "response_not_found")
        return stored

    def drop(self, response_id: str, key_number: int) -> None:
        """Delete a response.

        Raises:
            ApiError: 404, the response is not stored.
        """
        self._num_chars -= self.get(response_id, key_number).num_chars
        del self._kept[response_id]
