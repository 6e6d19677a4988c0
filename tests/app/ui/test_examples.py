"""Example files are found by name, matched to schemas, and read as text only."""

from pathlib import Path

from app.extraction.sources import read_text
from app.ui.examples import load_examples


def make_assets(tmp_path: Path) -> Path:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "samples").mkdir()
    for name in ("job", "job_posting"):
        (tmp_path / "schemas" / f"{name}.json").write_text("{}")
    (tmp_path / "samples" / "job_posting_1.txt").write_text("Baker wanted")
    (tmp_path / "samples" / "photo.png").write_bytes(b"")
    return tmp_path


def test_a_sample_goes_with_the_schema_that_names_it_best(tmp_path: Path) -> None:
    examples = load_examples(make_assets(tmp_path))
    assert list(examples.samples) == ["job posting 1"]
    assert examples.schema_for("job posting 1") == "job posting" and examples.schema_for("memo") is None


def test_missing_folders_are_no_error(tmp_path: Path) -> None:
    examples = load_examples(tmp_path)
    assert examples.schemas == {} and examples.samples == {}


def test_line_ends_and_byte_order_marks_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc")
    assert read_text(path) == "a\nb\nc"
