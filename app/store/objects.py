"""Objects: JSON with an id, visible to their owner only. All functions get a connection: `store.run(put, owner, ...)`.

owner   a browser, an API key, or "" (programs without key or cookie), see app/api/gate.py
kind    chat, turn, project, opened, approval, response, file, job
parent  the object that it belongs to, and goes with: the chat of a turn, the project of a document
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.store.database import Connection, StoreFull

Json = dict[str, Any]

# A page without a cookie has such an owner. Its objects are deleted soon, because no later page can find them.
GUEST = "guest-"
GUEST_AGE_S = 12 * 3600.0
COLUMNS = "number, id, kind, body, created, changed, size"


@dataclass(frozen=True, slots=True)
class Item:
    """One object; `number` grows with each new one."""

    number: int
    id: str
    kind: str
    body: Json
    created: float
    changed: float
    size: int


def put(
    db: Connection, owner: str, kind: str, item_id: str, body: Json, *, parent: str | None = None,
    data: bytes | None = None,
) -> bool:
    """Add an object, or change its body; a change keeps its data. Returns False if the parent does not exist.

    Raises StoreFull: there is no room.
    """
    text, now = json.dumps(body, ensure_ascii=False, separators=(",", ":")), db.clock()
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # half a character cannot be stored
    holder = None
    if parent is not None:
        found = db.execute("SELECT number FROM objects WHERE owner = ? AND id = ?", (owner, parent)).fetchone()
        if found is None:
            return False
        holder = found[0]
        db.execute("UPDATE objects SET changed = ? WHERE number = ?", (now, holder))
    num_bytes = len(text) + len(data or b"")
    db.execute(
        "INSERT INTO objects (owner, id, kind, parent, body, data, size, created, changed) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, id) DO UPDATE SET body = excluded.body, "
        "size = excluded.size + coalesce(length(data), 0), changed = excluded.changed",
        (owner, item_id, kind, holder, text, data, num_bytes, now, now),
    )
    check_room(db, owner)
    return True


def check_room(db: Connection, owner: str, spare: int = 0) -> None:
    """Refuse the transaction if the data of this owner, or of all owners, exceeds its limit.

    Args:
        spare: bytes that must be left.
    """
    limit = db.limits.max_bytes
    own = db.execute("SELECT bytes FROM owners WHERE owner = ?", (owner,)).fetchone()
    if own is not None and own[0] + spare > limit // 4:
        raise StoreFull(
            f"there is no room left: what is kept for you here may take {limit // 4:,} bytes; delete something"
        )
    if db.execute("SELECT total(bytes) FROM owners").fetchone()[0] + spare > limit:
        raise StoreFull(f"this server keeps at most {limit:,} bytes (--max-data-bytes), and they are used")


def get(db: Connection, owner: str, kind: str, item_id: str) -> Item | None:
    row = db.execute(
        f"SELECT {COLUMNS} FROM objects WHERE owner = ? AND id = ? AND kind = ?", (owner, item_id, kind)
    ).fetchone()
    return None if row is None else make_item(row)


def get_data(db: Connection, owner: str, kind: str, item_id: str) -> bytes | None:
    row = db.execute(
        "SELECT data FROM objects WHERE owner = ? AND id = ? AND kind = ?", (owner, item_id, kind)
    ).fetchone()
    return None if row is None else row[0]


def find(
    db: Connection, owner: str, kind: str, *, text: str = "", after: str | None = None, limit: int = -1,
    oldest_first: bool = False,
) -> list[Item]:
    """Return the owner's objects of a kind, the latest changed first.

    Args:
        text: a part of the body's JSON.
        after: id of the last object of the page before.
    """
    sign, order = (">", "ASC") if oldest_first else ("<", "DESC")
    rows = db.execute(
        f"SELECT {COLUMNS} FROM objects WHERE owner = :owner AND kind = :kind AND instr(body, :text) AND "
        f"(:after IS NULL OR (changed, number) {sign} (SELECT changed, number FROM objects WHERE owner = :owner AND "
        f"id = :after)) ORDER BY changed {order}, number {order} LIMIT :limit",
        {"owner": owner, "kind": kind, "text": text, "after": after, "limit": limit},
    )
    return [make_item(row) for row in rows]


def find_parts(db: Connection, parent: Item, kind: str) -> list[Item]:
    """Return the objects of a kind that belong to another one, in the order in which they were added."""
    rows = db.execute(
        f"SELECT {COLUMNS} FROM objects WHERE parent = ? AND kind = ? ORDER BY number", (parent.number, kind)
    )
    return [make_item(row) for row in rows]


def touch(db: Connection, owner: str, item_ids: Sequence[str]) -> None:
    """Set the time of the last change to now, so that the objects are kept longer."""
    values = [(db.clock(), owner, item_id) for item_id in item_ids]
    db.executemany("UPDATE objects SET changed = ? WHERE owner = ? AND id = ?", values)


def delete(db: Connection, owner: str, kind: str, item_id: str) -> bool:
    """Delete an object and all that belongs to it. Returns whether it was there."""
    values = (owner, item_id, kind)
    db.has_deleted = db.execute("DELETE FROM objects WHERE owner = ? AND id = ? AND kind = ?", values).rowcount > 0
    return db.has_deleted


def keep_latest(db: Connection, owner: str, kind: str, max_items: int, max_bytes: int) -> None:
    """Delete the owner's objects of a kind that were not changed for the longest time, down to these limits."""
    db.execute(
        "DELETE FROM objects WHERE number IN (SELECT number FROM (SELECT number, "
        "row_number() OVER latest AS place, sum(size) OVER latest AS total FROM objects WHERE owner = ? AND kind = ? "
        "WINDOW latest AS (ORDER BY changed DESC, number DESC)) WHERE place > ? OR (total > ? AND place > 1))",
        (owner, kind, max_items, max_bytes),
    )


def drop_old(db: Connection) -> None:
    """Delete the objects whose last change is older than the limit of age."""
    now = db.clock()
    db.execute("DELETE FROM objects WHERE parent IS NULL AND changed < ?", (now - db.limits.max_age_s,))
    db.execute(
        "DELETE FROM objects WHERE parent IS NULL AND changed < ? AND owner GLOB ?", (now - GUEST_AGE_S, f"{GUEST}*")
    )


def make_item(row: sqlite3.Row | tuple[Any, ...]) -> Item:
    number, item_id, kind, body, *rest = row
    return Item(number, item_id, kind, json.loads(body), *rest)
