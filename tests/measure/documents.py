"""Sixty documents of ten kinds, written by the usual libraries: the share of their words and table cells that is read.

`python -m tests.measure.documents [KIND ...] [--misses]`. A cell counts if it stands on the line of its row.
"""

from __future__ import annotations

import email.message
import email.policy
import html
import io
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import docx
import openpyxl
import pptx
import pypdfium2
from PIL import ImageFilter
from pptx.util import Inches
from reportlab.lib import colors
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import getSampleStyleSheet
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import Paragraph, SimpleDocTemplate, Spacer, Table, TableStyle

from app.extraction.sources import TEXT_COLUMN, Row, parse_rows
from tests.app.extraction.test_office import make_msg

NUM_EACH = 6
TEXT = """invoice delivery of the goods was agreed between both parties on Monday and confirmed by mail café Müller
Größe naïve señor façade order total amount due within thirty days without discount please contact our office for
further questions about this document or its contents e-mail well-known customers receive their refund after
inspection"""
ITEMS = ["Desk lamp", "Office chair, black", "USB-C cable 2 m", "Whiteboard 120 x 90 cm", "Paper A4", "Staples",
         "Café crème", "Monitor arm", "Toner cartridge XL for laser printers of the 400 series",
         "Keyboard (German layout)"]  # fmt: skip
STYLES = getSampleStyleSheet()


@dataclass
class Written:
    """What is written into a document."""

    chance: random.Random
    title: str = ""
    paragraphs: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, seed: int) -> Written:
        chance = random.Random(seed)
        made = cls(chance, f"Report {chance.randrange(1000, 9999)} for the {chance.choice(TEXT.split())}")
        made.paragraphs = [cls.write_sentence(chance) for _ in range(4)]
        made.table = [["No.", "Description", "Quantity", "Delivered", "Price"]]
        for number in range(1, chance.randrange(4, 9)):
            day = date(2026, chance.randrange(1, 13), chance.randrange(1, 29)).isoformat()
            price = f"{chance.randrange(1, 4)},{chance.randrange(100, 999)}.{chance.randrange(10, 99)}"
            made.table.append([str(number), chance.choice(ITEMS), str(chance.randrange(2, 500)), day, price])
        made.table[-1][3] = ""
        reference = f"PO-{chance.randrange(10**6)}"
        made.fields = {"Customer": "Northwind Ltd", "Reference": reference, "City": "Saint-Étienne"}
        return made

    @staticmethod
    def write_sentence(chance: random.Random) -> str:
        return " ".join(chance.choices(TEXT.split(), k=chance.randrange(18, 45))).capitalize() + "."

    @property
    def words(self) -> list[str]:
        cells = [cell for row in self.table for cell in row]
        return " ".join([self.title, *self.paragraphs, *cells, *self.fields, *self.fields.values()]).split()


def save(document: Any) -> bytes:
    buffer = io.BytesIO()
    document.save(buffer)
    return buffer.getvalue()


def write_docx(made: Written, number: int) -> tuple[str, bytes]:
    document = docx.Document()
    document.add_heading(made.title)
    section = document.sections[0]
    section.header.paragraphs[0].text = "Customer Northwind Ltd"
    section.footer.paragraphs[0].text = f"Reference {made.fields['Reference']}"
    for text in made.paragraphs:
        paragraph = document.add_paragraph(style="List Bullet" if number % 2 else None)
        for word in text.split(" "):
            paragraph.add_run(f"{word} ").bold = made.chance.random() < 0.2
    outer = document.add_table(1, 2) if number == 4 else None  # a table as the frame of the page
    if outer is not None:
        outer.cell(0, 0).text = "City"
    table = (outer.cell(0, 1) if outer is not None else document).add_table(0, len(made.table[0]))
    for row in made.table:
        for cell, text in zip(table.add_row().cells, row, strict=True):
            cell.text = text
    if outer is None and number % 2:
        table.cell(len(made.table) - 1, 3).merge(table.cell(len(made.table) - 1, 4))
    last = document.add_paragraph("Saint-Étienne")
    if outer is None:
        document.add_comment(last.runs, "City")
    return "a.docx", save(document)


def write_xlsx(made: Written, number: int) -> tuple[str, bytes]:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.merge_cells("B1:E1")
    sheet["B1"] = made.title
    for row in made.table:
        sheet.append([None] * (number % 3) + [int(cell) if cell.isdigit() else cell for cell in row])
    other = book.create_sheet("Notes")
    for text in made.paragraphs:
        other.append([text])
    for pair in made.fields.items():
        other.append(pair)
    return "a.xlsx", save(book)


def write_pptx(made: Written, number: int) -> tuple[str, bytes]:
    show = pptx.Presentation()
    slide = show.slides.add_slide(show.slide_layouts[1])
    slide.shapes.title.text, slide.placeholders[1].text = made.title, "\n".join(made.paragraphs[:3])
    slide.notes_slide.notes_text_frame.text = made.paragraphs[3]
    slide = show.slides.add_slide(show.slide_layouts[6])
    shape = slide.shapes.add_table(len(made.table), 5, Inches(1), Inches(1), Inches(8), Inches(3))
    for y, row in enumerate(made.table):
        for x, text in enumerate(row):
            shape.table.cell(y, x).text = text
    group = slide.shapes.add_group_shape()
    for y, pair in enumerate(made.fields.items()):
        group.shapes.add_textbox(Inches(1), Inches(4 + y), Inches(4), Inches(1)).text_frame.text = " ".join(pair)
    return "a.pptx", save(show)


def make_page(made: Written, number: int) -> str:
    """Return the document as HTML, of which every second one is laid out by tables as mails are."""
    gap = "\n   " if number % 3 else ""
    rows = [gap.join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in made.table]
    table = f"<table>{''.join(f'<tr>{gap}{row}</tr>' for row in rows)}</table>"
    fields = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in made.fields.items())
    if number == 3:
        fields = "".join(f"<label>{name}</label> <input value='{value}'>" for name, value in made.fields.items())
    body = f"<h1>{made.title}</h1>{''.join(f'<p>{text}' for text in made.paragraphs)}{table}<dl>{fields}</dl>"
    if number % 2:
        body = f"<table><tr><td><table><tr><td>{body}</td></tr></table></td></tr></table>"
    return f"<html><head><style>p {{}}</style></head><body>{body}</body></html>"


def write_html(made: Written, number: int) -> tuple[str, bytes]:
    encoding = ("utf-8", "cp1252", "utf-16")[number % 3]
    return "a.html", f"<!doctype html><meta charset='{encoding}'>{make_page(made, number)}".encode(encoding)


def write_plainly(made: Written, gap: str = "\t") -> str:
    lines = [made.title, *made.paragraphs, *map(gap.join, made.table), *map(" ".join, made.fields.items())]
    return "\n".join(lines)


def write_eml(made: Written, number: int) -> tuple[str, bytes]:
    mail = email.message.EmailMessage(policy=email.policy.SMTP)
    mail["From"], mail["To"], mail["Subject"] = "Ada <ada@example.com>", "Bob Müller <bob@example.com>", made.title
    if number < 2:
        mail.set_content(write_plainly(made), charset=("utf-8", "iso-8859-1")[number])
    else:  # the plain text of a program that writes a line for each cell
        mail.set_content(write_plainly(made, "\n"))
        mail.add_alternative(make_page(made, number), subtype="html")
        mail.add_attachment(b"x", maintype="application", subtype="pdf", filename="a.pdf")
    return "a.eml", bytes(mail)


def write_mail_of_outlook(made: Written, number: int) -> tuple[str, bytes]:
    texts = {"0037": made.title, "0C1A": "Ada", "0E04": "Bob"}
    if number % 2 == 0:
        texts["1000"] = write_plainly(made)
    streams = {(f"__substg1.0_{field}001F",): text.encode("utf-16-le") for field, text in texts.items()}
    if number % 2:
        streams["__substg1.0_10130102",] = make_page(made, number).encode()
    return "a.msg", make_msg(streams | {("__properties_version1.0",): bytes(32) + struct.pack("<IIQ", 0x0E06, 6, 0)})


def write_csv(made: Written, number: int) -> tuple[str, bytes]:
    gap = ",;\t"[number % 3]
    made.table += [[str(9 + each), text, "", "", "1.00"] for each, text in enumerate(made.paragraphs)]
    made.title, made.paragraphs, made.fields = "", [], {}
    lines = (gap.join(f'"{cell}"' if " " in cell or "," in cell else cell for cell in row) for row in made.table)
    return "a.csv", "\r\n".join(lines).encode(("utf-8-sig", "cp1252", "utf-16")[number % 3])


def write_txt(made: Written, number: int) -> tuple[str, bytes]:
    encoding = ("utf-8", "utf-8-sig", "utf-16", "cp1252", "iso-8859-1", "utf-16-be")[number]
    return "a.txt", write_plainly(made, " | ").encode(encoding)


def write_pdf(made: Written, number: int) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    if number == 5:  # a form
        canvas = Canvas(buffer, A4)
        canvas.drawString(50, 780, made.title)
        for y, (name, value) in enumerate(made.fields.items()):
            canvas.drawString(50, 700 - 40 * y, name)
            canvas.acroForm.textfield(value, name=name, x=150, y=695 - 40 * y, width=200)
        for y, row in enumerate(made.table):
            for x, cell in enumerate(row):
                canvas.drawString(50 + (0, 30, 350, 400, 470)[x], 500 - 18 * y, cell)
        made.paragraphs = []
        canvas.save()
        return "a.pdf", buffer.getvalue()
    # Cells of the even ones wrap. Two have every line of the grid, two only lines between rows, one none.
    cells = [[Paragraph(cell, STYLES["BodyText"]) if number % 2 == 0 else cell for cell in row] for row in made.table]
    widths = [30, 110, 60, 70, 60] if number % 2 == 0 else None
    table = Table(cells, widths)
    grid = [("GRID", (0, 0), (-1, -1), 0.5, colors.black)] * (number in (0, 1))
    rules = [("LINEBELOW", (0, 0), (-1, -1), 0.5, colors.grey)] * (number in (2, 3))
    shade = [("BACKGROUND", (0, 0), (-1, 0), colors.lightgrey), ("ALIGN", (2, 0), (-1, -1), "RIGHT")]
    table.setStyle(TableStyle([*grid, *rules, *shade, ("VALIGN", (0, 0), (-1, -1), ("TOP", "MIDDLE")[number == 2])]))
    texts = [Paragraph(text, STYLES["BodyText"]) for text in made.paragraphs]
    fields = Table(list(made.fields.items()))
    SimpleDocTemplate(buffer, pagesize=A4).build(
        [Paragraph(made.title, STYLES["Title"]), *texts, Spacer(1, 12), table, Spacer(1, 12), fields]
    )
    return "a.pdf", buffer.getvalue()


def write_scan(made: Written, number: int) -> tuple[str, bytes]:
    plain = str.maketrans("éöüßïñçÉè", "eousincEe")  # Tesseract reads the languages that are installed
    made.title, made.paragraphs = made.title.translate(plain), [text.translate(plain) for text in made.paragraphs]
    made.table = [[cell.translate(plain) for cell in row] for row in made.table]
    made.fields = {name: value.translate(plain) for name, value in made.fields.items()}
    _, data = write_pdf(made, (1, 3, 0, 1, 3, 2)[number])
    image = pypdfium2.PdfDocument(data)[0].render(scale=(150, 200, 300)[number % 3] / 72).to_pil().convert("L")
    if number > 2:
        image = image.rotate((0.5, -0.4, 0.3)[number % 3], fillcolor=255).filter(ImageFilter.GaussianBlur(0.6))
    name = "a.pdf" if number % 2 else "a.png"
    buffer = io.BytesIO()
    image.save(buffer, "PDF" if number % 2 else "PNG", resolution=(150, 200, 300)[number % 3])
    return name, buffer.getvalue()


KINDS: dict[str, Callable[[Written, int], tuple[str, bytes]]] = {
    "docx": write_docx, "xlsx": write_xlsx, "pptx": write_pptx, "html": write_html, "eml": write_eml,
    "msg": write_mail_of_outlook, "csv": write_csv, "txt": write_txt, "pdf": write_pdf, "scan": write_scan,
}  # fmt: skip


def read_lines(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a text, or the rows of a table."""
    if len(rows) == 1 and TEXT_COLUMN in rows[0].cells:
        return [" ".join(line.replace(" | ", " ").split()) for line in rows[0].cells[TEXT_COLUMN].splitlines()]
    return [" ".join(rows[0].cells), *(" ".join(row.cells.values()) for row in rows)]


def main(kinds: Sequence[str], shows: bool) -> None:
    totals: Counter[str] = Counter()
    for kind in kinds or KINDS:
        counts: Counter[str] = Counter()
        for number in range(NUM_EACH):
            made = Written.make(1000 * list(KINDS).index(kind) + number)
            name, data = KINDS[kind](made, number)
            lines = read_lines(parse_rows(data, name))
            missing = Counter(made.words) - Counter(" ".join(lines).split())
            counts["words"] += len(made.words)
            counts["words found"] += len(made.words) - missing.total()
            for row in made.table:
                cells = [" ".join(cell.split()) for cell in row if cell]
                counts["cells"] += len(cells)
                found = [sum(f" {cell} " in f" {line} " for cell in cells) for line in lines]
                most = max(found, default=0)
                counts["cells found"] += most
                if most:
                    lines.pop(found.index(most))
                if shows and most < len(cells):
                    print(kind, number, "no line has", cells)
            if shows:
                print(kind, number, dict(missing), *(["", *lines] if "-v" in sys.argv else []), sep="\n")
        words, cells = (counts[f"{what} found"] / counts[what] for what in ("words", "cells"))
        print(f"{kind:5} words {words:.4f}  cells in their row {cells:.4f}", flush=True)
        totals += counts
    print(*(f"{what} {totals[f'{what} found'] / totals[what]:.4f}" for what in ("words", "cells")))


if __name__ == "__main__":
    main([each for each in sys.argv[1:] if each in KINDS], "--misses" in sys.argv)
