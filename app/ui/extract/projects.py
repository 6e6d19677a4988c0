"""Projects: a visitor's stored documents with their records, their names, and the list of recent ones.

What a person corrected and what another model read stay when the same text is read again: each is a project of its own.
"""

from __future__ import annotations

import html
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from app.store import Connection, Item, objects
from app.store.objects import Json
from app.ui.extract.shown import Shown, digest

# Limits per owner.
MAX_PROJECTS, MAX_PROJECT_BYTES = 20, 20_000_000
MAX_RECENT, MAX_NAME = 10, 50
# Words that show whether a text is still that of its file, from the first characters of the file.
WORD, NUM_WORDS, WORDS_LEN = re.compile(r"\w{4,}"), 40, 100_000


def keep_page(db: Connection, owner: str, project: str, body: Json, shown: Shown | None) -> str:
    """Keep the page's record, and return the project's id. Only actions change a record that is kept already."""
    found = find_project(db, owner, shown) if shown is not None else None
    record = found.body["record"] if found is not None else make_record(shown)
    return put_project(db, owner, project, body | {"record": record})


def change_record(
    db: Connection, owner: str, project: str, body: Json, shown: Shown, action: Mapping[str, Any]
) -> tuple[str, Shown]:
    """Apply what a person did on a page to the record as it is kept; returns the project's id, and the record.

    Args:
        body: of the project, if there is none yet.

    Raises ChangedElsewhere, EditError: it cannot be done.
    """
    found = find_project(db, owner, shown)
    newer = shown if found is None else shown.take(found.body["record"])
    changed = shown.act_on(newer, action)
    if found is not None:
        project, body = found.id, found.body
    return put_project(db, owner, project, body | {"record": make_record(changed)}), changed


def make_record(shown: Shown | None) -> Json | None:
    """Return a record as its project has it; None if the model wrote none."""
    if shown is None or shown.drafted.record is None:
        return None
    return shown.dump() | {"text": shown.text, "schema": shown.schema}


def find_project(db: Connection, owner: str, shown: Shown) -> Item | None:
    """Return the project with the record of the same run; one beside its own text comes first."""
    found = [
        each
        for each in objects.find(db, owner, "project", text=f'"reading":"{shown.reading}"')
        if (record := each.body["record"]) and record["reading"] == shown.reading
        if record["text"] == shown.text and record["schema"] == shown.schema
    ]
    return max(found, key=lambda each: each.body["text"] == shown.text, default=None)


def put_project(db: Connection, owner: str, project: str, body: Json) -> str:
    """Keep a project and return its id; a new one if it would replace the record of another text, or an approved one.

    Raises StoreFull: there is no room.
    """
    before = objects.get(db, owner, "project", project)
    if not project or (before is not None and is_other(before.body, body)):
        project = secrets.token_urlsafe(16)
    objects.put(db, owner, "project", project, body)
    _drop_copies(db, owner, project, body)
    objects.keep_latest(db, owner, "project", MAX_PROJECTS, MAX_PROJECT_BYTES)
    return project


def is_other(before: Json, body: Json) -> bool:
    """Return whether a project is another document than the one before, whose record is of its text."""
    record, now = before["record"], body["record"]
    if record is None or record["text"] != before["text"]:
        return False
    if now is None or body["text"] != before["text"]:
        return True
    is_read_again = record.get("reading") != now.get("reading") and (
        is_worked_on(record) or record.get("model") != now.get("model")
    )
    return is_read_again or (record["approved"] and body["schema"] != before["schema"])


def is_worked_on(record: Json) -> bool:
    """Return whether a person has corrected, confirmed or approved a record."""
    is_corrected = "draft" in record and record["record"] != record["draft"]["record"]
    return bool(record["approved"] or record.get("checked") or is_corrected)


def find_readings(db: Connection, owner: str, shown: Shown) -> list[Json]:
    """Return the kept records of the same text and schema, the latest first."""
    path = str(shown.opened.path) if shown.opened is not None else ""
    return [
        record
        for each in objects.find(db, owner, "project")
        if (record := each.body["record"]) and record["text"] == shown.text and record["schema"] == shown.schema
        if "draft" in record and (shown.text.strip() or each.body["path"] == path)
    ]


def _drop_copies(db: Connection, owner: str, project: str, body: Json) -> None:
    """Delete other projects of the same reading, and untouched ones of the same text, schema and model."""
    record = body["record"]
    if record is None or not record.get("reading") or record["text"] != body["text"]:
        return
    for each in objects.find(db, owner, "project", text='"reading":'):
        other = each.body["record"]
        if each.id == project or not other or each.body["text"] != other["text"]:
            continue
        is_same = all(other.get(key) == record[key] for key in ("text", "schema", "model")) and record["text"].strip()
        if other.get("reading") == record["reading"] or (is_same and not is_worked_on(other)):
            objects.delete(db, owner, "project", each.id)


def list_recent(db: Connection, owner: str, samples: Collection[str]) -> list[dict[str, Any]]:
    """Return the owner's documents, the latest changed first, without examples that were only looked at.

    Args:
        samples: paths of the examples.
    """
    found = [
        {
            "id": each.id, "time": each.changed, "state": _describe(body),
            "name": body.get("name") or shorten(body["text"]) or "No text",
            "reader": (body["record"] or {}).get("model", ""),
        }
        for each in objects.find(db, owner, "project")
        if (body := each.body)["record"] or (body["path"] not in samples and (body["path"] or body["text"].strip()))
    ]
    return found[:MAX_RECENT]


def _describe(body: Json) -> str:
    record = body["record"]
    if record is not None and record["approved"] and record["text"] == body["text"]:
        return "approved"
    return "corrected" if record is not None and is_worked_on(record) else "not approved"


def shorten(text: str) -> str:
    """Return the first words of a text."""
    words = " ".join(text[: 4 * MAX_NAME].split())
    return words if len(words) <= MAX_NAME else f"{words[:MAX_NAME]}…"


def render_name(name: str, text: str) -> str:
    """Return the name of an opened text, with words by which the page tells whether its text is still that one."""
    some, name = html.escape(" ".join(sample_words(text)), quote=True), html.escape(name, quote=True)
    return f'<span title="{name}" data-name="{name}" data-words="{some}" data-text="{digest(text)}">{name}</span>'


def sample_words(text: str) -> list[str]:
    """Return some words of the start of a text, in their order."""
    words = list(dict.fromkeys(WORD.findall(text[:WORDS_LEN])))
    return words[:: len(words) // NUM_WORDS + 1]


def is_same_text(original: str, text: str) -> bool:
    """Return whether a text has more than half of the words of the text it began as; as in review.js."""
    words, start = sample_words(original), text[: 2 * WORDS_LEN]
    return not words or 2 * sum(word in start for word in words) > len(words)
