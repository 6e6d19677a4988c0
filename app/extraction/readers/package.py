"""Parts of Word, Excel and PowerPoint files, and the lines of their XML: paragraphs, tables and text boxes.

Rows of tables are lines with " | " between the cells.
"""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

Lines = Iterator[str]
Element = ElementTree.Element
CELL_GAP = " | "
CHECKED, UNCHECKED = "[x]", "[ ]"
# Parts of a paragraph that are not shown: deleted text, codes of fields, and the copy of a drawing for old programs.
UNSEEN = {"del", "moveFrom", "instrText", "delText", "Fallback", "pPr", "rPr"}
BREAKS = {"tab": " ", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
# Signs of fonts that have pictures in the place of letters, by the last two digits of their codes.
SYMBOLS = {
    "wingdings": {"FE": CHECKED, "FD": CHECKED, "78": CHECKED, "A8": UNCHECKED, "6F": UNCHECKED, "FC": "✓", "FB": "✗",
                  "A7": "•", "D8": "•", "E0": "→"},
    "wingdings 2": {"52": CHECKED, "53": CHECKED, "54": CHECKED, "A3": UNCHECKED, "50": "✓", "4F": "✗"},
    "symbol": {"B7": "•", "B0": "°", "B1": "±", "A3": "≤", "B3": "≥", "B4": "×", "6D": "µ", "44": "Δ", "2D": "−"},
}  # fmt: skip
UNKNOWN = "\ufffd"
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".emf", ".wmf", ".bmp", ".tiff")
# The last part of the type of a relation.
MAIN, CHUNK = "officeDocument", "aFChunk"


class Package:
    """The parts of an Office file. Their names are equal without regard to case (ECMA-376, part 2), here in lower case.

    Raises BadZipFile: it is no ZIP archive.
    """

    def __init__(self, data: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(data))
        self._members = {name.lower(): name for name in self._archive.namelist()}
        self.names = sorted(self._members)

    def read(self, name: str) -> bytes:
        return self._archive.read(self._members[name.lower()])


def note_unread(package: Package, folder: str, notes: list[str]) -> None:
    """Note the parts that are not read, by their number."""
    names = [name for name in package.names if name.startswith(folder)]
    num_charts = sum("/charts/chart" in name for name in names)
    for what, number in (
        ("picture", sum("/media/" in name and name.endswith(PICTURES) for name in names)),
        ("chart", num_charts),
        # Each chart may have a sheet with its figures.
        ("embedded file", sum("/embeddings/" in name for name in names) - num_charts),
        ("inserted file", sum(f"/{CHUNK}".encode() in package.read(name) for name in names if name.endswith(".rels"))),
    ):
        if number > 0:
            notes.append(f"{number} {what}{'s were' if number > 1 else ' was'} left out")


def parse(package: Package, name: str) -> Element:
    return ElementTree.fromstring(package.read(name))


def read_relations(package: Package, name: str, kind: str = "") -> dict[str, str]:
    """Return the paths of the parts that a part refers to, of all kinds or one; "" is the package itself."""
    folder, file = posixpath.split(name)
    relations = posixpath.join(folder, "_rels", f"{file}.rels")
    if relations not in package.names:
        return {}
    listed = [each for each in parse(package, relations) if each.get("Type", "").endswith(f"/{kind}" if kind else "")]
    found = ((each.attrib["Id"], each.attrib["Target"]) for each in listed)
    return {key: posixpath.normpath(posixpath.join("/", folder, target))[1:].lower() for key, target in found}


def find_main(package: Package, usual: str) -> str:
    """Return the path of the main part, which some programs give a name of its own."""
    return next(iter(read_relations(package, "", MAIN).values()), usual)


def find_parts(package: Package, pattern: str) -> list[str]:
    return [name for name in package.names if re.fullmatch(pattern, name)]


def name_of(element: Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def find_attribute(element: Element, name: str, default: str = "") -> str:
    """Return the value of an attribute in any namespace."""
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), default)


def read_blocks(element: Element) -> Lines:
    """Yield paragraphs and rows of tables, as they stand in elements of any kind."""
    for child in element:
        name = name_of(child)
        if name == "p":
            boxes: list[str] = []
            yield "".join(_read_inline(child, boxes))
            yield from boxes
        elif name == "tr":
            yield from _read_row(child)
        elif name not in UNSEEN:
            yield from read_blocks(child)


def _read_row(row: Element) -> Lines:
    """Yield the cells as one line; a cell with a table in it has its own lines."""
    cells: list[str] = []
    for cell in _find_cells(row):
        if any(name_of(each) == "tbl" for each in cell):
            if any(cells):
                yield CELL_GAP.join(cells)
            cells = []
            yield from read_blocks(cell)
        else:
            cells.append(" ".join(" ".join(read_blocks(cell)).split()))
    if cells:
        yield CELL_GAP.join(cells)


def _find_cells(row: Element) -> Iterator[Element]:
    for child in row:
        if name_of(child) == "tc":
            yield child
        elif name_of(child) in ("sdt", "sdtContent", "ins", "customXml"):
            yield from _find_cells(child)


def _read_inline(element: Element, boxes: list[str]) -> Iterator[str]:
    """Yield the text of a paragraph; text boxes that are fixed to it are put into `boxes`."""
    for child in element:
        name = name_of(child)
        if name == "t":
            yield child.text or ""
        elif name in BREAKS:
            yield BREAKS[name]
        elif name == "sym":
            font, code = find_attribute(child, "font").lower(), find_attribute(child, "char").upper()
            yield SYMBOLS.get(font, {}).get(code[-2:], UNKNOWN)
        elif name in ("checkBox", "ddList"):
            yield _read_field(child)
        elif name == "txbxContent":
            boxes.extend(read_blocks(child))
        elif name not in UNSEEN:
            yield from _read_inline(child, boxes)


def _read_field(field: Element) -> str:
    """Return the mark of a form's box, or the chosen line of its list."""
    values = {name_of(each): find_attribute(each, "val", "1") for each in field if name_of(each) != "listEntry"}
    if name_of(field) == "checkBox":
        return CHECKED if values.get("checked", values.get("default")) in ("1", "true", "on") else UNCHECKED
    entries = [find_attribute(each, "val") for each in field if name_of(each) == "listEntry"]
    chosen = int(values.get("result", values.get("default", "0")))
    return entries[chosen] if chosen < len(entries) else ""
