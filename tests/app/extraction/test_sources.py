"""Files become rows; one that cannot be read is a row that says why, and the others go on."""

import io
from pathlib import Path
from typing import Any

import pytest

from app.extraction import sources
from app.extraction.sources import UnreadableSource, read_rows, read_table


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def make_pdf(text: str) -> bytes:
    pypdf: Any = pytest.importorskip("pypdf", reason="pypdf is not installed")
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(200, 200)
    if text:
        stream = pypdf.generic.StreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        names = {pypdf.generic.NameObject(k): pypdf.generic.NameObject(v) for k, v in font.items()}
        fonts = pypdf.generic.DictionaryObject(
            {pypdf.generic.NameObject("/F1"): pypdf.generic.DictionaryObject(names)}
        )
        resources = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/Font"): fonts})
        page[pypdf.generic.NameObject("/Resources")] = resources
        page[pypdf.generic.NameObject("/Contents")] = writer._add_object(stream)
    sink = io.BytesIO()
    writer.write(sink)
    return sink.getvalue()


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_csv_rows_have_the_cells_of_their_columns(tmp_path: Path, mark: str) -> None:
    lines = [f"id{mark}body", f'1{mark}"two\nlines"', "", f"2{mark}Ada"]
    rows = read_rows(write(tmp_path, "a.csv", "\ufeff" + "\r\n".join(lines)))
    assert [row.cells for row in rows] == [{"id": "1", "body": "two\nlines"}, {"id": "2", "body": "Ada"}]
    assert rows[1].name == "a.csv row 2"


def test_a_cell_may_be_long_and_columns_may_lack_names(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.csv", f"x,,x\n{'a' * 200_000},b,c\n"))
    assert list(rows[0].cells) == ["x", "column 2", "x (3)"] and len(rows[0].cells["x"]) == 200_000


def test_jsonl_lines_are_rows_and_a_broken_one_is_an_error_of_its_own(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.jsonl", '{"text": "a", "n": 1}\n\n{oops\n"plain"\n'))
    assert rows[0].cells == {"text": "a", "n": "1"} and rows[2].cells == {"text": "plain"}
    assert rows[1].error is not None and "a.jsonl line 3 is not JSON" in rows[1].error


def test_every_other_file_is_one_row(tmp_path: Path) -> None:
    table = read_table(
        [write(tmp_path, "a.txt", "one\r\ntwo"), write(tmp_path, "b.pdf", make_pdf("Hello there"))]
    )
    assert [row.cells["text"] for row in table.rows] == ["one\ntwo", "Hello there"]
    assert table.columns == ("file", "text") and table.pick_text_column() == "text"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff", "a.txt is not UTF-8 text"),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", 'a,b\n"x', "a.csv is not CSV"),
        ("a.pdf", b"%PDF-1.4 nothing", "a.pdf cannot be read as PDF"),
    ],
)
def test_a_file_that_cannot_be_read_says_why_and_the_others_go_on(
    tmp_path: Path, name: str, content: Any, words: str
) -> None:
    if name == "a.pdf":
        pytest.importorskip("pypdf", reason="pypdf is not installed")
    table = read_table([write(tmp_path, name, content), write(tmp_path, "b.txt", "fine")])
    assert table.rows[0].error is not None and words in table.rows[0].error
    assert table.rows[1].cells["text"] == "fine"


def test_a_scanned_pdf_is_told_from_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="has no text in it"):
        read_rows(write(tmp_path, "a.pdf", make_pdf("")))


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 3)
    with pytest.raises(UnreadableSource, match=r"a\.txt is larger than"):
        read_rows(write(tmp_path, "a.txt", "four"))


def test_the_longest_column_is_taken_where_no_name_tells(tmp_path: Path) -> None:
    table = read_table([write(tmp_path, "a.csv", "id,remarks,who\n1,a long remark it is,Ada\n")])
    assert table.pick_text_column() == "remarks"
