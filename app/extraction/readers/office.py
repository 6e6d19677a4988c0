"""Reads the text of Word, Excel, PowerPoint, HTML and mail files, in a process of its own (main.py).

Rows of tables are lines with " | " between the cells. Values stand as they are stored: nothing is rounded or guessed.
"""

from __future__ import annotations

import email
import email.policy
import importlib
import io
import posixpath
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import olefile

Lines = Iterator[str]
CELL_GAP = " | "
# Parts of a paragraph that are not shown: deleted text, codes of fields, and the copy of a drawing for old programs.
UNSEEN = {"del", "moveFrom", "instrText", "delText", "Fallback", "pPr", "rPr"}
BREAKS = {"tab": " ", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
UNCOMPUTED = re.compile(rb"(?:</f>|<f[^>]*/>)\s*(?:<v\s*/>|<v></v>)?\s*</c>")  # a formula without its value
PADDED = re.compile(r"0[0 /-]*0")  # the format of a number with leading zeros, as 000-00
MAX_WHOLE = 1e21  # numbers below are written with all their digits
RELATIONS = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}"
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".emf", ".wmf", ".bmp", ".tiff")
# Fields of an Outlook file, by their numbers.
SUBJECT, SENDER, ADDRESS, TO, CC = "0037", "0C1A", "5D01", "0E04", "0E03"
BODY, FILE_NAME, SENT = "1000", "3707", 0x00390040
PAGE, RTF = "10130102", "10090102"
MIN_SHOWN = 0.9  # words of the HTML of a mail for each one of its plain text
# HTML elements that begin a line, and those whose content is not shown.
BLOCKS = {
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "div", "dl", "dt", "fieldset", "figure",
    "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "option", "p",
    "pre", "section", "table", "tbody", "tfoot", "thead", "title", "tr", "ul",
}
SHOWN_INPUTS = {"text", "email", "tel", "url", "number", "date", "time", "month", "week", "search"}
HIDDEN = {"script", "style", "template", "noscript"}


def read(data: bytes, kind: str, max_chars: int) -> dict[str, Any]:
    """Return the text and the notes of a file of that kind, as docx, or why it is refused."""
    notes: list[str] = []
    try:
        text = "\n".join(READERS[kind](data, notes))
    except zipfile.BadZipFile:
        return {"refused": "is damaged, or locked with a password; save it anew without one"}
    if len(text) > max_chars:
        return {"refused": f"has more than {max_chars:,} characters of text: split it"}
    return {"text": re.sub(r"\n{3,}", "\n\n", text).strip(), "notes": notes}


def read_docx(data: bytes, notes: list[str]) -> Lines:
    """Yield headers, text with tables and text boxes, comments, footnotes and footers."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        _note_pictures(package, "word/", notes)
        names = sorted(package.namelist())
        heads = [name for name in names if re.fullmatch(r"word/header\d*\.xml", name)]
        feet = [name for name in names if re.fullmatch(r"word/(?:footnotes|endnotes|comments|footer\d*)\.xml", name)]
        seen: set[str] = set()
        for name in (*heads, "word/document.xml", *feet):
            lines = list(_read_blocks(_parse(package, name)))
            if name == "word/document.xml":
                yield from lines
            elif (text := "\n".join(filter(str.strip, lines))) and text not in seen:
                seen.add(text)
                yield text


def read_pptx(data: bytes, notes: list[str]) -> Lines:
    """Yield the slides in their order, each with its notes."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        _note_pictures(package, "ppt/", notes)
        slides = _read_relations(package, "ppt/presentation.xml")
        listed = _parse(package, "ppt/presentation.xml").iter()
        order = [slides[each.attrib[f"{RELATIONS}id"]] for each in listed if _name(each) == "sldId"]
        for number, name in enumerate(order, 1):
            yield f"\nSlide {number}"
            yield from _read_blocks(_parse(package, name))
            for path in _read_relations(package, name).values():
                if "notesSlide" in path:
                    yield from _read_blocks(_parse(package, path))


def _note_pictures(package: zipfile.ZipFile, folder: str, notes: list[str]) -> None:
    names = [name.lower() for name in package.namelist() if name.startswith(folder)]
    for what, number in (
        ("picture", sum("/media/" in name and name.endswith(PICTURES) for name in names)),
        ("chart", sum("/charts/chart" in name for name in names)),
    ):
        if number:
            notes.append(f"{number} {what}{'s were' if number > 1 else ' was'} left out")


def _parse(package: zipfile.ZipFile, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(package.read(name))


def _read_relations(package: zipfile.ZipFile, name: str) -> dict[str, str]:
    """Return the paths of the parts that a part refers to."""
    folder, file = posixpath.split(name)
    relations = f"{folder}/_rels/{file}.rels"
    if relations not in package.namelist():
        return {}
    found = ((each.attrib["Id"], each.attrib["Target"]) for each in _parse(package, relations))
    return {key: posixpath.normpath(posixpath.join("/", folder, target))[1:] for key, target in found}


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _read_blocks(element: ElementTree.Element) -> Lines:
    """Yield paragraphs and rows of tables, as they stand in elements of any kind."""
    for child in element:
        name = _name(child)
        if name == "p":
            boxes: list[str] = []
            yield "".join(_read_inline(child, boxes))
            yield from boxes
        elif name == "tr":
            yield from _read_row(child)
        elif name not in UNSEEN:
            yield from _read_blocks(child)


def _read_row(row: ElementTree.Element) -> Lines:
    """Yield the cells as one line; a cell with a table in it has its own lines."""
    cells: list[str] = []
    for cell in _find_cells(row):
        if any(_name(each) == "tbl" for each in cell):
            if any(cells):
                yield CELL_GAP.join(cells)
            cells = []
            yield from _read_blocks(cell)
        else:
            cells.append(" ".join(" ".join(_read_blocks(cell)).split()))
    if cells:
        yield CELL_GAP.join(cells)


def _find_cells(row: ElementTree.Element) -> Iterator[ElementTree.Element]:
    for child in row:
        if _name(child) == "tc":
            yield child
        elif _name(child) in ("sdt", "sdtContent", "ins", "customXml"):
            yield from _find_cells(child)


def _read_inline(element: ElementTree.Element, boxes: list[str]) -> Iterator[str]:
    """Yield the text of a paragraph; text boxes that are fixed to it are put into `boxes`."""
    for child in element:
        name = _name(child)
        if name == "t":
            yield child.text or ""
        elif name in BREAKS:
            yield BREAKS[name]
        elif name == "txbxContent":
            boxes.extend(_read_blocks(child))
        elif name not in UNSEEN:
            yield from _read_inline(child, boxes)


def read_xlsx(data: bytes, notes: list[str]) -> Lines:
    """Yield the rows of all sheets, each sheet behind its name."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        sheets = [package.read(name) for name in package.namelist() if name.startswith("xl/worksheets/sheet")]
    if num_formulas := sum(len(UNCOMPUTED.findall(sheet)) for sheet in sheets):
        plural = "s have" if num_formulas > 1 else " has"
        notes.append(f"{num_formulas} formula{plural} no stored value; save the file in a spreadsheet program once")
    # By name, because it is slow to import, and only needed here.
    book = importlib.import_module("openpyxl").load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    for sheet in book.worksheets:
        rows = [[_spell(cell) for cell in row] for row in sheet.iter_rows()]
        lines = [CELL_GAP.join(row).rstrip(" |") for row in rows if any(row)]
        if lines:
            yield f"\n{sheet.title}"
            yield from lines
    if num_charts := len(book.chartsheets):
        notes.append(f"{num_charts} sheet{'s' * (num_charts > 1)} with only a chart left out")


def _spell(cell: Any) -> str:
    value = cell.value
    if value is None:
        return ""
    if isinstance(value, float) and "%" in cell.number_format:
        return f"{value * 100:.10g}%"
    shape = cell.number_format.split(";")[0].replace("\\", "")
    if isinstance(value, int | float) and PADDED.fullmatch(shape) and value >= 0 and value == int(value):
        size = shape.count("0")
        digits = f"{int(value):0{size}d}"
        last = iter(digits[-size:])
        return digits[:-size] + re.sub("0", lambda _: next(last), shape)
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < MAX_WHOLE else f"{value:.15g}"
    if isinstance(value, datetime) and not any(sign in cell.number_format.lower() for sign in ("h", "s")):
        value = value.date()
    return " ".join(str(value).split())  # a date is written as 2026-05-03


class HtmlText(HTMLParser):
    """The text of a page as lines: blocks, and rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.rows, self.num_hidden = [""], [], 0  # type: ignore[var-annotated]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.num_hidden += tag in HIDDEN
        if tag == "tr":
            self.rows.append(False)
            self.lines.append("")
        elif tag in ("td", "th"):
            if self.rows and self.rows[-1]:
                self.lines[-1] += CELL_GAP
            self.rows[-1:] = [True]
        elif tag in BLOCKS:
            self._end_line()
        elif tag == "input":
            named = dict(attributes)
            if (named.get("type") or "text") in SHOWN_INPUTS:
                self.handle_data(f" {named.get('value') or ''} ")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self.num_hidden = max(0, self.num_hidden - 1)
        if tag == "tr" and self.rows:
            self.rows.pop()
            # The row around a table in a cell goes on in a new line.
            self.rows[-1:] = [False] * bool(self.rows)
            self.lines.append("")
        elif tag in BLOCKS:
            self._end_line()

    def _end_line(self) -> None:
        if self.rows and self.rows[-1]:
            self.lines[-1] += " "
        else:
            self.lines.append("")

    def handle_data(self, text: str) -> None:
        if not self.num_hidden:
            self.lines[-1] += re.sub(r"\s+", " ", text)


def read_html(data: bytes, notes: list[str]) -> Lines:
    """Yield the lines of a page in UTF-8."""
    parser = HtmlText()
    parser.feed(data.decode("utf-8", "replace"))
    parser.close()
    yield from (re.sub(r" +", " ", line).strip() for line in parser.lines if line.strip())


def read_eml(data: bytes, notes: list[str]) -> Lines:
    """Yield the headers that people read, and the body."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    for name in ("From", "To", "Cc", "Date", "Subject"):
        if message[name]:
            yield f"{name}: {message[name]}"
    yield ""
    found = [message.get_body((kind,)) for kind in ("plain", "html")]  # type: ignore[attr-defined]
    if found == [None, None]:  # another kind of text, as of a calendar; a multipart without parts is one text
        parts = list(message.iter_parts()) if message.is_multipart() else [message]  # type: ignore[attr-defined]
        texts = (each for each in parts if each.get_content_maintype() in ("text", "multipart"))
        found[0] = next((each for each in texts if not each.is_multipart() and not each.is_attachment()), None)
    plain, page = (
        "" if each is None else _decode(each.get_payload(decode=True) or b"", each.get_content_charset(""), notes)
        for each in found
    )
    if not plain.strip() and not page.strip():
        kinds = {each.get_content_type(): None for each in message.walk() if not each.is_multipart()}
        notes.append(f"the mail has no text that can be read; it is {', '.join(kinds)}")
    yield from _choose_body(plain, page)
    left = [each for each in message.iter_attachments() if each not in found]  # type: ignore[attr-defined]
    names = [each.get_filename() or each.get_content_type() for each in left]
    _note_attachments(names, notes)


def _decode(payload: Any, charset: str, notes: list[str]) -> str:
    """Return a text of a mail by the encoding that the mail or the page names, or else as that of a text file."""
    decoding = importlib.import_module("decoding")  # of the folder above, slow to import
    try:
        text, guessed = decoding.decode_text(payload, "the mail", charset or decoding.find_declared(payload))
    except decoding.UnreadableSource as error:
        notes.append(f"{error}; letters are missing")
        return str(payload.decode("utf-8", "replace"))
    if guessed:
        notes.append(decoding.describe_guess("the mail", guessed))
    return str(text)


def _choose_body(plain: str, page: str) -> list[str]:
    """Return the lines of the plain text, or those of the HTML if only that has the rows of a table."""
    lines = plain.splitlines()
    shown = list(read_html(page.encode(), []))
    num_words, num_shown = (len(" ".join(each).replace(CELL_GAP, " ").split()) for each in (lines, shown))
    has_rows = any(CELL_GAP in line for line in shown) and num_shown >= MIN_SHOWN * num_words
    return shown if has_rows or not plain.strip() else lines


def read_msg(data: bytes, notes: list[str]) -> Lines:
    """Yield the headers that people read, and the body, of a mail that Outlook has saved."""
    with olefile.OleFileIO(io.BytesIO(data)) as file:
        streams = {path[-1].rpartition("_")[2]: path for path in file.listdir() if len(path) == 1}

        def find(number: str) -> str:
            for kind, encoding in (("001F", "utf-16-le"), ("001E", "cp1252")):
                if path := streams.get(number + kind):
                    return str(file.openstream(path).read().decode(encoding, "replace").rstrip("\0"))
            return ""

        sender = f"{find(SENDER)} <{find(ADDRESS)}>" if find(ADDRESS) else find(SENDER)
        heads = {"From": sender, "To": find(TO), "Cc": find(CC), "Date": _find_date(file), "Subject": find(SUBJECT)}
        yield from (f"{name}: {value}" for name, value in heads.items() if value)
        yield ""
        page = file.openstream(streams[PAGE]).read().rstrip(b"\0") if PAGE in streams else b""
        yield from _choose_body(find(BODY), _decode(page, "", notes))
        if not page and not find(BODY) and RTF in streams:
            notes.append("its text is kept as RTF only, which is not read here; save the mail as HTML or EML")
        names = [path for path in file.listdir() if len(path) == 2 and path[1].endswith(f"{FILE_NAME}001F")]
        _note_attachments([file.openstream(path).read().decode("utf-16-le").rstrip("\0") for path in names], notes)


def _find_date(file: Any) -> str:
    properties = file.openstream("__properties_version1.0").read()[32:]
    for tag, _, value in struct.iter_unpack("<IIQ", properties[: len(properties) // 16 * 16]):
        if tag == SENT:
            sent = datetime(1601, 1, 1, tzinfo=UTC) + timedelta(microseconds=value // 10)
            return sent.isoformat(" ", "seconds")
    return ""


def _note_attachments(names: list[str], notes: list[str]) -> None:
    if names:
        notes.append(f"attachments left out: {', '.join(names)}")


READERS: dict[str, Callable[[bytes, list[str]], Lines]] = {
    "docx": read_docx, "pptx": read_pptx, "xlsx": read_xlsx, "html": read_html, "htm": read_html, "eml": read_eml,
    "msg": read_msg, "docm": read_docx, "dotx": read_docx, "dotm": read_docx, "xlsm": read_xlsx, "xltx": read_xlsx,
    "xltm": read_xlsx, "pptm": read_pptx, "potx": read_pptx, "ppsx": read_pptx,
}
