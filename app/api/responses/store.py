"""ResponseStore: recent responses, in memory, for previous_response_id and GET /v1/responses/ID, and those that run."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.errors import ApiError, BadRequest

Json = dict[str, Any]

MAX_RESPONSES = 1000
MAX_CHARS = 64 * 2**20
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


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


@dataclass(slots=True)
class RunningResponse:
    """A response that is being written; `reply` is set at its end, unless it fails."""

    key_number: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reply: Json | None = None


class ResponseStore:
    """The latest responses; the oldest are dropped. A response is visible only under the key that created it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._running: dict[str, RunningResponse] = {}
        self._num_chars = 0

    async def run(self, response_id: str, key_number: int, work: Awaitable[Json]) -> Json:
        """Await a response, which others may wait for meanwhile."""
        running = self._running[response_id] = RunningResponse(key_number)
        try:
            running.reply = await work
        finally:
            del self._running[response_id]
            running.ended.set()
        return running.reply

    def find_running(self, response_id: str, key_number: int) -> RunningResponse | None:
        """Return a response that is being written."""
        running = self._running.get(response_id)
        return running if running is not None and running.key_number == key_number else None

    def put(self, reply: Json, before: list[Json], given: str | list[Json], key_number: int) -> None:
        """Store a response with the items before it and its own input."""
        own = [{"role": "user", "content": given}] if isinstance(given, str) else given
        items = [*before, *_complete(own, before), *reply["output"]]
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

    def resolve(self, items: Sequence[Json], key_number: int) -> list[Json]:
        """Return items with the stored ones in place of references to them.

        Raises:
            ApiError: 404, an item is not stored.
        """
        wanted = {str(item.get("id")) for item in items if item.get("type") == "item_reference"}
        if not wanted:
            return list(items)
        stored = (each for each in reversed(self._kept.values()) if each.key_number == key_number)
        known = {item.get("id"): item for each in stored for item in each.items[each.num_before :]}
        for i, item in enumerate(items):
            if item.get("type") == "item_reference" and item.get("id") not in known:
                message = f"input[{i}]: there is no item {str(item.get('id'))[:80]!r} in the responses kept here"
                raise ApiError(404, message, "input", "item_not_found")
        return [known[item["id"]] if item.get("type") == "item_reference" else item for item in items]

    def drop(self, response_id: str, key_number: int) -> None:
        """Delete a response.

        Raises:
            ApiError: 404, the response is not stored.
        """
        self._num_chars -= self.get(response_id, key_number).num_chars
        del self._kept[response_id]


def pick_page(items: Sequence[Json], limit: int, after: str | None, order: str) -> Json:
    """Return a page of a list of items.

    Raises:
        ApiError: 400, there is no item with the id `after`.
    """
    found = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((i for i, item in enumerate(found) if item["id"] == after), None)
        if place is None:
            raise BadRequest(f"after={after[:80]!r} must be the id of an item of this response", "after")
        found = found[place + 1 :]
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(found) > limit}


def _complete(items: Iterable[Json], before: Iterable[Json]) -> list[Json]:
    """Return items as OpenAI's API lists them: with a type, an id of their own, and a list of parts as content."""
    taken = {item.get("id") for item in before}
    found = []
    for item in items:
        kind = item.get("type") or "message"
        more: Json = {"type": kind}
        if kind == "message":
            more |= {"status": "completed", "content": _list_parts(item)}
        identity = item.get("id")
        if not isinstance(identity, str) or identity in taken:
            more["id"] = f"{PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}"
        found.append(dict(item) | more)
        taken.add(found[-1]["id"])
    return found


def _list_parts(item: Mapping[str, Any]) -> Any:
    content = item.get("content")
    if not isinstance(content, str):
        return content
    if item.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]
