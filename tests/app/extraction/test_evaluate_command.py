"""`extract --evaluate` prints the figures of labelled files, for people or as JSON."""

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

CASE = {"kind": "person", "schema": PERSON, "text": "Ada is 36 years old.", "record": {"name": "Ada", "age": 37}}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    engine = FakeEngine()

    @asynccontextmanager
    async def fake_engine(given: Mapping[str, Any]) -> AsyncIterator[FakeEngine]:
        yield engine

    path = tmp_path / "tiny.jsonl"
    path.write_text(json.dumps(CASE) + "\n")
    monkeypatch.setattr(command, "local_engine", fake_engine)
    monkeypatch.chdir(tmp_path)
    return engine


def evaluate(*argv: str) -> int:
    parser = Parser(allow_abbrev=False)
    add_arguments(parser)
    return run(parser.parse_args(["--evaluate", *argv]), 0.0)


def test_figures_are_printed_with_confidence_and_accuracy(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("tiny.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny: 0.500 of 2 fields"
    assert lines[1] == "  whole records 0 of 1, valid 1 of 1"
    assert lines[2] == "  strings found in the text 1.000 (1 of 1)"
    assert lines[3].startswith("  wrong values flagged ") and lines[4].startswith("  flagged values wrong ")
    assert [line.split() for line in lines[5:7]] == [["person/age", "0.000"], ["person/name", "1.000"]]
    assert lines[7].endswith("enough for 95% right fields")
    assert [line.split()[0] for line in lines[8:10]] == ["confidence", "accuracy"]


def test_a_failed_case_is_reported_and_gives_exit_code_1(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.reject = InvalidRequest("no room")
    assert evaluate("tiny.jsonl") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "  failed 1 of 1, the first: no room"
    assert lines[3] == "  strings found in the text - (0 of 0)"
    assert evaluate("tiny.jsonl", "--as-json") == 1
    figures = json.loads(capsys.readouterr().out)["sets"]["tiny"]
    assert (figures["failed"], figures["first_error"]) == (1, "no room")


def test_a_calibration_that_can_be_written_nowhere_is_refused_first(engine: FakeEngine, tmp_path: Path) -> None:
    for path in (tmp_path / "missing" / "c.json", tmp_path):
        with pytest.raises(UsageError, match=f"cannot write --calibration {path}"):
            evaluate("tiny.jsonl", "--calibration", str(path))
    assert engine.requests == []
    assert evaluate("tiny.jsonl", "--calibration", str(tmp_path / "c.json")) == 0
    assert json.loads((tmp_path / "c.json").read_text())["sets"]["tiny"]["cases"] == 1


def test_figures_as_json_name_the_settings(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("tiny.jsonl", "--as-json", "--ground")
    report = json.loads(capsys.readouterr().out)
    assert (report["ground"], report["sets"]["tiny"]["field"]) == (True, 0.5)
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and grammar.source is not None


def test_wrong_fields_are_shown_when_asked_and_limits_can_be_left_away(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate("tiny.jsonl", "--wrong", "--no-limits")
    assert '"wrong": ["/age"]' in capsys.readouterr().err
    grammar = engine.requests[0].params.grammar
    assert grammar is not None and "maxLength" not in grammar.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs at least one JSONL file"),
        (["a.jsonl"], "cannot evaluate: .*No such file"),
        (["tiny.jsonl", "-o", "a.csv"], "takes no --column, --format or --output"),
    ],
)
def test_what_cannot_be_used_is_refused(argv: list[str], message: str, engine: FakeEngine) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(*argv)
    assert engine.requests == []
