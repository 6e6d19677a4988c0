"""Which tests of the JSON-Schema-Test-Suite (draft 2020-12) come out right, keyword by keyword.

    python -m tests.grammar.suite_table FOLDER

Writes the table into grammar/CONFORMANCE.md. An instance is accepted when every byte of its text is, in the default and
in the compact spelling, and the text is complete.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grammar import CompiledGrammar, GrammarCompiler, GrammarError, GrammarSpec, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
TABLE_FILE = ROOT / "grammar" / "CONFORMANCE.md"
BEGIN, END = "<!-- table of keywords: begin -->", "<!-- table of keywords: end -->"
SEPARATORS = {"spaced": (", ", ": "), "compact": (",", ":")}

RIGHT, STRICT, REFUSED, LOOSE = "right", "valid refused", "schema refused", "invalid accepted"
OUTCOMES = (RIGHT, STRICT, REFUSED, LOOSE)


class Outcome(NamedTuple):
    """The result of one test."""

    keyword: str
    description: str
    outcome: str


def make_compiler() -> GrammarCompiler:
    """A compiler over single bytes: what it accepts depends on the grammar alone."""
    return GrammarCompiler(Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256]))


def list_outcomes(suite: Path, compiler: GrammarCompiler) -> Iterator[Outcome]:
    """Run all tests of the suite's own folder; the optional ones lie below it."""
    for path in sorted(suite.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            for test, outcome in zip(group["tests"], judge_group(group, compiler), strict=True):
                yield Outcome(path.stem, f"{group['description']}: {test['description']}", outcome)


def judge_group(group: dict[str, Any], compiler: GrammarCompiler) -> list[str]:
    """Return how each test of a group comes out."""
    try:
        compiled = {
            whitespace: compiler.compile(GrammarSpec.json_schema(group["schema"], whitespace))  # type: ignore[arg-type]
            for whitespace in SEPARATORS
        }
    except GrammarError:
        return [REFUSED] * len(group["tests"])
    return [judge_test(test, compiled) for test in group["tests"]]


def judge_test(test: dict[str, Any], compiled: dict[str, CompiledGrammar]) -> str:
    """Return how a test comes out; one spelling that is wrong makes it wrong."""
    verdicts = {
        accepts(compiled[whitespace], json.dumps(test["data"], separators=separators, ensure_ascii=False))
        for whitespace, separators in SEPARATORS.items()
    }
    if verdicts == {test["valid"]}:
        return RIGHT
    return STRICT if test["valid"] else LOOSE


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    """Feed a text byte by byte; the byte tokens are their own ids."""
    matcher = compiled.matcher()
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed()


def make_table(outcomes: Sequence[Outcome]) -> str:
    """Return the table as Markdown: one row a keyword, the sums below."""
    counts: dict[str, dict[str, int]] = {}
    for each in outcomes:
        row = counts.setdefault(each.keyword, dict.fromkeys(OUTCOMES, 0))
        row[each.outcome] += 1
    sums = {outcome: sum(row[outcome] for row in counts.values()) for outcome in OUTCOMES}
    lines = [f"| keyword | tests | {' | '.join(OUTCOMES)} |", "|---|---|" + "---|" * len(OUTCOMES)]
    for name, row in {**counts, "**all**": sums}.items():
        cells = [str(row[outcome] or "") for outcome in OUTCOMES]
        lines.append(f"| {name} | {sum(row.values())} | {' | '.join(cells)} |")
    return "\n".join(lines)


def replace_table(text: str, table: str) -> str:
    """Return the text of CONFORMANCE.md with another table between the two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the marks {BEGIN} and {END} are not there"
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.grammar.suite_table", description=__doc__.split("\n")[0])
    parser.add_argument("suite", type=Path, metavar="FOLDER", help="the suite's files, .../draft2020-12")
    options = parser.parse_args(arguments)
    if not any(options.suite.glob("*.json")):
        print(f"no test suite in {options.suite}", file=sys.stderr)
        return 2
    text = TABLE_FILE.read_text(encoding="utf-8")
    written = replace_table(text, make_table(list(list_outcomes(options.suite, make_compiler()))))
    TABLE_FILE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
