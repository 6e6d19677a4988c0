"""Files become rows; one that cannot be read is a row that says why, and the others go on."""

import importlib.util
import io
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pypdf
import pytest
from PIL import Image

from app.extraction import pdf, sources
from app.extraction.pdf import read_pdf, render_page
from app.extraction.pdf_text import read_pages
from app.extraction.sources import (
    Table,
    UnreadableSource,
    make_table,
    read_file,
    read_rows,
)
from tests.engine.vision_folders import make_picture


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read_table(paths: Iterable[Path]) -> Table:
    return make_table([row for path in paths for row in read_file(path).rows])


def make_pdf(text: str, password: str | None = None, characters: str = "", num_pages: int = 1) -> bytes:
    pypdf: Any = pytest.importorskip("pypdf", reason="pypdf is not installed")
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(200, 200)
    for _ in range(num_pages - 1):
        writer.add_blank_page(200, 200)
    if text:
        stream = pypdf.generic.StreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())
        font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
        names = {pypdf.generic.NameObject(k): pypdf.generic.NameObject(v) for k, v in font.items()}
        if characters:
            table = pypdf.generic.StreamObject()
            table.set_data(f"begincmap 2 beginbfchar {characters} endbfchar endcmap".encode())
            names[pypdf.generic.NameObject("/ToUnicode")] = writer._add_object(table)
        fonts = pypdf.generic.DictionaryObject(
            {pypdf.generic.NameObject("/F1"): pypdf.generic.DictionaryObject(names)}
        )
        resources = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/Font"): fonts})
        page[pypdf.generic.NameObject("/Resources")] = resources
        page[pypdf.generic.NameObject("/Contents")] = writer._add_object(stream)
    if password is not None:
        writer.encrypt(password, "owner", algorithm="RC4-128")
    sink = io.BytesIO()
    writer.write(sink)
    return sink.getvalue()


def claim_aes(data: bytes) -> bytes:
    """The same encrypted file, which now says that it is encrypted with AES."""
    filters = b"/CF << /StdCF << /CFM /AESV2 /AuthEvent /DocOpen /Length 16 >> >> /StmF /StdCF /StrF /StdCF"
    claimed = data.replace(b"/V 2\n", b"/V 4\n" + filters + b"\n", 1).replace(b"/R 3\n", b"/R 4\n", 1)
    assert len(claimed) == len(data) + len(filters) + 1
    return claimed


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


def test_a_line_with_a_key_twice_is_an_error_of_its_own(tmp_path: Path) -> None:
    first, second = read_rows(write(tmp_path, "a.jsonl", '{"text": "a", "text": "b"}\n{"text": "c"}\n'))
    assert (
        first.error == "a.jsonl line 1 is not JSON: duplicate key 'text'" and not first.cells
    )
    assert second.cells == {"text": "c"}


def test_a_row_with_more_cells_than_the_header_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.csv", "id,text\n1,Name: Ann, total 12 EUR\n2,Bob,, \n"))
    assert rows[0].error == "a.csv row 1 has 3 cells, the header 2: quote the text"
    assert rows[1].cells == {"id": "2", "text": "Bob"}


def test_a_delimiter_that_the_header_lacks_tears_no_text_apart(tmp_path: Path) -> None:
    lines = "A | B; c\nC | D; d\nE | F; e\n"
    assert [row.cells for row in read_rows(write(tmp_path, "a.csv", "text\n" + lines))] == [
        {"text": line} for line in lines.splitlines()
    ]
    (row,) = read_rows(write(tmp_path, "b.csv", "text\nPrice: 3,50 EUR\n"))
    assert row.error == "b.csv row 1 has 2 cells, the header 1: quote the text"
    (row,) = read_rows(write(tmp_path, "c.csv", '"a, b\nc";text\n1;x, y, z\n'))
    assert row.cells == {"a, b\nc": "1", "text": "x, y, z"}


@pytest.mark.parametrize("lead", ["\n\n", "  \n;;\n"])
def test_blank_lines_before_the_header_are_skipped(tmp_path: Path, lead: str) -> None:
    table = read_table([write(tmp_path, "a.csv", f"{lead}id;text\n1;a, b\n")])
    assert table.columns == ("id", "text") and table.rows[0].cells == {"id": "1", "text": "a, b"}


def test_no_column_hides_another_of_the_same_name(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path, "a.csv", "x,x (3),x\n1,2,3\n"))
    assert sorted(row.cells.values()) == ["1", "2", "3"]


def test_null_is_an_empty_cell_and_no_word(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, "a.jsonl", '{"text": null, "ok": true}\nnull\n'))
    assert [row.cells for row in rows] == [{"text": "", "ok": "true"}, {"text": ""}]


@pytest.mark.parametrize(
    "line", [r'{"text": "so happy \ud83d"}', r'{"tags": [{"\udc00": 1}]}', r'{"\ud83d": 1}']
)
def test_a_line_with_half_a_surrogate_pair_is_an_error_and_the_others_go_on(
    tmp_path: Path, line: str
) -> None:
    rows = read_rows(write(tmp_path, "a.jsonl", f'{{"text": "a"}}\n{line}\n{{"text": "\\ud83d\\ude00"}}\n'))
    assert rows[1].error is not None and "a.jsonl line 2 has an unpaired surrogate" in rows[1].error
    assert rows[1].error.encode() and not rows[1].cells
    assert [rows[0].cells["text"], rows[2].cells["text"]] == ["a", "\U0001f600"]


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
        ("a.csv", "\n , \n", "a.csv is empty"),
        ("a.csv", "id,text\n", "a.csv has a header and no row below it"),
        ("a.jsonl", "\n", "a.jsonl is empty"),
        ("a.csv", 'a,b\n"x', "a.csv is not CSV, line 2"),
        ("a.csv", 'a,b\n\n"x"\n"Hello" he said,1\nok,2\n', "a.csv is not CSV, line 4"),
        ("a.csv", 'a,b\n"x,1\ny,2\nz', "a.csv is not CSV, lines 2 to 4"),
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


def join_pdfs(*files: bytes) -> bytes:
    whole = pypdf.PdfWriter()
    for file in files:
        whole.append(io.BytesIO(file))
    sink = io.BytesIO()
    whole.write(sink)
    return sink.getvalue()


def make_scan(*numbers: int) -> bytes:
    """A PDF with a picture on each page."""
    sinks = [io.BytesIO() for _ in numbers]
    for sink, number in zip(sinks, numbers, strict=True):
        make_picture((60, 40), number).save(sink, "PDF")
    return join_pdfs(*(sink.getvalue() for sink in sinks))


def test_pages_without_text_are_images_if_wanted_and_blank_pages_are_not(tmp_path: Path) -> None:
    path = write(tmp_path, "a.pdf", join_pdfs(make_pdf("Hello there", num_pages=2), make_scan(0, 1)))
    (row,) = read_rows(path, with_images=True)
    found = row.pick("text")
    assert found.text.strip() == "Hello there" and len(found.images) == 2
    for data, number in zip(found.images, range(2), strict=True):
        shown = np.asarray(Image.open(io.BytesIO(data)).resize((60, 40)), float)
        assert np.abs(shown - np.asarray(make_picture((60, 40), number), float)).mean() < 8
    assert read_rows(path)[0].pick("text").images == ()


def test_pages_as_images_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "MAX_IMAGES", 1)
    with pytest.raises(UnreadableSource, match=r"a\.pdf has more than 1 pages without text: split it"):
        read_pdf(make_scan(0, 1), "a.pdf", with_images=True)
    writer = pypdf.PdfWriter(io.BytesIO(make_scan(0)))
    writer.pages[0].scale_to(14_400, 14_400)
    sink = io.BytesIO()
    writer.write(sink)
    (image,) = read_pdf(sink.getvalue(), "b.pdf", with_images=True)[1]
    width, height = Image.open(io.BytesIO(image)).size
    assert 2**20 < width * height <= 2**21 + width + height


def test_a_photo_is_a_document_for_a_model_that_sees_it(tmp_path: Path) -> None:
    path = write(tmp_path, "a.PNG", b"pixels")
    (row,) = read_rows(path, with_images=True)
    assert (row.pick("text").text, row.pick("text").images) == ("", (b"pixels",))
    with pytest.raises(UnreadableSource, match=r"a\.PNG is an image, which this model does not see"):
        read_rows(path)


def test_a_quote_is_highlighted_where_it_stands_on_a_page(tmp_path: Path) -> None:
    data = make_pdf("to be or not to be")
    first, second, none = (
        np.asarray(Image.open(io.BytesIO(render_page(data, "a.pdf", 0, *quote))), float)
        for quote in (("to  be", ""), ("to be", "to be or not "), ("", ""))
    )
    marked = [np.abs(page - none).sum((0, 2)) > 2000 for page in (first, second)]
    columns = [np.flatnonzero(each) for each in marked]
    assert 20 < len(columns[0]) < 120 and columns[0].max() < columns[1].min()


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(UnreadableSource, match=r"a\.txt is larger than 1 MiB"):
        read_rows(write(tmp_path, "a.txt", "x" * (2**20 + 1)))


def test_the_longest_column_is_taken_where_no_name_tells(tmp_path: Path) -> None:
    table = read_table([write(tmp_path, "a.csv", "id,remarks,who\n1,a long remark it is,Ada\n")])
    assert table.pick_text_column() == "remarks"


def test_a_pdf_that_opens_without_a_password_is_read_and_a_locked_one_says_so() -> None:
    opened, locked = (read_pages(make_pdf("Hello there", password), 1, 100) for password in ("", "secret"))
    assert opened == {"pages": ["Hello there"]}
    assert locked == {"refused": "is locked with a password; save it without one first"}


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("cryptography", "Crypto")), reason="AES can be read here"
)
def test_an_aes_pdf_says_that_it_is_encrypted() -> None:
    reason = read_pages(claim_aes(make_pdf("Hello there", "")), 1, 100)["refused"]
    assert "is encrypted in a way" in reason and "save it without encryption first" in reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"<<\n/Type /Pages", b"1 0 R\n/Type /Pages", "indirect_reference"),  # AttributeError in pypdf
        (b"/F1 12", b"1 0 R 12", ""),  # AssertionError without words
        (b"/Length 42", b"/Length 42 /Filter /JBIG2Decode", ""),  # DependencyError
    ],
)
def test_a_damaged_pdf_is_told_as_such(tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
    whole = make_pdf("Hello there")
    assert whole.count(old) == 1
    with pytest.raises(UnreadableSource, match=rf"a\.pdf cannot be read as PDF: (?=\S).*{reason}"):
        read_rows(write(tmp_path, "a.pdf", whole.replace(old, new)))


def test_a_pdf_that_never_ends_is_refused_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pdf, "MAX_PDF_SECONDS", 0.5)
        with pytest.raises(UnreadableSource, match=r"a\.pdf takes longer than 0\.5 s to read"):
            read_pdf(make_pdf(") Tj (" * 500_000), "a.pdf")
    monkeypatch.setattr(pdf, "MAX_PDF_PAGES", 1)
    assert read_pdf(make_pdf("Hello"), "b.pdf")[0] == ["Hello"]
    with pytest.raises(UnreadableSource, match=r"c\.pdf has 2 pages; at most 1 are read: split it"):
        read_pdf(make_pdf("Hello", num_pages=2), "c.pdf")


def test_the_text_of_a_pdf_is_limited() -> None:
    limits = {"max_pages": 1, "max_chars": 4}
    assert read_pages(make_pdf("", num_pages=2), **limits)["refused"].startswith("has 2 pages; at most 1")
    assert read_pages(make_pdf("Helo"), **limits) == {"pages": ["Helo"]}
    assert read_pages(make_pdf("Hello"), **limits) == {
        "refused": "has more than 4 characters of text: split it"
    }


def test_halves_of_a_character_in_a_pdf_are_joined_and_a_lone_one_is_marked() -> None:
    (text,) = read_pdf(make_pdf("ab a", characters="<61> <D83D> <62> <DE00>"), "a.pdf")[0]
    assert text == "\U0001f600 \ufffd"


def test_many_quotes_do_not_make_a_table_slow_to_read(tmp_path: Path) -> None:
    text = 'a,b;c\n"x","y"\n"y","z"\n' + '"' * 4000 + "x\n"
    begun = time.process_time()
    with suppress(UnreadableSource):
        read_rows(write(tmp_path, "t.csv", text))
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(("mark", "other"), [(";", ","), (",", ";"), ("\t", ",")])
def test_of_two_delimiters_the_one_that_makes_even_rows_is_taken(
    tmp_path: Path, mark: str, other: str
) -> None:
    lines = [
        ["name", f"size{other} in m", "place"],
        ["a", "1", f"b{other} c{other} d"],
        ["e", f"2{other}5", "f"],
    ]
    rows = read_rows(write(tmp_path, "t.csv", "\n".join(mark.join(line) for line in lines)))
    assert [list(row.cells.values()) for row in rows] == lines[1:]
