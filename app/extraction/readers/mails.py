"""Reads web pages and mails: their text as lines, with " | " between the cells of a table."""

from __future__ import annotations

import email
import email.policy
import importlib
import io
import re
import struct
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import olefile

from .package import CELL_GAP, CHECKED, UNCHECKED, Lines

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


class HtmlText(HTMLParser):
    """The text of a page as lines: blocks, and rows of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.rows, self.num_hidden = [""], [], 0  # type: ignore[var-annotated]
        self.options: list[tuple[bool, str]] | None = None  # of a list to choose from: whether chosen, and its text

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.num_hidden += tag in HIDDEN
        if tag == "tr":
            self.rows.append(False)
            self.lines.append("")
        elif tag in ("td", "th"):
            if self.rows and self.rows[-1]:
                self.lines[-1] += CELL_GAP
            self.rows[-1:] = [True]
        elif tag == "select":
            self.options = []
        elif tag == "option" and self.options is not None:
            self.options.append(("selected" in dict(attributes), ""))
        elif tag in BLOCKS:
            self._end_line()
        elif tag == "input":
            named = dict(attributes)
            kind = (named.get("type") or "text").lower()
            if kind in SHOWN_INPUTS:
                self.handle_data(f" {named.get('value') or ''} ")
            elif kind in ("checkbox", "radio"):
                self.handle_data(f" {CHECKED if 'checked' in named else UNCHECKED} ")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self.num_hidden = max(0, self.num_hidden - 1)
        if tag == "select" and (options := self.options):
            self.options = None
            chosen = [text for is_chosen, text in options if is_chosen] or [options[0][1]]
            self.handle_data(f" {', '.join(map(str.strip, chosen))} ")
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
        if self.options:
            is_chosen, before = self.options[-1]
            self.options[-1] = (is_chosen, before + text)
        elif not self.num_hidden:
            self.lines[-1] += re.sub(r"\s+", " ", text)


def read_html(data: bytes, notes: list[str]) -> Lines:
    """Yield the lines of a page in UTF-8."""
    parser = HtmlText()
    parser.feed(data.decode("utf-8", "replace"))
    parser.close()
    yield from (re.sub(r" +", " ", line).strip() for line in parser.lines if line.strip())


def read_eml(data: bytes, notes: list[str]) -> Lines:
    """Yield the headers that people read, and the body."""
    message = email.message_from_bytes(data.removeprefix(b"\xef\xbb\xbf").lstrip(), policy=email.policy.default)
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
