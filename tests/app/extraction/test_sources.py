"""Files become rows; one that cannot be read is a row that says why, and the others go on."""

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from app.extraction import files, pdf, sources
from app.extraction.decoding import UnreadableSource
from app.extraction.files import read_file
from app.extraction.sources import Source, Table, dump_source, load_source, make_table, read_rows
from tests.app.extraction.pdf_files import make_pdf


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read_table(paths: Iterable[Path]) -> Table:
    return make_table([row for path in paths for row in read_file(path).rows])


def test_csv_rows_have_the_cells_of_their_columns(tmp_path: Path) -> None:
    lines = ["id;body", '1;"two\nlines"', "", "2;Ada"]
    rows = read_rows(write(tmp_path, "a.csv", "\ufeff" + "\r\n".join(lines)))
    assert [row.cells for row in rows] == [{"id": "1", "body": "two\nlines"}, {"id": "2", "body": "Ada"}]
    assert rows[1].name == "a.csv row 2"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{oops", "is not JSON: "), ('{"text": "a", "text": "b"}', "is not JSON: duplicate key 'text'"),
        *((line, "has an unpaired surrogate") for line in (
            r'{"text": "so happy \ud83d"}', r'{"tags": [{"\udc00": 1}]}', r'{"\ud83d": 1}')),
    ],
)
def test_jsonl_lines_are_rows_and_a_broken_one_is_an_error_of_its_own(tmp_path: Path, line: str, words: str) -> None:
    rows = read_rows(write(tmp_path, "a.jsonl", f'{{"text": "\\ud83d\\ude00", "n": 1}}\n\n{line}\n"plain"\n'))
    assert rows[0].cells == {"text": "\U0001f600", "n": "1"} and rows[2].cells == {"text": "plain"}
    assert rows[1].error is not None and rows[1].error.startswith(f"a.jsonl line 3 {words}")
    assert rows[1].error.encode() and not rows[1].cells


def test_a_row_with_more_cells_than_the_header_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.csv", "id,text\n1,Name: Ann, total 12 EUR\n2,Bob,, \n"))
    assert rows[0].error == "a.csv row 1 has 3 cells, the header 2: quote the text"
    assert rows[1].cells == {"id": "2", "text": "Bob"}


def test_a_delimiter_that_the_header_lacks_tears_no_text_apart(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path, "b.csv", "text\nPrice: 3,50 EUR\n"))
    assert row.error == "b.csv row 1 has 2 cells, the header 1: quote the text"
    (row,) = read_rows(write(tmp_path, "c.csv", '"a, b\nc";text\n1;x, y, z\n'))
    assert row.cells == {"a, b\nc": "1", "text": "x, y, z"}


def test_null_is_an_empty_cell_and_no_word(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.jsonl", '{"text": null, "ok": true}\nnull\n'))
    assert [row.cells for row in rows] == [{"text": "", "ok": "true"}, {"text": ""}]


def test_every_other_file_is_one_row(tmp_path: Path) -> None:
    table = read_table([write(tmp_path, "a.txt", "one\r\ntwo"), write(tmp_path, "b.pdf", make_pdf("Hello there"))])
    assert [row.cells["text"] for row in table.rows] == ["one\ntwo", "Hello there"]
    assert table.columns == ("file", "text") and table.pick_text_column() == "text"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff", "a.txt is not UTF-8 text"), ("a.csv", "", "a.csv is empty"),
        ("a.csv", "\n , \n", "a.csv is empty"),
        ("a.csv", "id,text\n", "a.csv has a header and no row below it"),
        ("a.jsonl", "\n", "a.jsonl is empty"), ("a.csv", 'a,b\n"x', "a.csv is not CSV, line 2"),
        ("a.csv", 'a,b\n\n"x"\n"Hello" he said,1\nok,2\n', "a.csv is not CSV, line 4"),
        ("a.csv", 'a,b\n"x,1\ny,2\nz', "a.csv is not CSV, lines 2 to 4"),
        ("a.pdf", b"%PDF-1.4 nothing", "a.pdf cannot be read as PDF"),
    ],
)
def test_a_file_that_cannot_be_read_says_why_and_the_others_go_on(
    tmp_path: Path, name: str, content: Any, words: str
) -> None:
    table = read_table([write(tmp_path, name, content), write(tmp_path, "b.txt", "fine")])
    assert table.rows[0].error is not None and words in table.rows[0].error
    assert table.rows[1].cells["text"] == "fine"


def test_a_photo_is_a_document_for_a_model_that_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.PNG", b"pixels")
    (row,) = read_rows(path, with_images=True)
    assert (row.pick("text").text, row.pick("text").images) == ("", (b"pixels",))
    monkeypatch.setattr(pdf, "find_ocr", tuple)
    with pytest.raises(UnreadableSource, match=r"a\.PNG is an image, which this model does not see: install"):
        read_rows(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(UnreadableSource, match=r"a\.txt is larger than 1 MiB"):
        read_rows(write(tmp_path, "a.txt", "x" * (2**20 + 1)))


def test_the_longest_column_is_taken_where_no_name_tells(tmp_path: Path) -> None:
    table = read_table([write(tmp_path, "a.csv", "id,remarks,who\n1,a long remark it is,Ada\n")])
    assert table.pick_text_column() == "remarks"


@pytest.mark.parametrize(("mark", "other"), [(";", ","), (",", ";"), ("\t", ",")])
def test_of_two_delimiters_the_one_that_makes_even_rows_is_taken(tmp_path: Path, mark: str, other: str) -> None:
    lines = [["name", f"size{other} in m", "place"], ["a", "1", f"b{other} c{other} d"], ["e", f"2{other}5", "f"]]
    rows = read_rows(write(tmp_path, "t.csv", "\n".join(mark.join(line) for line in lines)))
    assert [list(row.cells.values()) for row in rows] == lines[1:]


def test_a_document_is_the_same_after_it_was_stored() -> None:
    source = Source("a", "é\n\nb", {"x": "y"}, None, (0, 3), (b"\x89PNG", "data:image/png;base64,AA"), ("a note",))
    assert load_source(dump_source(source)) == source


def make_book(*sheets: list[list[Any]]) -> bytes:
    book = openpyxl.Workbook()
    for number, rows in enumerate(sheets):
        sheet = book.worksheets[0] if number == 0 else book.create_sheet()
        for row in rows:
            sheet.append(row)
    book.save(out := io.BytesIO())
    return out.getvalue()


MAILS = [["id", "mail"], [1, "Dear all,\nAda; 36"], [None, None], [2, "Bob"]]


def test_a_table_of_excel_has_a_row_a_line_with_its_line_breaks(tmp_path: Path) -> None:
    rows = read_file(write(tmp_path, "a.xlsx", make_book(MAILS))).rows
    assert [row.cells for row in rows] == [{"id": "1", "mail": "Dear all,\nAda; 36"}, {"id": "2", "mail": "Bob"}]
    assert rows[1].name == "a.xlsx row 2"


@pytest.mark.parametrize(
    "sheets",
    [
        [MAILS, MAILS], [[["Invoice 7"], ["Vendor", "Ada Ltd"], ["Pen", 2, 1.5], ["Total", None, 3]]],
        [[["Name", "Ada"], ["Age", 36]]], [[[2024, 2025], [1, 2], [3, 4]]], [[["a", "b"], [1, 2], [3, 4, "x"]]],
        [[["a", "b", "c", "d"], ["x"], ["y"], ["z"]]],
    ],
)
def test_another_excel_file_is_one_document(tmp_path: Path, sheets: list[list[list[Any]]]) -> None:
    (row,) = read_file(write(tmp_path, "a.xlsx", make_book(*sheets))).rows
    assert row.error is None and row.cells["file"] == "a.xlsx"


def test_a_zip_file_has_the_rows_of_the_files_in_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(path := tmp_path / "all.zip", "w") as package:
        members = {
            "in/b.pdf": make_pdf("Bob is 7."), "in/a.csv": "id,text\n1,Ada\n2,Eve", "in/photo.xyz": b"\xff\0\xff",
            "__MACOSX/in/._b.pdf": b"x", "in/.DS_Store": b"x", "in/c.xlsx": make_book(MAILS),
        }
        for name, content in members.items():
            package.writestr(name, content)
    rows = read_file(path).rows
    assert [row.name for row in rows] == [
        "in/a.csv row 1", "in/a.csv row 2", "in/b.pdf", "in/c.xlsx row 1", "in/c.xlsx row 2", "in/photo.xyz"
    ]
    assert rows[2].cells["text"] == "Bob is 7." and [row.error is None for row in rows] == [True] * 5 + [False]


def test_a_zip_file_that_is_damaged_or_too_large_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(content: bytes) -> str:
        (row,) = read_file(write(tmp_path, "a.zip", content)).rows
        return str(row.error)

    with zipfile.ZipFile(out := io.BytesIO(), "w") as package:
        package.writestr("a.txt", "Ada " * 99)
    assert "a.zip is no zip file" in refuse(b"PK")
    assert "a.txt cannot be unpacked" in refuse(out.getvalue().replace(b"Ada Ada", b"Ada Eve", 1))
    monkeypatch.setattr(files, "MAX_ZIP_BYTES", 99)
    assert "holds more than" in refuse(out.getvalue())
    monkeypatch.setattr(files, "MAX_MEMBERS", 0)
    assert "has 1 files; at most 0" in refuse(out.getvalue())
