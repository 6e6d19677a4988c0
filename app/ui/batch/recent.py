"""The runs of a visitor that the store has, as a menu that shows one of them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.store import Connection, Item, jobs, objects
from app.ui.extract.projects import MAX_RECENT


def name_files(paths: Sequence[str]) -> str:
    """Return the name of the one file, or how many there are."""
    return Path(paths[0]).name if len(paths) == 1 else f"{len(paths):,} files"


def list_runs(db: Connection, owner: str) -> list[dict[str, Any]]:
    """Return the owner's runs of the page, the latest changed first; jobs of the API have no files that were opened."""
    found = [each for each in objects.find(db, owner, "job", text='"opened":') if "opened" in each.body]
    return [
        {
            "id": each.id, "time": each.changed, "name": name_files(each.body["opened"]["paths"]),
            "state": _describe(db, each), "reader": each.body["model"],
        }
        for each in found[:MAX_RECENT]
    ]


def _describe(db: Connection, job: Item) -> str:
    num_rows = sum(jobs.count(db, job.number).values())
    num_open, num_approved = jobs.count_reviewed(db, job.number)
    parts = [f"{num_rows:,} row{'s' if num_rows != 1 else ''}"]
    parts += ["running"] * (job.body["status"] in jobs.UNFINISHED)
    parts += [f"{num_open:,} to check"] * bool(num_open) + [f"{num_approved:,} approved"] * bool(num_approved)
    return ", ".join(parts)
