"""Jobs: objects whose rows are worked on one by one. A row is claimed, and its result written, in a transaction each.

row     waiting ──claim──▶ running ──end_row──▶ done | failed
                   ▲──────────┘ release: the process ended, or the job was cancelled
job     its body has "status": queued, running, completed, cancelled
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.store.database import Connection
from app.store.objects import COLUMNS, Item, check_room, get, make_item, put

Json = dict[str, Any]

UNFINISHED = ("queued", "running")
STATES = ("waiting", "running", "done", "failed")
FILE_NAMES = {"done": "output", "failed": "errors"}


@dataclass(frozen=True, slots=True)
class JobRow:
    """A row that has ended; `ended` counts the rows of the job as they end."""

    number: int
    state: str
    ended: int
    result: str


def add_job(db: Connection, owner: str, job_id: str, body: Json, rows: Iterable[str]) -> Item:
    """Add a job with its rows.

    Raises StoreFull: there is no room.
    """
    put(db, owner, "job", job_id, body | {"status": "queued"})
    job = get(db, owner, "job", job_id)
    assert job is not None, "the job was just put"
    db.executemany(
        "INSERT INTO rows (job, number, given) VALUES (?, ?, ?)",
        ((job.number, number, given) for number, given in enumerate(rows)),
    )
    db.execute(
        "UPDATE objects SET size = size + (SELECT coalesce(sum(length(given)), 0) FROM rows WHERE job = :job) "
        "WHERE number = :job",
        {"job": job.number},
    )
    check_room(db, owner)
    return job


def find_unfinished(db: Connection) -> list[Item]:
    """Return the jobs of all owners that are to be worked on, the oldest first."""
    rows = db.execute(
        f"SELECT {COLUMNS} FROM objects WHERE kind = 'job' AND json_extract(body, '$.status') IN (?, ?) "
        "ORDER BY number",
        UNFINISHED,
    )
    return list(map(make_item, rows))


def set_status(db: Connection, number: int, status: str) -> None:
    """Change the status of a job, and note when it began and ended."""
    moment = {"running": "$.started", "queued": "$.queued"}.get(status, "$.ended")
    db.execute(
        "UPDATE objects SET body = json_set(body, '$.status', ?, ?, ?), changed = ? WHERE number = ?",
        (status, moment, db.clock(), db.clock(), number),
    )


def keep_opened(db: Connection, number: int, opened: Json) -> None:
    """Keep what the page of a job has open, for the next run."""
    text = json.dumps(opened)
    db.execute("UPDATE objects SET body = json_set(body, '$.opened', json(?)) WHERE number = ?", (text, number))


def end_job(db: Connection, number: int, status: str, error: str | None = None) -> None:
    """Note that a job has ended: completed, or cancelled, perhaps by an error. A batch gets files of its results."""
    release(db, number)
    set_status(db, number, status)
    db.execute("UPDATE objects SET body = json_set(body, '$.error', ?) WHERE number = ?", (error, number))
    row = db.execute(f"SELECT owner, {COLUMNS} FROM objects WHERE number = ?", (number,)).fetchone()
    if row is None or make_item(row[1:]).body["kind"] != "batch":
        return
    owner, _, job_id, *_ = row
    for state, num_rows in count(db, number).items():
        if num_rows and state in FILE_NAMES:
            name = f"{job_id}_{FILE_NAMES[state]}.jsonl"
            body = {"filename": name, "purpose": "batch_output", "job": number, "state": state}
            put(db, owner, "file", f"file-{job_id}-{state}", body, parent=job_id)


def claim(db: Connection, job: int) -> tuple[int, str] | None:
    """Take the next row, as its number and its input; None if no row waits."""
    rows = db.execute(
        "UPDATE rows SET state = 'running' WHERE job = :job AND number = (SELECT number FROM rows WHERE job = :job "
        "AND state = 'waiting' ORDER BY number LIMIT 1) RETURNING number, given",
        {"job": job},
    ).fetchall()
    return rows[0] if rows else None


def end_row(db: Connection, job: int, number: int, result: str, is_failed: bool) -> None:
    """Write the result of a row that was claimed. A job that was deleted or cancelled meanwhile gets none.

    Raises StoreFull: there is no room.
    """
    changed = db.execute(
        "UPDATE rows SET state = :state, result = :result, ended = 1 + (SELECT coalesce(max(ended), 0) FROM rows "
        "WHERE job = :job AND ended IS NOT NULL) WHERE job = :job AND number = :number AND state = 'running'",
        {"state": "failed" if is_failed else "done", "result": result, "job": job, "number": number},
    ).rowcount
    if changed:
        db.execute("UPDATE objects SET size = size + ?, changed = ? WHERE number = ?", (len(result), db.clock(), job))
        check_room(db, db.execute("SELECT owner FROM objects WHERE number = ?", (job,)).fetchone()[0])


def release(db: Connection, job: int | None = None) -> None:
    """Let claimed rows of a job, or of all jobs, wait again."""
    db.execute("UPDATE rows SET state = 'waiting' WHERE state = 'running' AND job = coalesce(?, job)", (job,))


def retry_failed(db: Connection, job: int) -> int:
    """Let failed rows wait again, and the job be worked on. Returns how many rows wait."""
    values = {"job": job}
    forget_results(db, job, "failed")
    db.execute(
        "UPDATE rows SET state = 'waiting', result = NULL, ended = NULL WHERE job = :job AND state = 'failed'", values
    )
    num_waiting = count(db, job)["waiting"]
    if num_waiting:
        set_status(db, job, "queued")
    return num_waiting


def count(db: Connection, job: int) -> dict[str, int]:
    """Return the number of rows in each state."""
    found = Counter(dict(db.execute("SELECT state, count(*) FROM rows WHERE job = ? GROUP BY state", (job,))))
    return {state: found[state] for state in STATES}


def count_reviewed(db: Connection, job: int) -> tuple[int, int]:
    """Return how many records of an extraction have values to check, and how many are approved."""
    found = db.execute(
        "SELECT count(nullif(json_extract(result, '$.flags'), '{}')), total(json_extract(result, '$.approved')) "
        "FROM rows WHERE job = ? AND result != '' AND json_extract(result, '$.record') IS NOT NULL",
        (job,),
    ).fetchone()
    return found[0], int(found[1])


def read_ended(db: Connection, job: int, after: int = 0, limit: int = -1) -> list[JobRow]:
    """Return the rows that ended after a number of them, in the order in which they ended."""
    return [
        JobRow(*row)
        for row in db.execute(
            "SELECT number, state, ended, result FROM rows WHERE job = ? AND ended > ? ORDER BY ended LIMIT ?",
            (job, after, limit),
        )
    ]


def read_row(db: Connection, job: int, number: int) -> tuple[str, str | None] | None:
    """Return the input of a row, and its result, None until it has ended."""
    row = db.execute("SELECT given, result FROM rows WHERE job = ? AND number = ?", (job, number)).fetchone()
    return None if row is None else (row[0], row[1])


def change_result(db: Connection, job: int, number: int, result: str) -> None:
    """Write another result of a row that has ended."""
    values = {"job": job, "number": number, "result": result, "now": db.clock()}
    before = "(SELECT length(result) FROM rows WHERE job = :job AND number = :number)"
    db.execute(
        f"UPDATE objects SET size = size + length(:result) - {before}, changed = :now WHERE number = :job", values
    )
    db.execute("UPDATE rows SET result = :result WHERE job = :job AND number = :number AND ended", values)
    check_room(db, db.execute("SELECT owner FROM objects WHERE number = ?", (job,)).fetchone()[0])


def count_result_bytes(db: Connection, job: int, state: str) -> int:
    """Return the size of the results in a state, as lines."""
    lengths = "length(CAST(result AS BLOB)) + 1"
    values = (job, state)
    found = db.execute(f"SELECT total({lengths}) FROM rows WHERE job = ? AND state = ? AND result != ''", values)
    return int(found.fetchone()[0])


def forget_results(db: Connection, job: int, state: str) -> None:
    """Delete the results of the rows in a state; how many there were stays known."""
    size = "SELECT coalesce(sum(length(result)), 0) FROM rows WHERE job = :job AND state = :state"
    values = {"job": job, "state": state}
    db.execute(f"UPDATE objects SET size = size - ({size}) WHERE number = :job", values)
    db.execute("UPDATE rows SET result = '' WHERE job = :job AND state = :state", values)
