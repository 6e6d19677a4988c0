"""`extract`: what it reads and refuses, and its records as lines, CSV or Parquet, on stdout or in a file."""

import csv
import io
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont
from pyarrow import parquet

from app.cli.main import main
from app.cli.record_output import choose_output
from app.config import UsageError
from app.extraction.pdf import find_ocr
from engine import EngineDead, RequestOutput
from tests.engine.vision_folders import make_picture
from tests.fakes import PERSON, FakeEngine

DATED = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
FILES: dict[str, Any] = {
    "s.json": PERSON, "dated.json": DATED, "list.json": [1], "wrong.json": {"type": "nonsense"},
    "deep.json": "[" * 5000, "x.bin": b"\xff\xfe\x00", "good.txt": "Ada is 36", "empty.txt": " \n",
    "day.txt": "2 January 2026", "t.csv": "id,text,note\n7,Ada is 36,x\n8,Bob is 7,y\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        text = content if isinstance(content, str | bytes) else json.dumps(content)
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())


def extract(*arguments: str) -> int:
    return main(["extract", "--schema", "s.json", *arguments])


def read_csv(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))


def test_a_file_gives_one_json_line_and_an_empty_one_no_record(fake_local: FakeEngine, capsys: Any) -> None:
    assert extract("good.txt", "good.txt") == 0
    assert extract("empty.txt", "good.txt") == 1
    printed = capsys.readouterr()
    *_, empty, good = map(json.loads, printed.out.splitlines())
    assert (good["source"], good["record"], good["valid"]) == ("good.txt", {"name": "Ada", "age": 36}, True)
    assert (empty["record"], empty["error"]) == (None, "the text is empty: there is nothing to extract")
    assert "[2/2]" in printed.err


def test_images_and_scans_are_documents_or_fail_alone(fake_local: FakeEngine, capsys: Any) -> None:
    make_picture((60, 40)).save("scan.pdf")
    make_picture((60, 40)).save("photo.jpg")
    fake_local.sees_images = True
    assert extract("scan.pdf", "photo.jpg") == 0
    assert all("<image>" in each.prompt for each in fake_local.requests)
    fake_local.sees_images = False
    assert extract("scan.pdf", "good.txt") == 1
    scan, good = map(json.loads, capsys.readouterr().out.splitlines()[2:])
    assert scan["error"].startswith("scan.pdf has no text in it (scanned pages are pictures)") and good["valid"]


@pytest.mark.skipif(not find_ocr(), reason="tesseract is not installed")
def test_a_scan_is_read_by_ocr_for_a_model_that_sees_no_images(fake_local: FakeEngine, capsys: Any) -> None:
    scan = Image.new("RGB", (900, 300), "white")
    ImageDraw.Draw(scan).text((100, 100), "Ada is 36", "black", ImageFont.load_default(64))
    scan.save("scan.png")
    assert extract("scan.png") == 0
    assert "Ada is 36" in fake_local.requests[0].prompt and "<image>" not in fake_local.requests[0].prompt
    assert json.loads(capsys.readouterr().out)["notes"] == ["scan.png: text read by OCR"]


@pytest.mark.parametrize(("flags", "beside"), [([], {"id": "7", "note": "x"}), (["--column", "note"], None)])
def test_each_row_of_a_table_gives_a_line(fake_local: FakeEngine, flags: list[str], beside: Any, capsys: Any) -> None:
    assert extract(*flags, "t.csv") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["source"] for line in lines] == ["t.csv row 1", "t.csv row 2"]
    assert lines[0]["row"] == (beside or {"id": "7", "text": "Ada is 36"})
    assert any("Ada is 36" in request.prompt for request in fake_local.requests) == (not flags)


@pytest.mark.parametrize(("flags", "is_limited"), [([], True), (["--no-limits"], False)])
def test_limits_are_added_and_named_unless_switched_off(
    fake_local: FakeEngine, flags: list[str], is_limited: bool, capsys: Any
) -> None:
    assert extract("--schema", "s.json", "good.txt", *flags) == 0
    words = "added limits: 200 characters a text"
    assert (words in capsys.readouterr().err) is is_limited
    grammar = fake_local.requests[0].params.grammar
    assert grammar is not None and ("maxLength" in grammar.text) is is_limited


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schema list.json good.txt", "a schema is a JSON object"),
        ("--schema good.txt good.txt", "good.txt is not JSON"), ("--schema wrong.json good.txt", "nonsense"),
        ("--schema deep.json good.txt", "deep.json is not JSON"),
        ("--schema missing.json good.txt", "missing.json cannot be read: No such file"),
        ("--schema - -", "stdin (-) can be read once"), ("", "needs --schema and at least one file"),
        ("x.bin", "is not UTF-16-LE text"),
        ("--column x t.csv", "--column x: t.csv has the columns id, text, note"),
        ("good.txt --wrong", "--wrong goes with --evaluate"),
        ("good.txt --calibration x", "--calibration goes with --evaluate"),
        ("good.txt --format xml", "--format 'xml' is not one of jsonl, csv, xlsx, parquet"),
        ("good.txt --format parquet", "--format parquet needs --output FILE"),
        ("good.txt -o missing/out.csv", "cannot write --output missing/out.csv: No such file"),
        ("good.txt -o .", "cannot write --output .: Is a directory"),
        ("good.txt -o good.txt", "--output good.txt is one of the files that are read"),
        ("good.txt -o s.json", "--output s.json is one of the files that are read"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_the_engine_loads(
    fake_local: FakeEngine, arguments: str, message: str, capsys: Any
) -> None:
    assert extract(*arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert (fake_local.state, Path("good.txt").read_text()) == ("new", "Ada is 36")


def test_records_are_json_whatever_stdout_can_spell(fake_local: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_local.record = '{"name": "José", "age": 1}'
    monkeypatch.setattr(sys, "stdout", written := io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert extract("good.txt") == 0
    assert json.loads(written.buffer.getvalue())["record"]["name"] == "José"  # type: ignore[attr-defined]


def test_csv_on_stdout_has_a_row_a_record_and_failed_ones_too(
    fake_local: FakeEngine, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert extract("good.txt", "empty.txt", "--format", "csv") == 1
    good, empty = read_csv(capfdbinary.readouterr().out)
    assert (good["source"], good["name"], good["age"], good["error"]) == ("good.txt", "Ada", "36", "")
    assert (empty["source"], empty["name"]) == ("empty.txt", "")
    assert empty["error"].startswith("the text is empty")


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        (["-o", "out.csv"], b"\xef\xbb\xbfsource,"), (["-o", "OUT.PARQUET"], b"PAR1"),
        (["--output", "out.jsonl"], b'{"source": "good.txt"'), (["-o", "out.txt"], b'{"source": "good.txt"'),
        (["-o", "out.csv", "--format", "jsonl"], b'{"source": "good.txt"'),
    ],
)
def test_a_file_has_the_format_of_its_suffix_unless_one_is_given(
    fake_local: FakeEngine, flags: list[str], start: bytes, capsys: Any
) -> None:
    assert extract("good.txt", "empty.txt", *flags) == 1
    assert Path(flags[1]).read_bytes().startswith(start)
    assert capsys.readouterr().out == ""


def die_at(engine: FakeEngine, name: str) -> None:
    """Let the engine die when it is asked about this name, until `revive`."""
    play = type(engine)._play.__get__(engine)

    def play_unless(request: Any) -> Any:
        return die() if name in request.prompt else play(request)

    async def die() -> AsyncGenerator[RequestOutput]:
        raise EngineDead("on fire")
        yield

    engine._play = play_unless  # type: ignore[method-assign]


def revive(engine: FakeEngine) -> None:
    del engine._play
    engine.requests.clear()


NAMES = ["Ada", "Bob", "Cid", "Eve", "Fay"]


def read_sources(path: str) -> list[str]:
    data = Path(path).read_bytes()
    if path.endswith("jsonl"):
        return [json.loads(line)["source"] for line in data.splitlines()]
    if path.endswith("csv"):
        return [row["source"] for row in read_csv(data)]
    return [str(each) for each in parquet.read_table(io.BytesIO(data))["source"].to_pylist()]


@pytest.mark.parametrize("path", ["out.jsonl", "out.csv", "out.parquet"])
@pytest.mark.parametrize("torn", ["", '{"source": "t.csv row 4", "rec'])
def test_a_stopped_run_goes_on_and_loses_and_repeats_nothing(
    fake_local: FakeEngine, path: str, torn: str, capsys: Any
) -> None:
    Path("t.csv").write_text("id,text\n" + "".join(f"{n},{name} is 36\n" for n, name in enumerate(NAMES)))
    Path(path).write_text("an earlier file")
    die_at(fake_local, "Eve")
    assert extract("t.csv", "-o", path) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "troupe: on fire"
    rows = [f"t.csv row {number}" for number in range(1, 6)]
    assert read_sources(path) == rows[:3]
    with Path(f"{path}.job").open("a") as file:
        file.write(torn)  # what a kill leaves
    revive(fake_local)
    assert extract("t.csv", "-o", path) == 0
    assert "going on with a stopped run: 3 of 5 records are there" in capsys.readouterr().err
    assert len(fake_local.requests) == 2 and read_sources(path) == rows
    assert not Path(f"{path}.job").exists()


def test_lines_are_in_the_file_as_they_end_and_an_earlier_file_stays_until_then() -> None:
    Path("out.jsonl").write_text("an earlier file")
    with choose_output(None, "out.jsonl", []).open("job") as write:
        assert Path("out.jsonl").read_text() == "an earlier file"
        for number in range(3):
            write({"source": f"{number}", "valid": True, "record": {"a": 1}})
            assert read_sources("out.jsonl") == list("012"[: number + 1])


def test_a_stopped_run_of_another_job_is_not_continued(fake_local: FakeEngine, capsys: Any) -> None:
    Path("t.csv").write_text("text\nAda is 36\nEve is 36\n")
    die_at(fake_local, "Eve")
    assert extract("t.csv", "-o", "out.csv") == 1
    revive(fake_local)
    assert extract("t.csv", "-o", "out.csv", "--ground") == 2
    assert "out.csv.job keeps the records of a stopped run with another schema" in capsys.readouterr().err
    assert fake_local.requests == [] and [row["name"] for row in read_csv(Path("out.csv").read_bytes())] == ["Ada"]


def test_two_runs_do_not_write_one_file() -> None:
    output = choose_output(None, "out.csv", [])
    with output.open("job"), pytest.raises(UsageError, match=r"another run writes out\.csv\.job"), output.open("job"):
        pass


def test_records_that_no_table_can_keep_are_printed_as_lines(fake_local: FakeEngine, capsys: Any) -> None:
    fake_local.record = '{"name": "\\ud800", "age": 1}'
    assert extract("good.txt", "empty.txt", "-o", "out.csv") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[0])["record"]["name"] == "\ud800"
    assert "only JSONL can keep" in printed.err and "they are on stdout as JSONL" in printed.err
