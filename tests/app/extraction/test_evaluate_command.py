"""`extract --evaluate` prints the figures of the named sets, for people or as JSON."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.cli import evaluate as command
from app.cli.extract import add_arguments, run
from app.cli.main import Parser
from app.config import UsageError
from engine import InvalidRequest
from tests.fakes import PERSON, FakeEngine

CASE = {
    "kind": "person",
    "schema": PERSON,
    "text": "Ada is 36 years old.",
    "record": {"name": "Ada", "age": 37},
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    engine = FakeEngine()

    @asynccontextmanager
    async def fake_engine(given: Mapping[str, Any]) -> AsyncIterator[FakeEngine]:
        yield engine

    path = tmp_path / "tiny.jsonl"
    path.write_text(json.dumps(CASE) + "\n")
    monkeypatch.setattr(command, "local_engine", fake_engine)
    monkeypatch.setitem(command.SETS, "tiny", path)
    return engine


def evaluate(*argv: str) -> int:
    parser = Parser(allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(["--evaluate", *argv]), 0.0)


def test_figures_are_printed_with_confidence_and_accuracy(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--sets", "tiny") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny: 0.500 of 2 fields"
    assert lines[1] == "  whole records 0 of 1, valid 1 of 1"
    assert lines[2] == "  strings found in the text 1.000 (1 of 1)"
    assert lines[3].startswith("  wrong values flagged ") and lines[4].startswith("  flagged values wrong ")
    assert lines[5].split() == ["person", "0.500"]
    assert [line.split()[0] for line in lines[6:8]] == ["confidence", "accuracy"]


def test_a_failed_case_is_reported_and_gives_exit_code_1(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.reject = InvalidRequest("no room")
    assert evaluate("--sets", "tiny") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "  failed 1 of 1, the first: no room"
    assert lines[3] == "  strings found in the text - (0 of 0)"
    assert evaluate("--sets", "tiny", "--as-json") == 1
    figures = json.loads(capsys.readouterr().out)["sets"]["tiny"]
    assert (figures["failed"], figures["first_error"]) == (1, "no room")


def test_a_calibration_that_can_be_written_nowhere_is_refused_first(
    engine: FakeEngine, tmp_path: Path
) -> None:
    for path in (tmp_path / "missing" / "c.json", tmp_path):
        with pytest.raises(UsageError, match=f"cannot write --calibration {path}"):
            evaluate("--sets", "tiny", "--calibration", str(path))
    assert engine.requests == []
    assert evaluate("--sets", "tiny", "--calibration", str(tmp_path / "c.json")) == 0
    assert json.loads((tmp_path / "c.json").read_text())["sets"]["tiny"]["cases"] == 1


def test_figures_as_json_name_the_settings(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("--sets", "tiny", "--as-json", "--ground", "--surround", "20")
    report = json.loads(capsys.readouterr().out)
    assert (report["surround"], report["ground"], report["sets"]["tiny"]["field"]) == (20, True, 0.5)
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.source is not None
    assert len(grammar.source) > len(CASE["text"])


def test_wrong_fields_are_shown_when_asked(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("--sets", "tiny", "--wrong")
    assert '"wrong": ["/age"]' in capsys.readouterr().err


def test_limits_can_be_left_away(engine: FakeEngine) -> None:
    evaluate("--sets", "tiny", "--no-limits")
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and "maxLength" not in grammar.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sets", "zebra"], "unknown set 'zebra': choose from generated"),
        (["--surround", "-1"], "--surround is -1, but takes 0 to"),
        (["--schema", "a.json"], "takes no --schema, files, --column, --format or --output"),
        (["a.txt"], "takes no --schema, files"),
        (["-o", "a.csv"], "takes no --schema, files"),
    ],
)
def test_what_cannot_be_used_is_refused(argv: list[str], message: str, engine: FakeEngine) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(*argv)
    assert engine.requests == []
