"""RecordOutput: where `extract` puts its records, as lines while they come or as one table at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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

    @contextmanager
    def open(self) -> Iterator[Callable[[Record], None]]:
        """Yield the function that takes each record; a table is written when the block ends, also with an error.

        Raises:
            Failure: the format cannot keep these records, which are printed as JSONL instead.
        """
        if self.file_format != "jsonl":
            records: list[Record] = []
            try:
                yield records.append
            finally:
                self._write_table(records)
        elif self.path is None:
            yield print_line
        else:
            with self.path.open("wb") as file:
                yield lambda record: _write(file, export([record], "jsonl"))

    def _write_table(self, records: list[Record]) -> None:
        try:
            content = export(records, self.file_format)
        except ExportError as error:
            for record in records:
                print_line(record)
            raise Failure(f"{error}; they are on stdout as JSONL") from error
        with self.path.open("wb") if self.path else nullcontext(sys.stdout.buffer) as file:
            _write(file, content)


def choose_output(file_format: str | None, name: str | None, inputs: Iterable[str]) -> RecordOutput:
    """The output of two flags, found to be possible.

    Args:
        file_format: --format; None: that of the file's suffix, else JSONL.
        name: --output; None or `-`: stdout.
        inputs: the files that are read, which must not be written over.

    Raises:
        UsageError: the format is unknown or cannot be written here, or the file cannot be.
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
    elif chosen == "parquet":
        raise UsageError("--format parquet needs --output FILE: it is not for a terminal")
    return RecordOutput(chosen, path)


def check_writable(flag: str, path: Path) -> None:
    """Find out before minutes are spent whether the file can be written; it stays as it is.

    Raises:
        UsageError: it cannot.
    """
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
