"""`python -m app grammar explain|test GRAMMAR`: who enforces which keyword, and which texts are accepted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from app.cli.table import format_table
from app.config import UsageError
from grammar import CompiledGrammar, GrammarCompiler, GrammarError, Vocabulary, read_spec

EXIT_REFUSED = 1
KINDS = ("json_schema", "regex", "choice", "ebnf", "lark", "csv", "xml", "structural_tag")
WHITESPACES = ("spaced", "compact", "any")
# Single bytes, so that a refusal has an exact place; the last token ends the text.
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<eos>"], [256])
MAX_CONTEXT = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the schema, and for `test` the instances."""
    parser.add_argument("action", choices=("explain", "test"), help="print the plan, or try instances against it")
    parser.add_argument(
        "schema", metavar="GRAMMAR", help="file with a JSON Schema or a grammar of another kind; - reads stdin"
    )
    parser.add_argument(
        "instances", nargs="*", metavar="INSTANCE", help="for test: texts, or @FILE for the text of a file"
    )
    parser.add_argument("--kind", choices=KINDS, default="json_schema", help="kind of GRAMMAR (default: json_schema)")
    parser.add_argument(
        "--property-order", choices=("schema", "any"), default="schema",
        help="order of the properties in JSON objects (default: schema)",
    )
    parser.add_argument(
        "--whitespace", choices=WHITESPACES, default="any",
        help="white space between JSON values and between XML tags (default: any)",
    )


def run(arguments: argparse.Namespace, start: float) -> int:
    """Print the table or the reasons; 1 when an instance is refused."""
    if (arguments.action == "test") != bool(arguments.instances):
        raise UsageError("explain takes a schema alone, test a schema and at least one instance")
    text = read_text(arguments.schema)
    if arguments.kind in ("regex", "choice"):
        text = text.strip("\n")
    compiler = GrammarCompiler(VOCABULARY)
    try:
        spec = read_spec(arguments.kind, text, arguments.whitespace, property_order=arguments.property_order)
        compiled = compiler.compile(spec)
        if arguments.action == "explain":
            print(make_table(compiled))
            return 0
        reasons = [try_instance(compiled, name, arguments.kind) for name in arguments.instances]
    except GrammarError as error:
        raise UsageError(str(error)) from error
    for name, reason in zip(arguments.instances, reasons, strict=True):
        print(f"{shorten(name)}: {reason or 'accepted'}")
    return EXIT_REFUSED if any(reasons) else 0


def read_text(name: str, newline: str | None = None) -> str:
    """Return a file's text, or stdin's for `-`, without the mark that some editors put before it.

    Args:
        newline: "" leaves line breaks as they are, None makes all of them line feeds.
    """
    try:
        if name == "-":
            return sys.stdin.read().removeprefix("\ufeff")
        with Path(name).open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def make_table(compiled: CompiledGrammar) -> str:
    """Return the plan, one keyword a line."""
    rows = [("POINTER", "KEYWORD", "ENFORCED BY")]
    rows += [(entry.pointer or "#", entry.keyword, entry.enforced_by) for entry in compiled.plan]
    return format_table(rows)


def check_instance(compiled: CompiledGrammar, data: bytes) -> str:
    """Return where and why a text is refused, "" when it is accepted."""
    matcher = compiled.matcher()
    for position, byte in enumerate(data):
        if not matcher.accept_token(byte):
            before = data[max(position - MAX_CONTEXT, 0) : position].decode(errors="replace")
            at = data[position:].decode(errors="replace")[0]
            return f"refused at byte {position}, {at!r} after {before!r}"
    return "" if matcher.is_completed() else f"refused at byte {len(data)}, the end: the text is not complete"


def try_instance(compiled: CompiledGrammar, name: str, kind: str) -> str:
    """Return where and why a text or the text of @FILE is refused, "" when it is accepted.

    A file may have space around JSON, and elsewhere a line break at its end that does not belong to the text.
    """
    if not name.startswith("@"):
        # bytes of the command line that are not UTF-8 come as surrogates: they are read as the bytes they were
        return check_instance(compiled, name.encode(errors="surrogateescape"))
    text = read_text(name.removeprefix("@"), newline="")
    if kind == "json_schema":
        return check_instance(compiled, text.strip().encode())
    reason = check_instance(compiled, text.encode())
    if reason and text.endswith("\n"):
        reason = check_instance(compiled, text.removesuffix("\n").removesuffix("\r").encode())
    return reason


def shorten(name: str) -> str:
    """Return the start of a long instance."""
    line = " ".join(name.split())
    return line if len(line) <= 60 else line[:57] + "..."
