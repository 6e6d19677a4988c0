"""`python -m app extract --schema S FILE...`: one record per file, or per row of a table.

One line of JSON each, or a table of all (record_output.py). With `--evaluate`, the figures of the model on documents
whose records are known.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from app.cli.evaluate import EXIT_SOME_FAILED, EvaluateConfig, evaluate, read_sets
from app.cli.record_output import RecordOutput, choose_output
from app.cli.talk import local_engine, plain_errors
from app.config import UsageError, add_flags, make_config
from app.extraction import Example, Extractor, Limits, Source, add_bounds, describe_added, extract_records
from app.extraction.export import FORMATS
from app.extraction.prompt import parse_examples
from app.extraction.sources import (
    MAX_FILE_BYTES,
    TABLE_TYPES,
    TEXT_COLUMN,
    UnreadableSource,
    decode,
    make_table,
    read_bytes,
    read_rows,
)
from engine import EngineConfig
from grammar import GrammarSpec

# These flags have no effect without it.
EVALUATION_FLAGS = {item.name for item in fields(EvaluateConfig)} - {"evaluate"}
# These flags have no effect with --evaluate.
FILE_ARGUMENTS = ("column", "format", "output")


@dataclass(frozen=True, slots=True)
class ExtractConfig:
    """Options of the extraction, also used by the evaluation."""

    ground: Annotated[bool, "free strings, dates and amounts must appear in the text"] = False
    limits: Annotated[bool, "limit the length of open strings and lists"] = True
    instructions: Annotated[str, "instructions for the model in addition to the schema"] = ""
    examples: Annotated[str | None, "JSONL file of texts with their records, shown to the model first"] = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schema, the files, and the flags of the engine."""
    parser.add_argument("--schema", metavar="FILE", help="file with the JSON Schema of a record")
    parser.add_argument(
        "files", nargs="*", metavar="FILE",
        help="PDF, DOCX, XLSX, PPTX, HTML, EML, MSG, texts, images, tables (CSV, JSONL: a record a row); - is stdin",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="column of the tables that holds the texts; by default found by its name or length",
    )
    parser.add_argument(
        "--format",
        metavar="{" + ",".join(FORMATS) + "}",
        help="default: by the ending of FILE, else jsonl; jsonl is written record by record, the others at the end",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help="file to write; by default records go to stdout. The same command continues a stopped run",
    )
    add_flags(parser, ExtractConfig)
    add_flags(parser, EvaluateConfig)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Print the records; return 1 if a file gave none."""
    evaluation = make_config(EvaluateConfig, vars(arguments))
    config = make_config(ExtractConfig, vars(arguments))
    if evaluation.evaluate:
        if any(getattr(arguments, name) is not None for name in FILE_ARGUMENTS):
            raise UsageError("--evaluate takes no --column, --format or --output")
        if not arguments.files:
            raise UsageError("--evaluate needs at least one JSONL file of documents with their records")
        schema = None if arguments.schema is None else read_schema(arguments.schema)
        sets = read_sets(arguments.files, schema)
        return asyncio.run(evaluate(evaluation, sets, make_options(config), vars(arguments)))
    idle = sorted(EVALUATION_FLAGS & vars(arguments).keys())
    if idle:
        raise UsageError(f"--{idle[0].replace('_', '-')} goes with --evaluate")
    if arguments.schema is None or not arguments.files:
        raise UsageError("extract needs --schema and at least one file")
    inputs = [arguments.schema, *arguments.files]
    if inputs.count("-") > 1:
        raise UsageError("stdin (-) can be read once, as the schema or as one of the files")
    # validate all arguments before loading the engine, so that a wrong name fails at once
    output = choose_output(arguments.format, arguments.output, inputs)
    schema = read_schema(arguments.schema)
    sources = [source for name in arguments.files for source in read_sources(name, arguments.column)]
    options = make_options(config)
    job = describe_job(schema, sources, options, make_config(EngineConfig, vars(arguments)).model)
    kept = output.read_kept(job)
    return asyncio.run(extract(schema, sources, output, options, vars(arguments), job, kept))


def describe_job(schema: dict[str, Any], sources: list[Source], options: dict[str, Any], model: str) -> str:
    """Return a digest of what decides on the records: a stopped run goes on only with the same."""
    digest = hashlib.sha256(json.dumps([schema, repr(sorted(options.items())), model]).encode())
    for source in sources:
        digest.update(repr(source).encode())
    return digest.hexdigest()


def make_options(config: ExtractConfig) -> dict[str, Any]:
    """Return the fields of the Extractor from the flags.

    Raises UsageError: the examples cannot be read.
    """
    return {
        "limits": Limits() if config.limits else None, "ground": config.ground, "instructions": config.instructions,
        "examples": read_examples(config.examples) if config.examples else (),
    }


def read_examples(path: str) -> tuple[Example, ...]:
    """Read examples from a JSONL file with lines {"text": ..., "record": {...}}."""
    try:
        return parse_examples(read_text(path))
    except ValueError as error:
        raise UsageError(f"--examples {path}: {error}") from error


async def extract(
    schema: dict[str, Any], sources: list[Source], output: RecordOutput, options: dict[str, Any],
    given: dict[str, Any], job: str, kept: list[dict[str, Any]],
) -> int:
    """Write records to the output; progress and changes to the schema go to stderr.

    Args:
        kept: the records of the first sources, which a stopped run of the job has left.
    """
    number, num_failed = len(kept), sum("error" in record for record in kept)
    if kept:
        print(f"going on with a stopped run: {number} of {len(sources)} records are there", file=sys.stderr)
    added = ", ".join(describe_added(add_bounds(schema, options["limits"])))
    if added:
        print(f"added limits: {added}; --no-limits adds none", file=sys.stderr)
    async with local_engine(given) as engine:
        extractor = Extractor(engine, **options)
        if not engine.sees_images:
            sources = [await asyncio.to_thread(read_seen, each) if each.images else each for each in sources]
        with output.open(job, kept) as write:
            async for record, _ in extract_records(extractor, schema, sources[number:]):
                number += 1
                write(record)
                num_failed += "error" in record
                print(f"[{number}/{len(sources)}] {record['source']}: {describe(record)}", file=sys.stderr)
                print("".join(f"  {note}\n" for note in record.get("notes", ())), end="", file=sys.stderr)
    return EXIT_SOME_FAILED if num_failed else 0


def describe(record: dict[str, Any]) -> str:
    """Return a short description of one record's result."""
    if "error" in record:
        return f"failed, {record['error']}"
    return "valid" if record["valid"] else f"not valid ({record['finish_reason']})"


def read_schema(path: str) -> dict[str, Any]:
    """Read a JSON Schema from a file."""
    text = read_text(path)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"{path}: a schema is a JSON object, not {type(schema).__name__}")
    with plain_errors():
        GrammarSpec.json_schema(text)  # keep the text: it may contain duplicate keys
    return schema


def read_sources(path: str, column: str | None = None) -> list[Source]:
    """Read the texts of a file: a table's column, the whole file, or stdin for `-`."""
    if path == "-":
        return [Source(path, read_text(path))]
    try:
        rows = read_rows(Path(path), path, with_images=True)
    except UnreadableSource as error:
        raise UsageError(str(error)) from error
    if Path(path).suffix.lower() not in TABLE_TYPES:
        column = TEXT_COLUMN
    table = make_table(rows)
    if column is not None and table.columns and column not in table.columns:
        raise UsageError(f"--column {column}: {path} has the columns {', '.join(table.columns)}")
    return table.list_sources(column)


def read_seen(source: Source) -> Source:
    """Read an image, or a PDF with pictures, once more for a model that sees none."""
    try:
        return make_table(read_rows(Path(source.name), source.name)).list_sources(TEXT_COLUMN)[0]
    except UnreadableSource as error:
        return Source(source.name, "", error=str(error))


def read_text(path: str) -> str:
    """Read the text of a file, or of stdin for `-`, with line ends normalised."""
    try:
        return decode(read_bytes(None if path == "-" else Path(path), path, MAX_FILE_BYTES), path)
    except UnreadableSource as error:
        raise UsageError(str(error)) from error
