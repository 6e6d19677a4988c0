"""ResponseStore: the latest responses of each owner, and those that are being written."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from app.api.errors import ApiError, BadRequest
from app.store import Connection, Store, StoreError, StoreFull, objects

logger = logging.getLogger("troupe.api")

Json = dict[str, Any]
Put = Callable[[Connection], bool]

# Limits of each owner. The responses whose last use is longest ago are deleted first.
MAX_RESPONSES = 1000
MAX_BYTES = 64 * 2**20
PAGE = 50  # responses that are read at a time to find an item
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response, the items of its request's own input, and the id of the response that it continues."""

    reply: Json
    input_items: list[Json]
    previous: str | None

    @property
    def items(self) -> list[Json]:
        """Return its part of the conversation as input items."""
        return [*self.input_items, *self.reply["output"]]


@dataclass(slots=True)
class RunningResponse:
    """A response that is being written; `reply` is set at its end, unless it fails."""

    owner: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reply: Json | None = None


class ResponseStore:
    """The responses in the store. A response is visible only to the owner that created it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: dict[str, RunningResponse] = {}
        # Id -> owner, and the write of a response that the disk had no room for.
        self._unwritten: dict[str, tuple[str, Put]] = {}

    async def run(self, response_id: str, owner: str, work: Awaitable[Json]) -> Json:
        """Wait for a response that other requests may wait for, too."""
        running = self._running[response_id] = RunningResponse(owner)
        try:
            running.reply = await work
        finally:
            del self._running[response_id]
            running.ended.set()
        return running.reply

    def find_running(self, response_id: str, owner: str) -> RunningResponse | None:
        """Return a response that is being written."""
        running = self._running.get(response_id)
        return running if running is not None and running.owner == owner else None

    async def make_room(self, owner: str) -> None:
        """Drop old responses, and check that there is room for another one.

        Raises StoreFull: other objects take the room.
        """
        await self._store.run(_make_room, owner)
        await self._write_again(owner)

    def put(self, reply: Json, before: list[Json], given: str | list[Json], owner: str) -> None:
        """Store a response with its own input, given the items before it. Later readers wait until it is stored."""
        own = [{"role": "user", "content": given}] if isinstance(given, str) else given
        body = {"reply": reply, "input": _complete(own, before), "previous": reply["previous_response_id"]}
        put = partial(objects.put, owner=owner, kind="response", item_id=reply["id"], body=body)
        self._store.start(put).add_done_callback(partial(self._note, reply["id"], owner, put))

    def _note(self, response_id: str, owner: str, put: Put, written: Future[bool]) -> None:
        if (error := written.exception()) is not None:
            logger.error("a response was not stored: %s", error)
            if isinstance(error, StoreError) and not isinstance(error, StoreFull):
                self._unwritten[response_id] = owner, put

    async def _write_again(self, owner: str) -> None:
        for response_id, (holder, put) in list(self._unwritten.items()):
            if holder == owner:
                await self._store.run(put)
                self._unwritten.pop(response_id, None)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return a response by id.

        Raises ApiError: 404, the response is not stored.
        """
        return (await self._read_chain(response_id, owner, 1))[0]

    async def read_items(self, response_id: str, owner: str) -> list[Json]:
        """Return the whole conversation that ends with a response, as input items.

        Raises ApiError: 400, it, or one that it continues, is not stored.
        """
        chain = await self._read_chain(response_id, owner, MAX_RESPONSES, "previous_response_id")
        return [item for response in reversed(chain) for item in response.items]

    async def resolve(self, items: Sequence[Json], owner: str) -> list[Json]:
        """Return items with the stored ones in place of references to them."""
        wanted = {str(item.get("id")) for item in items if _is_reference(item)}
        known = await self._store.run(_find_items, owner, wanted) if wanted else {}
        for i, item in enumerate(items):
            if _is_reference(item) and item.get("id") not in known:
                message = f"input[{i}]: there is no item {str(item.get('id'))[:80]!r} in the responses kept here"
                raise ApiError(404, message, "input", "item_not_found")
        return [known[item["id"]] if _is_reference(item) else item for item in items]

    async def drop(self, response_id: str, owner: str) -> None:
        if not await self._store.run(objects.delete, owner, "response", response_id):
            raise _make_missing(response_id)

    async def _read_chain(
        self, response_id: str, owner: str, limit: int, param: str | None = None
    ) -> list[StoredResponse]:
        """Return a response and those that it continues, the latest first."""
        chain, missing = await self._store.run(_read_chain, owner, response_id, limit)
        if missing in self._unwritten:
            await self._write_again(owner)
            chain, missing = await self._store.run(_read_chain, owner, response_id, limit)
        if missing is not None:
            raise _make_missing(missing, param)
        return chain


def _make_missing(response_id: str, param: str | None = None) -> ApiError:
    kept = f"this server keeps the latest {MAX_RESPONSES}, unless they are deleted"
    message = f"there is no response {response_id[:80]!r}; {kept}"
    return ApiError(400 if param else 404, message, param, "response_not_found")


def _make_room(db: Connection, owner: str) -> None:
    share = db.limits.max_bytes // 4
    objects.keep_latest(db, owner, "response", MAX_RESPONSES - 1, min(MAX_BYTES, share // 2))
    objects.check_room(db, owner, spare=share // 16)


def _read_chain(db: Connection, owner: str, response_id: str, limit: int) -> tuple[list[StoredResponse], str | None]:
    """Return the responses, and the id of one that is missing. Reading a response extends the time it is kept."""
    chain: list[StoredResponse] = []
    ids: list[str] = []
    last: str | None = response_id
    while last is not None and len(chain) < limit:
        if (item := objects.get(db, owner, "response", last)) is None:
            return chain, last
        chain.append(StoredResponse(item.body["reply"], item.body["input"], item.body["previous"]))
        ids.append(last)
        last = chain[-1].previous
    objects.touch(db, owner, ids)
    return chain, None


def _find_items(db: Connection, owner: str, wanted: set[str]) -> dict[str, Json]:
    """Return the items with these ids, of the latest responses first."""
    found: dict[str, Json] = {}
    after = None
    while not wanted <= found.keys():
        page = objects.find(db, owner, "response", after=after, limit=PAGE)
        for each in page:
            items = [*each.body["input"], *each.body["reply"]["output"]]
            found = {item["id"]: item for item in items if item["id"] in wanted} | found
        if len(page) < PAGE:
            break
        after = page[-1].id
    return found


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Return whether an item names a stored one; the type is optional there."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item)


def pick_page(items: Sequence[Json], limit: int, after: str | None, order: str) -> Json:
    """Return a page of a list of items."""
    found = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((i for i, item in enumerate(found) if item["id"] == after), None)
        if place is None:
            raise BadRequest(f"after={after[:80]!r} must be the id of an item of this response", "after")
        found = found[place + 1 :]
    return make_page(found[:limit], len(found) > limit)


def make_page(data: Sequence[Json], has_more: bool) -> Json:
    """Return a part of a list of objects with ids, as OpenAI's API shows it."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


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
