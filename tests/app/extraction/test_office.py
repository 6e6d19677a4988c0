"""Word, Excel, PowerPoint, HTML and mail files become lines; what was left out is named."""

import io
import re
import struct
import sys
import zipfile
from datetime import date, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace

import openpyxl
import pytest
from openpyxl.comments import Comment

from app.extraction import decoding
from app.extraction.decoding import UnreadableSource, decode_text, find_declared
from app.extraction.readers.mails import read_eml
from app.extraction.readers.office import READERS
from app.extraction.readers.sheets import _spell
from app.extraction.sources import OFFICE_TYPES, parse_rows, read_office

WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
DRAWING = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
RELATION = 'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"'
CELLS = "<w:tc><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc>"


def zip_up(**parts: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as package:
        for name, text in parts.items():
            package.writestr(name.replace("__", "/"), text)
    return buffer.getvalue()


def make_docx() -> bytes:
    rows = "".join(
        f"<w:tr>{CELLS.format(one)}<w:sdt><w:sdtContent>{CELLS.format(two)}</w:sdtContent></w:sdt></w:tr>"
        for one, two in (("Item", "Price"), ("Desk lamp", "49.50"))
    )
    box = "<w:txbxContent><w:p><w:r><w:t>In a box</w:t></w:r></w:p></w:txbxContent>"
    body = f"""<w:p><w:r><w:t>Order</w:t></w:r><w:del><w:r><w:delText>9</w:delText></w:r></w:del><w:ins><w:r>
    <w:t xml:space="preserve"> 1042</w:t></w:r></w:ins><w:r><w:tab/><w:t>May</w:t></w:r></w:p>
    <w:sdt><w:sdtContent><w:p><w:r><w:t>Northwind Ltd</w:t></w:r></w:p></w:sdtContent></w:sdt><w:tbl>{rows}</w:tbl>
    <w:tbl><w:tr><w:tc><w:tbl>{rows}</w:tbl></w:tc></w:tr></w:tbl>
    <w:p><w:r><mc:AlternateContent xmlns:mc="x"><mc:Choice>{box}</mc:Choice><mc:Fallback>{box}</mc:Fallback>
    </mc:AlternateContent></w:r></w:p>"""
    document = f"<w:document {WORD}><w:body>{body}</w:body></w:document>"
    parts = {"word__document.xml": document, "word__media__1.png": "x"}
    for name, text in (
        ("header1", "ACME"), ("header2", "ACME"), ("footer1", "VAT 123"), ("footnotes", "See terms"),
        ("comments", "Who ordered?"),
    ):
        parts[f"word__{name}.xml"] = f"<w:x {WORD}><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:x>"
    return zip_up(**parts)


def make_pptx() -> bytes:
    def make_slide(text: str) -> str:
        row = "".join(f"<a:tc><a:txBody><a:p><a:r><a:t>{each}</a:t></a:r></a:p></a:txBody></a:tc>" for each in "AB")
        shape = f"<p:txBody><a:p><a:r><a:t>{text}</a:t></a:r></a:p></p:txBody><a:tbl><a:tr>{row}</a:tr></a:tbl>"
        return f'<p:sld xmlns:p="p" {DRAWING}>{shape}</p:sld>'

    def make_relations(*targets: str) -> str:
        listed = "".join(f'<Relationship Id="r{n}" Target="{each}"/>' for n, each in enumerate(targets))
        return f'<Relationships xmlns="x">{listed}</Relationships>'

    order = '<p:sldIdLst><p:sldId id="256" r:id="r1"/><p:sldId id="257" r:id="r0"/></p:sldIdLst>'
    return zip_up(
        ppt__presentation_xml="", **{
            "ppt__presentation.xml": f'<p:presentation xmlns:p="p" {RELATION}>{order}</p:presentation>',
            "ppt___rels__presentation.xml.rels": make_relations("slides/slide1.xml", "slides/slide2.xml"),
            "ppt__slides__slide1.xml": make_slide("Last"), "ppt__slides__slide2.xml": make_slide("First"),
            "ppt__slides___rels__slide1.xml.rels": make_relations("../notesSlides/notesSlide1.xml"),
            "ppt__notesSlides___rels__notesSlide1.xml.rels": make_relations("../slides/slide1.xml"),
            "ppt__notesSlides__notesSlide1.xml": f"<p:n xmlns:p='p' {DRAWING}><a:p><a:t>A note</a:t></a:p></p:n>",
        }
    )  # fmt: skip


def make_xlsx() -> bytes:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Sales"
    sheet.append(["Date", "Amount", "Count", "VAT", ""])
    sheet.append([date(2026, 5, 3), 1234.5, 2, 0.19, None])
    sheet["D2"].number_format = "0%"
    sheet.append([datetime(2026, 5, 3, 14, 30), None, "two\nlines", None, "=B2*2"])
    book.create_sheet("Empty")
    buffer = io.BytesIO()
    book.save(buffer)
    return buffer.getvalue()


def make_msg(streams: dict[tuple[str, ...], bytes]) -> bytes:
    """A compound file whose streams fill whole sectors; its directory is a chain of siblings, which readers accept."""
    names: list[tuple[str, ...]] = sorted({path[:n] for path in streams for n in range(1, len(path) + 1)})
    padded = {path: data.ljust(4096, b"\0") for path, data in streams.items()}
    fat, body, starts = [0xFFFFFFFD], b"", {}
    num_entries = len(names) + 1
    num_sectors = -(-num_entries // 4)
    fat += [*range(2, num_sectors + 1), 0xFFFFFFFE]
    for path, data in padded.items():
        starts[path], count = len(fat), -(-len(data) // 512)
        fat += [*range(len(fat) + 1, len(fat) + count), 0xFFFFFFFE]
        body += data.ljust(512 * count, b"\0")
    following = {}
    for parent in {path[:-1] for path in names}:
        children = [path for path in names if path[:-1] == parent]
        following |= {one: names.index(two) + 1 for one, two in pairwise(children)}

    def make_entry(path: tuple[str, ...], kind: int) -> bytes:
        name = (path[-1] if path else "Root Entry").encode("utf-16-le") + b"\0\0"
        child = next((names.index(each) + 1 for each in names if each[:-1] == path), 0xFFFFFFFF)
        head = name.ljust(64, b"\0") + struct.pack("<HBB", len(name), kind, 1)
        links = struct.pack("<III", 0xFFFFFFFF, following.get(path, 0xFFFFFFFF), child if kind != 2 else 0xFFFFFFFF)
        end = struct.pack("<IQ", starts.get(path, 0xFFFFFFFE), len(padded.get(path, b"")))
        return head + links + bytes(36) + end

    entries = [make_entry((), 5), *(make_entry(path, 2 if path in streams else 1) for path in names)]
    directory = b"".join(entries).ljust(512 * num_sectors, b"\0")
    table = struct.pack(f"<{len(fat)}I", *fat).ljust(512, b"\xff")
    assert len(fat) <= 128
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16) + struct.pack("<HHHHH", 62, 3, 0xFFFE, 9, 6) + bytes(6)
    head += struct.pack("<9I", 0, 1, 1, 0, 4096, 0xFFFFFFFE, 0, 0xFFFFFFFE, 0)
    return head + struct.pack("<I", 0).ljust(4 * 109, b"\xff") + table + directory + body


PROPERTIES = ("__properties_version1.0",)


def make_mail() -> bytes:
    text = {"0037": "Order", "0C1A": "Ada", "5D01": "ada@example.com", "0E04": "Bob", "1000": "Two lamps.\r\nThanks"}
    streams = {(f"__substg1.0_{number}001F",): each.encode("utf-16-le") for number, each in text.items()}
    sent = struct.pack("<IIQ", 0x00390040, 6, 134_222_574_000_000_000)
    streams[PROPERTIES] = bytes(32) + sent
    streams[("__attach_version1.0_#00000000", "__substg1.0_3707001F")] = "a.pdf".encode("utf-16-le")
    return make_msg(streams)


EML = b"""From: Ada <ada@example.com>
To: Bob <bob@example.com>
Subject: =?utf-8?q?B=C3=BCro?=
Content-Type: multipart/mixed; boundary=b

--b
Content-Type: text/html; charset=utf-8
Content-Transfer-Encoding: quoted-printable

<p>Two <b>lamps</b></p><table><tr><td>Lamp<td>49,50 =E2=82=AC</table>
--b
Content-Type: application/pdf
Content-Disposition: attachment; filename="a.pdf"

x
--b--
"""
# Its plain text has a line for each cell.
TABLE_MAIL = b"""Content-Type: multipart/alternative; boundary=b

--b

Item
Price
Lamp
5
--b
Content-Type: text/html

<table><tr><td>Item<td>Price<tr><td>Lamp<td>5</table>
--b--
"""
HTML = """<!doctype html><title>Shop</title><style>p {}</style><script>var a = "<p>no</p>";</script>
<h1>Order  1042</h1><p>Two<br>lines &amp; more</p><table><tr><th>Item</th><th>Price</th></tr>
<tr><td><p>Desk</p> lamp</td><td></td></tr></table><ul><li>one<li>two</ul>"""


@pytest.mark.parametrize(
    ("name", "data", "text", "notes"),
    [
        (
            "a.docx", make_docx(), "ACME\nOrder 1042 May\nNorthwind Ltd\nItem | Price\nDesk lamp | 49.50\n"
            "Item | Price\nDesk lamp | 49.50\n\nIn a box\nWho ordered?\nVAT 123\nSee terms",
            ("a.docx: 1 picture was left out",),
        ),
        ("a.pptx", make_pptx(), "Slide 1\nFirst\nA | B\n\nSlide 2\nLast\nA | B\nA note", ()),
        (
            "a.xlsx", make_xlsx(), "Sales\nDate | Amount | Count | VAT\n2026-05-03 | 1234.5 | 2 | 19%\n"
            "2026-05-03 14:30:00 |  | two lines",
            ("a.xlsx: 1 formula has no stored value; save the file in a spreadsheet program once",),
        ),
        (
            "a.html", b"<table><tr><td><table><tr><td>a<td>b<tr><td>c<td>d</table><tr><td><input value=e></table>",
            "a | b\nc | d\ne", (),
        ),
        (
            "a.html", b"<p>Rech&shy;nung<select><option>a<option selected>b</select><input type=checkbox checked>c",
            "Rechnung b [x] c", (),
        ),
        ("a.html", HTML.encode(), "Shop\nOrder 1042\nTwo\nlines & more\nItem | Price\nDesk lamp |\none\ntwo", ()),
        (
            "a.eml", EML, "From: Ada <ada@example.com>\nTo: Bob <bob@example.com>\nSubject: Büro\n\nTwo lamps\n"
            "Lamp | 49,50 €", ("a.eml: attachments left out: a.pdf",),
        ),
        (
            "a.eml", TABLE_MAIL, "Item | Price\nLamp | 5", (),
        ),
        ("a.mhtml", b"\xef\xbb\xbf" + TABLE_MAIL, "Item | Price\nLamp | 5", ()),
        ("a.eml", TABLE_MAIL.replace(b"<td>Price", b"Price").replace(b"<td>5", b"5"), "Item\nPrice\nLamp\n5", ()),
        ("a.msg", make_msg({("__substg1.0_10130102",): b"<p>Gr\xc3\xbc\xc3\x9fe", PROPERTIES: b""}), "Grüße", ()),
        (
            "a.msg", make_mail(), "From: Ada <ada@example.com>\nTo: Bob\nDate: 2026-05-03 04:50:00+00:00\n"
            "Subject: Order\n\nTwo lamps.\nThanks", ("a.msg: attachments left out: a.pdf",),
        ),
    ],
)  # fmt: skip
def test_the_text_of_each_kind(name: str, data: bytes, text: str, notes: tuple[str, ...]) -> None:
    assert read_office(data, name) == (text, notes)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.docx", b"no zip", "is damaged, or locked with a password"),
        ("a.xlsx", zip_up(x="y"), "cannot be read as XLSX"),
        ("a.xls", b"", "save it as .xlsx"),
        ("a.html", b"<p> </p>", "has no text in it"),
        ("a.docx", zip_up(**{"word__document.xml": "x" * 2**20}), "cannot be read as DOCX"),
    ],
)
def test_what_cannot_be_read_says_why(name: str, data: bytes, words: str) -> None:
    with pytest.raises(UnreadableSource, match=words):
        read_office(data, name)


@pytest.mark.parametrize("head", ["<meta charset={}>", "<meta http-equiv=content-type content='a; charset={}'>"])
@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("gb2312", "gbk", "发票号码镕"), ("big5", "big5", "發票"), ("euc-kr", "euc_kr", "송장"),
        ("iso-8859-2", "iso8859-2", "Łódź"), ("iso-8859-15", "iso8859-15", "5 €"), ("x-sjis", "cp932", "請求書"),
        ("iso-2022-jp", "iso2022_jp", "請求書"), ("windows-1251", "cp1251", "Счёт"), ("iso-8859-1", "utf-8", "Größe €"),
        ("unicode_escape", "utf-8", "Größe"), ("nonsense", "utf-8", "Größe"),
    ],
)
def test_page_is_decoded_as_it_declares(head: str, declared: str, encoding: str, text: str) -> None:
    page = head.format(declared).encode() + text.encode(encoding)
    assert decode_text(page, "a.html", find_declared(page)) == (head.format(declared) + text, "")


@pytest.mark.parametrize(
    ("head", "body", "text", "note"),
    [
        ("X: y", "Größe".encode(), "Größe", ""),
        ("X: y", "Größe".encode("cp1252"), "Größe", "was read as cp1252"),
        ("Content-Type: text/plain; charset=us-ascii", "Größe".encode(), "Größe", ""),
        ("Content-Type: text/plain; charset=gb2312", "發票镕".encode("gbk"), "發票镕", ""),
        ("Content-Type: text/html", "<meta charset=iso-8859-2><p>Łódź".encode("iso-8859-2"), "Łódź", ""),
        ("Content-Type: text/calendar", b"BEGIN:VCALENDAR", "BEGIN:VCALENDAR", ""),
        ("Content-Type: multipart/mixed", b"no boundary", "no boundary", ""),
        ("Content-Type: multipart/mixed; boundary=b", b"--b\nContent-Type: text/x\n\nDTSTART\n--b--", "DTSTART", ""),
        ("Content-Type: application/pdf", b"%PDF", "", "no text that can be read; it is application/pdf"),
    ],
)
def test_mail_body_is_read_or_a_note_says_why_not(
    monkeypatch: pytest.MonkeyPatch, head: str, body: bytes, text: str, note: str
) -> None:
    monkeypatch.setitem(sys.modules, "decoding", decoding)
    notes: list[str] = []
    lines = list(read_eml(f"Subject: x\nMIME-Version: 1.0\n{head}\n\n".encode() + body, notes))
    assert "\n".join(lines).strip() == f"Subject: x\n\n{text}".strip()
    assert len(notes) == bool(note) and note in "".join(notes)


def test_binary_mail_is_refused() -> None:
    with pytest.raises(UnreadableSource, match="is not a mail"):
        parse_rows(bytes(range(256)), "a.eml")


@pytest.mark.parametrize(("kind", "data"), [("docx", make_docx()), ("pptx", make_pptx())])
def test_names_of_parts_are_equal_without_regard_to_case(kind: str, data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        parts = {name.upper(): package.read(name).decode() for name in package.namelist()}
    assert read_office(zip_up(**parts), f"a.{kind}") == read_office(data, f"a.{kind}")


@pytest.mark.parametrize("kind", ["docm", "dotx"])
def test_files_with_macros_and_templates_are_read(kind: str) -> None:
    assert f".{kind}" in OFFICE_TYPES and list(READERS[kind](make_docx(), []))


@pytest.mark.parametrize(
    ("value", "shape", "text"),
    [
        (42, "00000", "00042"), (42.0, "00000;-0", "00042"), (123456789, "000\\-00\\-0000", "123-45-6789"),
        (123, "00", "123"), (12345678901234567.0, "General", "12345678901234568"), (0.1 + 0.2, "General", "0.3"),
        (1, "0%", "100%"), (-2, "0.0 %", "-200%"), (0.123456789012, "0%", "12.3456789012%"), (True, "0%", "True"),
        (1234.5, "_($* #,##0.00_);_($* (#,##0.00)", "$1234.5"), (-1234.5, '"$"#,##0.00', "-$1234.5"),
        (1234.5, "#,##0.00\\ [$€-407]", "1234.5 €"), (5, '0 "kg; net"', "5 kg; net"), (12, '"INV-"0000', "INV-0012"),
        (1.5e6, '0.0,,"M"', "1500000"), (timedelta(hours=30, minutes=5), "[h]:mm", "30:05:00"),
        (datetime(2026, 3, 4), "[$-en-US]d-mmm-yy", "2026-03-04"),
        (datetime(2026, 3, 4), "d.m.yy h:mm", "2026-03-04 00:00:00"),
    ],
)
def test_numbers_are_written_with_all_their_digits_and_the_signs_of_their_formats(
    value: object, shape: str, text: str
) -> None:
    assert _spell(SimpleNamespace(value=value, number_format=shape)) == text


def test_sheet_is_read_beyond_the_size_that_it_states() -> None:
    with zipfile.ZipFile(io.BytesIO(make_xlsx())) as package:
        parts = {name: package.read(name).decode() for name in package.namelist()}
    name = "xl/worksheets/sheet1.xml"
    parts[name] = re.sub("<dimension[^>]*>", '<dimension ref="A1"/>', parts[name])
    assert read_office(zip_up(**parts), "a.xlsx")[0] == read_office(make_xlsx(), "a.xlsx")[0]


def test_comments_and_text_boxes_of_a_sheet_are_read() -> None:
    book = openpyxl.Workbook()
    book.active["B2"] = 5
    book.active["B2"].comment = Comment("net of\nVAT", "Ada")
    buffer = io.BytesIO()
    book.save(buffer)
    with zipfile.ZipFile(buffer, "a") as package:
        package.writestr("xl/drawings/drawing9.xml", f"<x {DRAWING}><a:p><a:r><a:t>Paid</a:t></a:r></a:p></x>")
    assert read_office(buffer.getvalue(), "a.xlsx") == ("Sheet\n | 5\n[Comment B2: net of VAT]\nPaid", ())


def test_word_file_with_symbols_form_fields_and_parts_under_other_names() -> None:
    body = """<w:p><w:r><w:sym w:font="Wingdings" w:char="F0FE"/><w:t>a</w:t>
    <w:sym w:font="Z" w:char="F001"/></w:r></w:p>
    <w:p><w:r><w:fldChar><w:ffData><w:checkBox><w:default w:val="1"/><w:checked w:val="0"/></w:checkBox></w:ffData>
    </w:fldChar><w:fldChar><w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="x"/><w:listEntry w:val="y"/>
    </w:ddList></w:ffData></w:fldChar></w:r></w:p>"""
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    relation = '<Relationships xmlns="x"><Relationship Id="r1" Type="{}" Target="{}"/></Relationships>'
    data = zip_up(**{
        "_rels/.rels": relation.format(f"{kind}/officeDocument", "/word/document2.xml"),
        "word/document2.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>",
        "word/_rels/document2.xml.rels": relation.format(f"{kind}/aFChunk", "/word/a.html"),
        "word/diagrams/data1.xml": f"<x {DRAWING}><a:p><a:r><a:t>In a diagram</a:t></a:r></a:p></x>",
        "word/embeddings/1.xlsx": "x",
    })  # fmt: skip
    text, notes = read_office(data, "a.docx")
    assert text.split("\n") == ["[x]a\ufffd", "[ ]y", "In a diagram"]
    assert notes == ("a.docx: 1 embedded file was left out", "a.docx: 1 inserted file was left out")
