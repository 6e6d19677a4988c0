"""Reads the text of Word, PowerPoint, Excel, HTML and mail files, in a process of its own (main.py)."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from typing import Any

from .mails import read_eml, read_html, read_msg
from .package import (
    Element,
    Lines,
    Package,
    find_main,
    find_parts,
    name_of,
    note_unread,
    parse,
    read_blocks,
    read_relations,
)
from .sheets import read_table, read_xlsx


def read(data: bytes, kind: str, max_chars: int) -> dict[str, Any]:
    """Return the text and the notes of a file of that kind, as docx, or why it is refused."""
    notes: list[str] = []
    try:
        text = "\n".join(READERS[kind](data, notes))
    except zipfile.BadZipFile:
        return {"refused": "is damaged, or locked with a password; save it anew without one"}
    if len(text) > max_chars:
        return {"refused": f"has more than {max_chars:,} characters of text: split it"}
    # A soft hyphen is not shown within a line.
    return {"text": re.sub(r"\n{3,}", "\n\n", text.replace("\u00ad", "")).strip(), "notes": notes}


def read_docx(data: bytes, notes: list[str]) -> Lines:
    """Yield headers, text with tables and text boxes, diagrams, comments, footnotes and footers."""
    package = Package(data)
    note_unread(package, "word/", notes)
    main = find_main(package, "word/document.xml")
    heads = find_parts(package, r"word/header\d*\.xml")
    feet = find_parts(package, r"word/(?:diagrams/data\d*|footnotes|endnotes|comments|footer\d*)\.xml")
    seen: set[str] = set()
    for name in (*heads, main, *feet):
        lines = list(read_blocks(parse(package, name)))
        if name == main:
            yield from lines
        elif (text := "\n".join(filter(str.strip, lines))) and text not in seen:
            seen.add(text)
            yield text


def read_pptx(data: bytes, notes: list[str]) -> Lines:
    """Yield the slides in their order, each with its diagrams, notes and comments."""
    package = Package(data)
    note_unread(package, "ppt/", notes)
    main = find_main(package, "ppt/presentation.xml")
    slides = read_relations(package, main)
    # A listed slide has an `id`, which is a number, and an `r:id`, which names its relation.
    listed = [each.attrib for each in parse(package, main).iter() if name_of(each) == "sldId"]
    order = [slides[each[key]] for each in listed for key in each if key.endswith("/relationships}id")]
    for number, name in enumerate(order, 1):
        yield f"\nSlide {number}"
        yield from read_blocks(parse(package, name))
        for path in read_relations(package, name).values():
            if re.search("/notesslides/|/diagrams/data", path):
                yield from read_blocks(parse(package, path))
            elif "/comments/" in path:
                yield from _read_comments(parse(package, path))


def _read_comments(part: Element) -> Lines:
    """Yield comments of both forms: one has a text, the newer one paragraphs."""
    texts = [" ".join((each.text or "").split()) for each in part.iter() if name_of(each) == "text"]
    yield from (f"[Comment: {text}]" for text in [*texts, *read_blocks(part)] if text)


READERS: dict[str, Callable[[bytes, list[str]], Lines]] = {
    "docx": read_docx, "pptx": read_pptx, "xlsx": read_xlsx, "html": read_html, "htm": read_html, "eml": read_eml,
    "mht": read_eml, "mhtml": read_eml,
    "msg": read_msg, "docm": read_docx, "dotx": read_docx, "dotm": read_docx, "xlsm": read_xlsx, "xltx": read_xlsx,
    "xltm": read_xlsx, "pptm": read_pptx, "potx": read_pptx, "ppsx": read_pptx,
    "table": read_table,
}
