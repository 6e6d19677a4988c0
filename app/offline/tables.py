"""Tables of an offline job: rows of Parquet, JSONL and CSV through Ray Data, and the output folder.

A part has the records of `part_rows` consecutive rows, and appears under its name only when it is complete. A part that
is written twice has the same content, and one that exists need not be computed again. Paths may be URLs of fsspec.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow.fs import FSSpecHandler, PyFileSystem

from app.config import UsageError
from app.extraction.export import export, write_csv, write_parquet

Row = dict[str, Any]

SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
MANIFEST = "_job.json"
PART = re.compile(r"part-(\d{6})\.\w+\Z")


def find_format(flag: str, path: str) -> str:
    """Return the format of a file or folder of files by the suffix of its name."""
    for suffix, name in SUFFIXES.items():
        if path.rstrip("/").endswith(suffix):
            return name
    raise UsageError(f"{flag} {path} must end in {', '.join(SUFFIXES)}")


def iterate_rows(ray: Any, path: str, file_format: str) -> Iterator[Row]:
    """Yield the rows in the order of the table, which is the same in every run."""
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    system, inner = fsspec.core.url_to_fs(path)
    options = {"filesystem": PyFileSystem(FSSpecHandler(system))}
    match file_format:
        case "parquet":
            yield from ray.data.read_parquet(inner, **options).iter_rows()
        case "csv":
            with system.open(inner, "rt", encoding="utf-8-sig", newline="") as file:
                header = next(csv.reader(file), [])
            texts = arrow_csv.ConvertOptions(column_types={name: pa.string() for name in header})
            parse = arrow_csv.ParseOptions(newlines_in_values=True)
            yield from ray.data.read_csv(inner, convert_options=texts, parse_options=parse, **options).iter_rows()
        case _:
            lines = ray.data.read_text(inner, drop_empty_lines=True, **options).iter_rows()
            for number, line in enumerate(lines, 1):
                yield _read_line(line["text"], f"{path} row {number}")


def _read_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} is not a JSON object")
    return row


@dataclass(frozen=True, slots=True)
class PartFolder:
    """The output folder."""

    path: str
    file_format: str

    def open(self, job: Mapping[str, Any]) -> frozenset[int]:
        """Create the folder, or continue it. Returns the numbers of the parts that are complete.

        Args:
            job: the settings that all runs into one folder share.
        """
        system, inner = fsspec.core.url_to_fs(self.path)
        described = json.dumps(dict(job) | {"format": self.file_format}, sort_keys=True)
        try:
            system.makedirs(inner, exist_ok=True)
            names = [name.rsplit("/", 1)[-1] for name in system.ls(inner, detail=False)]
            if MANIFEST in names:
                if system.cat_file(f"{inner}/{MANIFEST}").decode() != described:
                    raise UsageError(f"{self.path} holds the records of another job (see {MANIFEST})")
            elif names:
                raise UsageError(f"{self.path} is not empty and has no {MANIFEST}")
            else:
                system.pipe_file(f"{inner}/{MANIFEST}", described.encode())
        except OSError as error:
            raise UsageError(f"cannot use {self.path}: {error}") from error
        return frozenset(int(found[1]) for name in names if (found := PART.match(name)))

    def write(self, number: int, records: Sequence[Row]) -> None:
        """Write a part. The file appears under its name when it is complete."""
        content = export(records, "jsonl")
        if self.file_format != "jsonl":
            rows = [_flatten(record) for record in records]
            content = write_csv(rows) if self.file_format == "csv" else write_parquet(rows)
        system, inner = fsspec.core.url_to_fs(self.path)
        with system.open(f"{inner}/part-{number:06}.{self.file_format}", "wb", autocommit=False) as file:
            file.write(content)
        file.commit()


def _flatten(record: Row) -> Row:
    """Return a row whose columns and types are the same for all records: values other than flags become text."""
    plain = {"error": "", "row": {}, "notes": []} | record if "record" in record else record
    return {
        name: value if isinstance(value, str | bool) else json.dumps(value, ensure_ascii=False)
        for name, value in plain.items()
    }


def split_rows(rows: Iterator[Row], part_rows: int) -> Iterator[tuple[int, list[Row]]]:
    """Yield parts of the table with their numbers."""
    number = 0
    while part := list(islice(rows, part_rows)):
        yield number, part
        number += 1
