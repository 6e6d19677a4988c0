"""RecordOutput: where `extract` puts its records while they come, and how a stopped run goes on.

FILE.job   the job, then each record as a line: what a stopped run has; removed when the run is complete
FILE       JSONL: a line for each record as it ends; the other formats: written when the run ends or is stopped
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from app.config import Failure, UsageError
from app.extraction.export import FORMATS, ExportError, export

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordOutput:
    """A format and a file.

    Attributes:
        file_format: one of FORMATS.
        path: None is stdout.
    """

    file_format: str = "jsonl"
    path: Path | None = None

    @property
    def journal(self) -> Path | None:
        """The file that keeps the records of a run; None if they go to a terminal, a pipe or a device."""
        if self.path is None or (self.path.exists() and not self.path.is_file()):
            return None
        return self.path.with_name(f"{self.path.name}.job")

    def read_kept(self, job: str) -> list[Record]:
        """Return the records that a stopped run of this job has left."""
        if self.journal is None:
            return []
        check_writable("--output", self.journal)
        if not self.journal.exists():
            return []
        first, *lines = self.journal.read_bytes().split(b"\n")[:-1] or [b""]  # without a line that was cut off
        if first and first != _describe(job):
            raise UsageError(
                f"{self.journal} keeps the records of a stopped run with another schema, other files or options; "
                "remove it, or choose another --output"
            )
        return [json.loads(line) for line in lines]

    @contextmanager
    def open(self, job: str, kept: Sequence[Record] = ()) -> Iterator[Callable[[Record], None]]:
        """Yield the function that takes each record after the kept ones; what was found stays there after an error.

        Raises:
            Failure: the format cannot keep these records, which are printed as JSONL instead.
            UsageError: another run writes the same file.
        """
        table = _Table(self.file_format, self.path, list(kept))
        if self.journal is None:
            with table:
                yield table.add
            return
        with self.journal.open("ab+") as journal:
            with suppress(OSError):  # not every file system has locks
                _lock(journal, self.journal)
            content = b"".join([_describe(job) + b"\n", *(export([each], "jsonl") for each in kept)])
            journal.seek(0)
            if journal.read(len(content)) != content:
                journal.truncate(0)
                _write(journal, content)
            journal.truncate(len(content))

            def take(record: Record) -> None:
                _write(journal, export([record], "jsonl"))
                table.add(record)

            with table:
                yield take
            self.journal.unlink()


class _Table:
    """The records of a run as a file; one that was there before stays until there is a record."""

    def __init__(self, file_format: str, path: Path | None, records: list[Record]) -> None:
        self.file_format = file_format
        self.path = path
        self.records = records  # of JSONL only those of a run before
        self._file: BinaryIO | None = None

    def add(self, record: Record) -> None:
        """Write a record, if the format can grow."""
        if self.file_format != "jsonl":
            self.records.append(record)
        elif self.path is None:
            print_line(record)
        else:
            content = export([record], "jsonl")
            if self._file is None:
                self._file = self.path.open("wb")
                content = export(self.records, "jsonl") + content
            _write(self._file, content)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self.file_format == "jsonl" and (self._file is not None or not self.records):
            return
        try:
            content = export(self.records, self.file_format)
        except ExportError as error:
            for record in self.records:
                print_line(record)
            raise Failure(f"{error}; they are on stdout as JSONL") from error
        with self.path.open("wb") if self.path else nullcontext(sys.stdout.buffer) as file:
            _write(file, content)


def _describe(job: str) -> bytes:
    return json.dumps({"job": job}).encode()


def _lock(file: BinaryIO, path: Path) -> None:
    """Refuse a second run at the same time."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another run writes {path}") from error


def choose_output(file_format: str | None, name: str | None, inputs: Iterable[str]) -> RecordOutput:
    """The output of two flags, found to be possible.

    Args:
        file_format: --format; None: that of the file's suffix, else JSONL.
        name: --output; None or `-`: stdout.
        inputs: the files that are read, which must not be written over.
    """
    path = None if name in (None, "-") else Path(str(name))
    suffix = path.suffix.lower().removeprefix(".") if path else ""
    chosen = file_format or (suffix if suffix in FORMATS else "jsonl")
    if chosen not in FORMATS:
        raise UsageError(f"--format {chosen!r} is not one of {', '.join(FORMATS)}")
    if path is not None:
        if any(path.exists() and Path(each).exists() and path.samefile(each) for each in inputs):
            raise UsageError(f"--output {path} is one of the files that are read")
        check_writable("--output", path)
    elif chosen in ("parquet", "xlsx"):
        raise UsageError(f"--format {chosen} needs --output FILE: it is not for a terminal")
    return RecordOutput(chosen, path)


def check_writable(flag: str, path: Path) -> None:
    """Find out before minutes are spent whether the file can be written; it stays as it is."""
    try:
        if path.is_fifo():
            return  # whose reader would take the end of the try for the end of everything
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {flag} {path}: {error.strerror}") from error


def print_line(record: Record) -> None:
    """One line of JSON on stdout, in escapes where that has no UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    print(json.dumps(record, ensure_ascii=not is_utf8), flush=True)


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.flush()
