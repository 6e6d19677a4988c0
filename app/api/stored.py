"""What the routes of stored objects share: one object or a 404, and pages of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.api.context import ApiContext
from app.api.errors import ApiError
from app.store import Connection, Item, objects

Json = dict[str, Any]


def find_object(db: Connection, owner: str, kind: str, item_id: str) -> Item:
    item = objects.get(db, owner, kind, item_id)
    if item is None:
        raise ApiError(404, f"there is no {kind} {item_id[:80]!r}", None, f"{kind}_not_found")
    return item


async def list_objects(
    context: ApiContext, owner: str, kind: str, limit: int, after: str | None,
    describe: Callable[[Connection, Item], Json], text: str = "",
) -> Json:
    """Return a page of the owner's objects of a kind whose JSON contains a text, the latest changed first."""
    if not owner and not context.config.is_loopback:
        message = f"a {kind} is found by its id only: this server has no API keys, so it cannot tell whose it is"
        raise ApiError(403, message, code="list_not_allowed")

    def read(db: Connection) -> Json:
        found = objects.find(db, owner, kind, text=text, after=after, limit=limit + 1)
        data = [describe(db, item) for item in found[:limit]]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}

    return await context.store.run(read)


def to_seconds(moment: float | None) -> int | None:
    """Return a stored time as the API shows it."""
    return None if moment is None else int(moment)
