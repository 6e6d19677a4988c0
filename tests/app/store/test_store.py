"""The store: what survives, who sees what, what is deleted, and files that cannot be used."""

import asyncio
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from app.store import Connection, Limits, Store, StoreError, StoreFull, jobs, objects, open_store
from app.store.database import FILE_NAME


def read_all(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def reopen(store: Store, folder: Path, **options: Any) -> Store:
    store.close()
    return Store(folder, **options)


async def test_objects_survive_and_are_seen_by_their_owner_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    assert await store.run(objects.put, "a", "file", "1", {"name": "é\ud800"}, data=b"\0x")
    assert not await store.run(objects.put, "b", "document", "2", {}, parent="1"), "the parent is another owner's"
    store = reopen(store, tmp_path / "new" / "folder")
    found = await store.run(objects.get, "a", "file", "1")
    assert found is not None and found.body == {"name": "é\ufffd\ufffd\ufffd"}
    assert await store.run(objects.get_data, "a", "file", "1") == b"\0x"
    assert await store.run(objects.get, "b", "file", "1") is None
    assert not await store.run(objects.delete, "b", "file", "1")
    assert await store.run(objects.get, "a", "chat", "1") is None, "the id is of another kind"
    store.close()


async def test_a_deleted_object_leaves_nothing_in_any_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.run(objects.put, "a", "project", "p", {"title": "SECRET-1"})
    await store.run(objects.put, "a", "document", "d", {"text": "SECRET-2"}, parent="p", data=b"SECRET-3" * 5000)
    await store.run(jobs.add_job, "a", "j", {"note": "SECRET-4"}, ["SECRET-5"] * 300)
    assert b"SECRET-5" in read_all(tmp_path)
    assert await store.run(objects.delete, "a", "project", "p") and await store.run(objects.delete, "a", "job", "j")
    assert b"SECRET" not in read_all(tmp_path)
    assert await store.run(lambda db: db.execute("SELECT * FROM rows").fetchall()) == []
    assert await store.run(lambda db: db.execute("SELECT * FROM owners").fetchall()) == [], "sizes are taken back"
    store.close()


async def test_a_full_share_refuses_and_keeps_what_is_there() -> None:
    store = Store(limits=Limits(max_bytes=40_000))
    await store.run(objects.put, "a", "chat", "1", {"text": "x" * 9000})
    for kind, body in (("chat", {"text": "y" * 2000}), ("file", {})):
        with pytest.raises(StoreFull, match=r"10,000 bytes; delete something"):
            await store.run(objects.put, "a", kind, "2", body, data=b"y" * 2000)
    assert [item.id for item in await store.run(objects.find, "a", "chat")] == ["1"]
    for owner in "bcd":
        await store.run(objects.put, owner, "chat", owner, {"text": "x" * 9000})
    with pytest.raises(StoreFull, match="--max-data-bytes"):
        await store.run(objects.put, "e", "chat", "e", {"text": "x" * 9000})


async def test_the_latest_are_listed_in_pages_and_the_oldest_of_their_owner_go() -> None:
    now = iter(range(10**6))
    store = Store(clock=lambda: float(next(now)))
    for number in range(6):
        await store.run(objects.put, "a", "response", f"r{number}", {"text": f"n{number}"})
    await store.run(objects.put, "b", "response", "other", {})
    await store.run(objects.touch, "a", ["r0"])
    listed = await store.run(objects.find, "a", "response")
    assert [item.id for item in listed] == ["r0", "r5", "r4", "r3", "r2", "r1"]
    page = await store.run(objects.find, "a", "response", after="r5", limit=2)
    assert [item.id for item in page] == ["r4", "r3"]
    assert [item.id for item in await store.run(objects.find, "a", "response", text="n3")] == ["r3"]
    await store.run(objects.keep_latest, "a", "response", 3, 10**6)
    await store.run(objects.keep_latest, "a", "response", 3, listed[0].size + listed[1].size)
    assert [item.id for item in await store.run(objects.find, "a", "response")] == ["r0", "r5"]
    assert await store.run(objects.get, "b", "response", "other")


async def test_what_is_too_old_goes_with_its_parts() -> None:
    now = 0.0
    store = Store(limits=Limits(max_age_s=86400.0), clock=lambda: now)
    for owner in ("a", objects.GUEST):
        await store.run(objects.put, owner, "chat", "old", {})
        await store.run(objects.put, owner, "chat", "used", {})
        await store.run(objects.put, owner, "turn", "old-1", {}, parent="old")
    now = 80_000.0
    await store.run(objects.put, "a", "turn", "used-1", {}, parent="used")
    now = 90_000.0
    await store.run(objects.drop_old)
    left = await store.run(lambda db: db.execute("SELECT owner, id FROM objects").fetchall())
    assert left == [("a", "used"), ("a", "used-1")]


@pytest.mark.parametrize("content", [b"not a database" * 500, "newer", "torn"])
async def test_a_file_that_cannot_be_used_is_moved_aside(tmp_path: Path, content: bytes | str) -> None:
    store = Store(tmp_path)
    await store.run(objects.put, "a", "chat", "1", {"text": "x" * 100_000})
    store.close()
    path = tmp_path / FILE_NAME
    if content == "newer":
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 99")
        connection.close()
    elif content == "torn":
        path.write_bytes(path.read_bytes()[:-60_000])
    else:
        path.write_bytes(content)  # type: ignore[arg-type]
    before = path.read_bytes()
    store = Store(tmp_path)
    assert await store.run(objects.get, "a", "chat", "1") is None
    assert before in read_all(tmp_path)
    assert str(path) in store.notes[0] and ("version 99" if content == "newer" else "damaged") in store.notes[0]
    store.close()


async def test_a_folder_has_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = open_store(None, Limits())
    assert store.is_kept and (tmp_path / "troupe" / FILE_NAME).exists()
    with pytest.raises(StoreError, match="another process"):
        open_store(str(tmp_path / "troupe"), Limits())
    other = open_store(None, Limits())
    assert not other.is_kept and "kept in memory" in other.notes[0]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "file")
    store.close()


async def test_a_row_is_ended_once_whatever_stops_its_job(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = await store.run(jobs.add_job, "a", "j", {}, ["zero", "one", "two"])
    assert await store.run(jobs.claim, job.number) == (0, "zero")
    assert await store.run(jobs.claim, job.number) == (1, "one")
    await store.run(jobs.end_row, job.number, 1, "failed", True)
    store = reopen(store, tmp_path)
    await store.run(jobs.release)
    await store.run(jobs.end_row, job.number, 0, "late, from before the end", False)
    assert await store.run(jobs.claim, job.number) == (0, "zero")
    await store.run(jobs.end_row, job.number, 0, "first", False)
    await store.run(jobs.end_row, job.number, 0, "again", False)
    ended = await store.run(jobs.read_ended, job.number)
    assert [(row.number, row.state, row.result) for row in ended] == [(1, "failed", "failed"), (0, "done", "first")]
    assert await store.run(jobs.retry_failed, job.number) == 2
    assert await store.run(jobs.count, job.number) == {"waiting": 2, "running": 0, "done": 1, "failed": 0}
    assert [found.id for found in await store.run(jobs.find_unfinished)] == ["j"]
    store.close()


def write_until_killed(folder: Path, pipe: Any) -> None:
    async def write() -> None:
        store = Store(folder)
        for number in range(10**6):
            await store.run(objects.put, "a", "chat", str(number), {"text": "x" * 500})
            pipe.send(number)

    asyncio.run(write())


async def test_the_end_of_a_row_costs_the_same_in_a_long_job() -> None:
    steps: list[int] = []

    def work(db: Connection) -> None:
        job = jobs.add_job(db, "me", "j", {"kind": "extract"}, ["{}"] * 5000)
        db.set_progress_handler(lambda: steps.append(1), 1000)  # after a thousand steps of SQLite's machine
        number, _ = jobs.claim(db, job.number) or (-1, "")
        jobs.end_row(db, job.number, number, "{}", False)
        assert len(jobs.read_ended(db, job.number)) == 1
        db.set_progress_handler(None, 1000)

    await Store().run(work)
    assert len(steps) < 3


async def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path, sender))
    process.start()
    while (last := receiver.recv()) < 200:
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    store = Store(tmp_path)
    kept = {int(item.id) for item in await store.run(objects.find, "a", "chat")}
    assert set(range(last + 1)) <= kept and store.notes == []
    store.close()
