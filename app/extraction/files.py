"""Files as the rows of a batch: a table of Excel has a row a line, a zip file has the rows of the files in it."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from app.extraction.child import run_child
from app.extraction.decoding import UnreadableSource
from app.extraction.sources import (
    MAX_CHARS,
    MAX_FILE_BYTES,
    SHEET_TYPES,
    UNLIMITED,
    Row,
    Table,
    TableLimits,
    make_table,
    parse_rows,
    read_bytes,
    read_table,
)

MAX_MEMBERS = 1000  # of a zip file
MAX_ZIP_BYTES = 256 * 2**20  # of all files in it, unpacked
# A password, a method that Python does not know, a damaged member.
UNPACK_ERRORS = (RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error, EOFError)


def read_file(path: Path, limits: TableLimits = UNLIMITED) -> Table:
    """The rows of one file; one that cannot be read is one row with its error."""
    try:
        data = read_bytes(path, path.name, MAX_FILE_BYTES)
        rows = _read_zip(data, path.name, limits) if path.suffix.lower() == ".zip" else _read(data, path.name, limits)
    except UnreadableSource as error:
        rows = [Row(path.name, error=str(error))]
    return make_table(rows)


def _read(data: bytes, name: str, limits: TableLimits) -> list[Row]:
    if PurePosixPath(name).suffix.lower() in SHEET_TYPES:
        table = run_child("office.read", data, name, kind="table", max_chars=MAX_CHARS)["text"]
        if table:
            return read_table(table, name, limits)
    return parse_rows(data, name, limits)


def _read_zip(data: bytes, name: str, limits: TableLimits) -> list[Row]:
    """The rows of the files in a zip file, by name, without hidden files, such as those that macOS adds.

    Raises UnreadableSource: it is no zip file, or has too many or too large files.
    """
    rows: list[Row] = []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as package:
            found = [each for each in package.infolist() if not each.is_dir() and not _is_hidden(each.filename)]
            if len(found) > MAX_MEMBERS:
                raise UnreadableSource(f"{name} has {len(found):,} files; at most {MAX_MEMBERS:,} are read: split it")
            # A member is not unpacked beyond the size that it states.
            if sum(each.file_size for each in found) > MAX_ZIP_BYTES:
                raise UnreadableSource(f"{name} holds more than {MAX_ZIP_BYTES >> 20} MiB; split it")
            for member in sorted(found, key=lambda each: each.filename):
                rows += _read_member(package, member, limits)
                limits.check(name, len(rows), 0)
    except zipfile.BadZipFile as error:
        raise UnreadableSource(f"{name} is no zip file: {error}") from error
    if not rows:
        raise UnreadableSource(f"{name} has no files in it")
    return rows


def _read_member(package: zipfile.ZipFile, member: zipfile.ZipInfo, limits: TableLimits) -> list[Row]:
    name = member.filename
    try:
        return _read(package.read(member), name, limits)
    except UNPACK_ERRORS:
        return [Row(name, error=f"{name} cannot be unpacked: it is damaged or locked with a password")]
    except UnreadableSource as error:
        return [Row(name, error=str(error))]


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)
