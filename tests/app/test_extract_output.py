"""Where `extract` puts its records: lines, CSV or Parquet, on stdout or in a file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from engine import EngineDead, RequestOutput
from tests.fakes import FakeEngine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command for a good and an empty text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("s.json").write_text(json.dumps(SCHEMA))
    Path("good.txt").write_text("Ada is 36")
    Path("empty.txt").write_text(" ")
    return ["extract", "--schema", "s.json", "good.txt", "empty.txt"]


def read_csv(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))


def test_csv_on_stdout_has_a_row_a_record_and_failed_ones_too(
    fake_local: FakeEngine, argv: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main([*argv, "--format", "csv"]) == 1
    good, empty = read_csv(capfdbinary.readouterr().out)
    assert (good["source"], good["name"], good["age"], good["error"]) == ("good.txt", "Ada", "36", "")
    assert (empty["source"], empty["name"]) == ("empty.txt", "")
    assert empty["error"].startswith("the text is empty")


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        (["-o", "out.csv"], b"\xef\xbb\xbfsource,"),
        (["-o", "OUT.PARQUET"], b"PAR1"),
        (["--output", "out.jsonl"], b'{"source": "good.txt"'),
        (["-o", "out.txt"], b'{"source": "good.txt"'),
        (["-o", "out.csv", "--format", "jsonl"], b'{"source": "good.txt"'),
    ],
)
def test_a_file_has_the_format_of_its_suffix_unless_one_is_given(
    fake_local: FakeEngine, argv: list[str], flags: list[str], start: bytes, capsys: Any
) -> None:
    assert main([*argv, *flags]) == 1
    assert Path(flags[1]).read_bytes().startswith(start)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "xml"], "--format 'xml' is not one of jsonl, csv, parquet"),
        (["--format", "parquet"], "--format parquet needs --output FILE"),
        (["-o", "missing/out.csv"], "cannot write --output missing/out.csv: No such file"),
        (["-o", "."], "cannot write --output .: Is a directory"),
        (["-o", "good.txt"], "--output good.txt is one of the files that are read"),
        (["-o", "s.json"], "--output s.json is one of the files that are read"),
    ],
)
def test_an_output_that_cannot_be_is_told_before_the_engine_loads(
    fake_local: FakeEngine, argv: list[str], flags: list[str], message: str, capsys: Any
) -> None:
    assert main([*argv, *flags]) == 2
    assert message in capsys.readouterr().err
    assert (fake_local.state, Path("good.txt").read_text()) == ("new", "Ada is 36")


def test_an_engine_that_dies_leaves_what_was_found_in_the_table(
    fake_local: FakeEngine, argv: list[str], capsys: Any
) -> None:
    Path("table.csv").write_text("text\n" + "Ada is 36\n" * 3)
    play = fake_local._play

    def play_twice(request: Any) -> Any:
        return die() if len(fake_local.requests) == 3 else play(request)

    async def die() -> AsyncGenerator[RequestOutput]:
        raise EngineDead("on fire")
        yield

    fake_local._play = play_twice  # type: ignore[method-assign]
    assert main(["extract", "--schema", "s.json", "table.csv", "-o", "out.csv"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "troupe: on fire"
    assert [row["name"] for row in read_csv(Path("out.csv").read_bytes())] == ["Ada", "Ada"]


def test_records_that_no_table_can_keep_are_printed_as_lines(
    fake_local: FakeEngine, argv: list[str], capsys: Any
) -> None:
    fake_local.record = '{"name": "\\ud800", "age": 1}'
    assert main([*argv, "-o", "out.csv"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[0])["record"]["name"] == "\ud800"
    assert "only JSONL can keep" in printed.err and "they are on stdout as JSONL" in printed.err


def test_ground_and_limits_are_listed_as_flags_of_the_extraction(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["extract", "--help"])
    own, evaluation = capsys.readouterr().out.split("evaluate settings:")
    assert "--ground" in own and "--limits" in own
    assert "--ground" not in evaluation and "--limits" not in evaluation
