"""`python -m app run-batch -i IN -o OUT`: answers every row of an OpenAI batch file, and can resume after a kill.

IN    one {"custom_id", "method", "url", "body"} a line
OUT   one {"id", "custom_id", "response", "error"} a line, written as each row is done; its rows are not redone
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from app.api.batch import answer_row, check_lines
from app.api.context import ApiContext
from app.cli.talk import local_engine
from app.concurrency import run_bounded
from app.config import AppConfig, UsageError, add_flags
from engine import EngineConfig

Row = dict[str, Any]

EXIT_SOME_FAILED = 1
DEFAULT_IN_FLIGHT = 64
MAX_IN_FLIGHT = 4096
MAX_SHOWN = 20  # bad lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two files, and the flags of the engine."""
    parser.add_argument("-i", "--input-file", required=True, metavar="IN", help="batch file to read")
    parser.add_argument("-o", "--output-file", required=True, metavar="OUT", help="file to write or continue")
    parser.add_argument(
        "--max-in-flight", type=int, default=DEFAULT_IN_FLIGHT, metavar="INT",
        help=f"rows that run at once (default: {DEFAULT_IN_FLIGHT})",
    )
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Answer the rows that are not in OUT yet; return 1 if one could not be answered.

    Raises:
        UsageError: a file cannot be used; nothing has been loaded or written.
        Failure: the engine died; running the command again resumes.
    """
    source, target = Path(arguments.input_file), Path(arguments.output_file)
    if not 1 <= arguments.max_in_flight <= MAX_IN_FLIGHT:
        raise UsageError(f"--max-in-flight must be from 1 to {MAX_IN_FLIGHT}")
    try:
        if source.exists() and not source.is_file():
            raise UsageError(f"{source} is not a file: the rows are read more than once")
        if target.exists() and not target.is_file():
            raise UsageError(f"{target} is not a file: a batch's output is read again to go on with it")
        if target.exists() and source.samefile(target):
            raise UsageError("IN and OUT are the same file")
        num_rows = check_rows(source)
        done = read_done(target)
        with target.open("a", encoding="utf-8") as file:
            return asyncio.run(run_batch(source, file, done, num_rows, arguments))
    except OSError as error:
        raise UsageError(f"cannot use {error.filename or target}: {error.strerror or error}") from error


async def run_batch(
    source: Path, file: TextIO, done: frozenset[str], num_rows: int, arguments: argparse.Namespace
) -> int:
    """Answer the remaining rows, several at once, and write each when it is done."""
    num_failed = 0
    rows = (row for row in iterate_rows(source) if row["custom_id"] not in done)
    num_left = sum(row["custom_id"] not in done for row in iterate_rows(source))
    async with local_engine(vars(arguments)) as engine:
        context = ApiContext(engine, AppConfig())
        answers = run_bounded((answer_row(context, row) for row in rows), arguments.max_in_flight)
        with tqdm(total=num_rows, initial=num_rows - num_left, unit="row", file=sys.stderr) as bar:
            async with aclosing(answers):
                async for answer in answers:
                    num_failed += answer["response"]["status_code"] != 200
                    file.write(json.dumps(answer) + "\n")
                    file.flush()
                    bar.update()
    print(f"{num_rows} rows, {num_failed} of them failed in this run", file=sys.stderr)
    return EXIT_SOME_FAILED if num_failed else 0


def check_rows(source: Path) -> int:
    """Count the rows; if several lines are bad, list them on stderr."""
    num_rows = num_bad = 0
    problems: list[str] = []  # the first bad lines
    with source.open("rb") as file:
        for checked in check_lines(file, f"{source}:"):
            num_rows += 1
            if isinstance(checked, str):
                num_bad += 1
                problems += [checked] if num_bad <= MAX_SHOWN else []
    if num_bad == 1:
        raise UsageError(problems[0])
    if num_bad:
        more = [f"and {num_bad - MAX_SHOWN} more"] if num_bad > MAX_SHOWN else []
        print("\n".join(problems + more), file=sys.stderr)
        raise UsageError(f"{source} has {num_bad} bad lines; nothing was answered")
    return num_rows


def iterate_rows(source: Path) -> Iterator[Row]:
    with source.open("rb") as file:
        yield from (row for row in check_lines(file, "") if isinstance(row, dict))


def read_done(target: Path) -> frozenset[str]:
    """Return the rows that an earlier run answered; an incomplete last line is removed."""
    if not target.exists():
        return frozenset()
    text = target.read_bytes()
    end = text.rfind(b"\n") + 1
    done = set()
    for number, line in enumerate(text[:end].splitlines(), 1):
        try:
            done.add(str(json.loads(line)["custom_id"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{target}:{number} is not a row of a batch's output") from None
    if end < len(text):
        if not text[end:].startswith(b'{"id": "batch_req_'[: len(text) - end]):
            raise UsageError(f"{target} ends with something that is not a row of a batch's output")
        with target.open("r+b") as file:
            file.truncate(end)
    return frozenset(done)
