"""Store: one SQLite database with a thread of its own; `run` calls a function of a connection as one transaction.

A transaction is in the log of the database (WAL) when `run` returns, so a killed process loses none. One process uses a
folder at a time. A file that is damaged or of a newer version is moved aside.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

from app.store.schema import STEPS

logger = logging.getLogger("troupe.store")

FILE_NAME = "troupe.db"
BUSY_S = 10.0  # seconds to wait for a program that reads the database

P = ParamSpec("P")
T = TypeVar("T")


class StoreError(Exception):
    """The store cannot be used; the message gives the reason."""


class StoreFull(StoreError):
    """An owner, or all owners together, have reached their limit of bytes."""


class DiskFull(StoreError):
    """There is no room for a change on the disk."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept, and how long.

    Attributes:
        max_bytes: of all owners together; one owner may take a quarter.
        max_age_s: an object that was not changed for so long is deleted; with it go the objects in it.
    """

    max_bytes: int = 256 * 2**20
    max_age_s: float = 90 * 86400.0


class Connection(sqlite3.Connection):
    """The connection that functions of the store get.

    Attributes:
        has_deleted: the log of the database is to be emptied, so that what was deleted is not in it either.
    """

    limits: Limits
    clock: Callable[[], float]
    has_deleted = False


class Store:
    """Runs functions on the database, one after the other, in a thread.

    Attributes:
        is_kept: whether the content survives the process.
        limits: how much is kept, and how long.
        notes: what a person should know about the start, such as a file that was moved aside.
    """

    def __init__(
        self, folder: Path | None = None, limits: Limits = Limits(), clock: Callable[[], float] = time.time
    ) -> None:
        """Open the database of a folder, or an empty one in memory.

        Raises StoreError: the folder cannot be used, or another process uses it.
        """
        self.is_kept = folder is not None
        self.limits = limits
        self.notes: list[str] = []
        self._lock = None if folder is None else _lock(folder)
        self._thread = ThreadPoolExecutor(1, "store")
        path = None if folder is None else folder / FILE_NAME
        self._connection = self._thread.submit(self._open, path, limits, clock).result()

    async def run(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """Return the result of a function of the connection; its changes are kept unless it raises.

        Raises StoreError: the database cannot be read or written.
        """
        return await asyncio.wrap_future(self.start(work, *args, **options))

    def start(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> Future[T]:
        """As `run`, without waiting. What is started or run later sees the result."""
        return self._thread.submit(self._transact, lambda: work(self._connection, *args, **options))

    def close(self) -> None:
        """Finish what was started, and close the file."""
        self._thread.submit(self._connection.close)
        self._thread.shutdown()
        if self._lock is not None:
            self._lock.close()

    def _transact(self, work: Callable[[], T]) -> T:
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                result = work()
            if self._connection.has_deleted:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._connection.has_deleted = False
            return result
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise DiskFull("the disk of the data folder (--data-dir) is full") from error
            raise StoreError(f"the data folder cannot be used: {error}") from error

    def _open(self, path: Path | None, limits: Limits, clock: Callable[[], float]) -> Connection:
        if path is None:
            return _connect(":memory:", limits, clock)
        try:
            return _connect(str(path), limits, clock)
        except (sqlite3.DatabaseError, StoreError) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(f"{path} cannot be used: {error}") from error
            aside = path.with_name(f"{path.name}.{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
            for end in ("", "-wal", "-shm"):
                if (file := path.with_name(path.name + end)).exists():
                    file.rename(aside.with_name(aside.name + end))
            self.notes.append(f"{path} {_explain(error)}. It was moved to {aside}, and an empty one was begun.")
            logger.warning("%s", self.notes[-1])
            return _connect(str(path), limits, clock)


def open_store(folder: str | None, limits: Limits) -> Store:
    """Open the store of a folder; `none` keeps everything in memory, None means the user's data folder.

    Raises StoreError: the folder cannot be used. Of the user's data folder this is only logged.
    """
    if folder == "none":
        return Store(None, limits)
    if folder is not None:
        return Store(Path(folder), limits)
    root = os.environ.get("XDG_DATA_HOME", "")
    path = (Path(root) if os.path.isabs(root) else Path.home() / ".local" / "share") / "troupe"
    try:
        return Store(path, limits)
    except StoreError as error:
        store = Store(None, limits)
        store.notes.append(f"{error}. Everything is kept in memory until the server ends; --data-dir chooses a folder.")
        logger.warning("%s", store.notes[-1])
        return store


def _connect(path: str, limits: Limits, clock: Callable[[], float]) -> Connection:
    """Open a database, check it, and bring it to the current version."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, factory=Connection)
    connection.limits, connection.clock = limits, clock
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(STEPS):
            raise StoreError(f"has version {version} of a newer Troupe; this one knows version {len(STEPS)}")
        # NORMAL: a lost process loses nothing; after a power failure the last transactions may be missing
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", "secure_delete=ON", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {setting}")
        if (problem := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(problem)
        for number, step in enumerate(STEPS[version:], version + 1):
            connection.executescript(f"BEGIN; {step}; PRAGMA user_version = {number}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _explain(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else f"is damaged ({error})"


def _lock(folder: Path) -> BinaryIO:
    """Create the folder if need be, and keep other processes out of it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "lock").open("ab")
    except OSError as error:
        raise StoreError(f"the data folder {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StoreError(f"another process uses the data folder {folder}") from error
    except OSError as error:
        logger.info("the data folder %s has no locks: %s", folder, error)
    return file
