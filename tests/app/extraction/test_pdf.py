"""PDFs: their text by the layout of the page, fields and comments, encryption, pictures, and hostile files."""

import base64
import io
import json
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from reportlab.lib.utils import ImageReader
from reportlab.pdfbase import pdfmetrics
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.pdfgen.canvas import Canvas

from app.extraction import child, pdf
from app.extraction.boxes import find_boxes
from app.extraction.decoding import UnreadableSource
from app.extraction.pdf import read_pdf, render_page
from app.extraction.readers import scans
from app.extraction.readers.layout import Box
from tests.app.extraction.pdf_files import draw, make_pdf, picture

ENCRYPTED = json.loads(Path(__file__).with_name("encrypted_pdfs.json").read_text())
LEFT = ["The quick brown fox jumps over the", "lazy dog and then runs away from", "the old hunter who waits for it."]
RIGHT = ["In the second column a different", "story begins about a king and his", "daughter who live in a castle."]

WHOLE = (0, 0, 600, 800)  # left, bottom, width and height of a page

MANY = draw(*(("words on it " * 200, 0, 12 * row) for row in range(1000)))
LARGE = make_pdf(MANY).replace(b"600 800", b"14400 14400")


def read(*pages: str, page_entries: str = "") -> str:
    return "\f".join(read_pdf(make_pdf(*pages, page_entries=page_entries), "a.pdf").pages)


def draw_columns(*columns: tuple[float, Sequence[str]], down: float = 0) -> str:
    """Draw columns one after the other, each lower than the one before by some points."""
    return draw(*(
        (text, x, 700 - 12 * row - down * number)
        for number, (x, texts) in enumerate(columns) for row, text in enumerate(texts) if text
    ))


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ([["Item", "Bolt"], ["Qty", "12"], ["Price", "3,50"]], ["Item  Qty  Price", "Bolt  12  3,50"]),
        ([["What", "A long text that is", "continued here", "Red"], ["EUR", "5.00", "", "7.50"]],
         ["What  EUR", "A long text that is  5.00", "continued here", "Red  7.50"]),
        ([["Where did you buy our product?", "When did you buy our product?", "How do you like our product?"],
          ["I bought it in the village shop", "Last week on a rainy Thursday", "I like it very much, thank you"]],
         ["Where did you buy our product?  I bought it in the village shop",
          "When did you buy our product?  Last week on a rainy Thursday",
          "How do you like our product?  I like it very much, thank you"]),
    ],
)
def test_the_rows_of_a_table_stay_together_however_it_is_drawn(columns: list[list[str]], rows: list[str]) -> None:
    found = read(draw_columns(*zip((50, 300, 450), columns, strict=False)))
    assert found.split("\n") == rows


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        # Cells whose next word had no room go on below, closer than the next row stands.
        ([(0, ["1", "A long text that is", "5.00"]), (12, ["", "continued here", ""]), (30, ["2", "Red", "7.50"])],
         "1  A long text that is continued here  5.00\n2  Red  7.50"),
        # Two rows that stand close together: the second has a cell that the first has not, or would have had room.
        ([(0, ["May 3", "Rent of a flat", "", "5.00"]), (12, ["May 4", "Salary", "7.00", ""]),
          (30, ["May 5", "Something else", "7.50", ""])],
         "May 3  Rent of a flat  5.00\nMay 4  Salary  7.00\nMay 5  Something else  7.50"),
        ([(0, ["1", "Bolt", "5.00"]), (12, ["", "Nut", ""]), (30, ["2", "A long text that is", "7.50"])],
         "1  Bolt  5.00\nNut\n2  A long text that is  7.50"),
    ],
)
def test_wrapped_cells_are_put_together_and_rows_are_not(lines: list[tuple[int, list[str]]], rows: str) -> None:
    places = (50, 100, 300, 400)
    page = draw(*((text, x, 700 - y) for y, line in lines for text, x in zip(line, places, strict=False) if text))
    assert read(page) == rows


def test_lines_of_tables_are_erased_for_ocr_and_letters_are_not() -> None:
    image = np.full((1000, 800, 3), 255, np.uint8)
    image[100, 50:700] = image[100:400, 50] = image[100:400, 700:702] = 0
    image[200:230, 100:104] = image[228:232, 100:120] = image[500:700, 300:600] = 0  # a letter, a picture
    found = np.asarray(scans._erase_rules(Image.fromarray(image)))
    expected = image[..., 0].copy()
    expected[100, 50:702] = expected[100:400, 50] = expected[100:400, 700:702] = 255
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("down", [0, 6])
def test_columns_of_prose_are_read_one_after_the_other_below_their_title(down: float) -> None:
    title = draw(("A title that spans both columns of the page and more than that", 50, 730))
    page = title + draw_columns((50, LEFT), (310, RIGHT), down=down)
    assert read(page).split("\n")[1:] == [*LEFT, *RIGHT]


def test_a_turned_page_is_read_as_shown_and_a_turned_stamp_comes_last() -> None:
    cells = [("Item", 100, 50), ("Price", 100, 200), ("Bolt", 120, 50), ("3,50", 120, 200)]
    assert read(draw(*cells, turned=True), page_entries="/Rotate 90") == "Item  Price\nBolt  3,50"
    stamped = draw(("one", 100, 700)) + draw(("a stamp", 30, 300), turned=True) + draw(("two", 100, 680))
    assert read(stamped) == "one\ntwo\na stamp"


def test_fields_stand_beside_their_labels_and_comments_at_the_end() -> None:
    widget = "/Type /Annot /Subtype /Widget"
    objects = [
        f"<< {widget} /FT /Tx /T (city) /V (Ghent) /Rect [100 695 200 715] >>",
        f"<< {widget} /FT /Btn /T (member) /V /Yes /AS /Yes /Rect [100 675 110 685] "
        "/AP << /N << /Yes 95 0 R /Off 95 0 R >> >> >>",
        f"<< {widget} /FT /Ch /Ff 131072 /T (land) /V (be) /Opt [(France) [(be) (Belgium)]] /Rect [100 650 200 665] >>",
        "<< /Type /Annot /Subtype /FreeText /Contents (typed over) /DA (/Helv 10 Tf) /Rect [300 695 400 710] >>",
        "<< /Type /Annot /Subtype /Text /Contents (check\\rthis) /Rect [300 600 320 620] >>",
        "<< /Type /XObject /Subtype /Form /BBox [0 0 9 9] /Length 0 >>\nstream\n\nendstream",
        f"<< {widget} /FT /Tx /Ff 8192 /T (secret) /V (hunter2) /Rect [100 600 200 620] >>",
        f"<< {widget} /FT /Tx /F 2 /T (hidden) /V (unseen) /Rect [100 580 200 600] >>",
        f"<< {widget} /FT /Tx /Ff 4096 /T (note) /V (one\\ntwo) /Rect [100 400 200 500] >>",
    ]
    references = " ".join(f"{number} 0 R" for number in (90, 91, 92, 93, 94, 96, 97, 98))
    data = make_pdf(
        draw(("City:", 50, 700), ("Member:", 50, 677), ("Country:", 50, 655)), objects=objects,
        page_entries=f"/Annots [{references}]", catalog=f"/AcroForm << /Fields [{references}] >>",
    )
    assert read_pdf(data, "a.pdf").pages == [
        "City:  Ghent  typed over\nMember:  [x]\nCountry:  Belgium\none\ntwo\n[Comment: check this]"
    ]


@pytest.mark.parametrize("kind", ["RC4-40", "RC4-128", "AES-128", "AES-256"])
def test_a_pdf_that_opens_without_a_password_is_read(kind: str) -> None:
    (text,) = read_pdf(zlib.decompress(base64.b64decode(ENCRYPTED[kind])), "a.pdf").pages
    assert text in ("Hello there", "Delivery note. The parcel goes to Ghent.")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (zlib.decompress(base64.b64decode(ENCRYPTED["locked"])), "a.pdf is locked with a password"),
        (b"%PDF-1.4 nothing", "a.pdf cannot be read as PDF: Failed to load document"),
        (make_pdf(""), "a.pdf has no text in it"),
        (make_pdf("Hello").replace(b"% drawn", b"q [ ((("), "a.pdf has no text in it"),
    ],
)
def test_a_pdf_without_readable_text_says_why(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableSource, match=reason):
        read_pdf(data, "a.pdf")


def test_pages_without_text_are_named_and_are_images_if_wanted() -> None:
    data = make_pdf("one", picture(), "three", "", picture(0.2))
    assert read_pdf(data, "a.pdf").notes == ("a.pdf: pages 2, 4-5 have no text",)
    found = read_pdf(data, "a.pdf", with_images=True)
    assert (found.pages, len(found.images)) == (["one", "", "three", "", ""], 2)  # a blank page is none
    shades = [np.asarray(Image.open(io.BytesIO(image)).convert("L"))[-500, 500] for image in found.images]
    assert np.allclose(shades, [128, 51], atol=4)


def test_the_limits_of_a_pdf_name_what_it_has_too_much_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit, data, reason in (
        ("MAX_PDF_PAGES", 1, make_pdf("a", "b"), "has 2 pages; at most 1 are read: split it"),
        ("MAX_PDF_CHARS", 4, make_pdf("Hello"), "has more than 4 characters of text"),
        ("MAX_PDF_CHARS", 6, make_pdf("Helo", "Helo"), "has more than 2 characters"),
        ("MAX_IMAGES", 1, make_pdf(picture(), picture()), "has more than 1 pages without text: split it"),
        ("MAX_SECONDS", 1, LARGE, r"a\.pdf takes longer than 1 s to read"),
        ("MAX_MEMORY", 2**28, LARGE, "needs more than 256 MiB of memory"),
    ):
        with monkeypatch.context() as patch, pytest.raises(UnreadableSource, match=reason):
            patch.setattr(pdf if hasattr(pdf, name) else child, name, limit)
            read_pdf(data, "a.pdf", with_images=True)
    assert read_pdf(make_pdf("Hello"), "b.pdf").pages == ["Hello"]


def test_a_large_page_is_drawn_small() -> None:
    data = make_pdf(picture()).replace(b"[0 0 600 800]", b"[0 0 14400 14400]")
    (image,) = read_pdf(data, "a.pdf", with_images=True).images
    width, height = Image.open(io.BytesIO(image)).size
    assert 2**20 < width * height <= 2**21 + width + height


@pytest.mark.parametrize("page_entries", ["", "/CropBox [10 10 500 750]", "/Rotate 180"])
def test_a_place_is_highlighted_on_its_page(page_entries: str) -> None:
    data = make_pdf("to be or not to be", page_entries=page_entries)
    (words,) = read_pdf(data, "a.pdf").boxes
    first, second, none = (
        np.asarray(Image.open(io.BytesIO(render_page(data, "a.pdf", 0, find_boxes(words, *place)))), float)
        for place in ((0, 5), (13, 18), (0, 0))
    )
    columns = [np.flatnonzero(np.abs(page - none).sum((0, 2)) > 2000) for page in (first, second)]
    if "180" in page_entries:
        columns.reverse()
    assert 20 < len(columns[0]) < 120 and columns[0].max() < columns[1].min()


@pytest.mark.parametrize("slope", [-0.2, -0.02, 0.01, 0.1])
def test_the_rows_of_a_tilted_page_stay_together(slope: float) -> None:
    places = [(row, column) for row in range(9) for column in range(3)]
    cells = [(f"{'abc'[column]} {row}", 50 + 200 * column, 600 - 18 * row) for row, column in places]
    page = draw(*((text, x, y + x * slope) for text, x, y in cells)).replace("1 0 0 1", f"1 {slope} {-slope} 1")
    assert read(page).split("\n") == [f"a {row}  b {row}  c {row}" for row in range(9)]


def write_pdf(*lines: tuple[str, float, float], scan: Image.Image | None = None, place: Box = WHOLE) -> bytes:
    """Return a page with texts in a font with many letters, over a picture."""
    spec = find_spec("matplotlib")
    assert spec is not None and spec.origin is not None
    pdfmetrics.registerFont(TTFont("dejavu", Path(spec.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf"))
    buffer = io.BytesIO()
    canvas = Canvas(buffer, (600, 800), pageCompression=0)
    if scan is not None:
        canvas.drawImage(ImageReader(scan), *place)
    canvas.setFont("dejavu", 10)
    for text, x, y in lines:
        canvas.drawString(x, y, text)
    canvas.save()
    return buffer.getvalue()


def test_words_that_are_written_to_the_left_stand_in_the_order_of_reading() -> None:
    data = write_pdf(
        ("הרונמ", 300, 700), ("49.50", 100, 700),  # cells of a table
        ("םולש", 236, 600), ("1,234.56", 180, 600), ("לקש", 155, 600),  # a sentence
        ("See", 100, 500), ("םלוע", 123, 500), ("םולש", 152, 500), ("below", 182, 500),
    )  # fmt: skip
    assert [line.split() for line in read_pdf(data, "a.pdf").pages[0].split("\n")] == [
        ["מנורה", "49.50"], ["שלום", "1,234.56", "שקל"], ["See", "שלום", "עולם", "below"],
    ]  # fmt: skip


def test_letters_that_the_file_does_not_name_are_marked_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_ocr", tuple)
    data = write_pdf(("Größe 45", 50, 700)).replace(b"/ToUnicode", b"/NoUnicode")
    found = read_pdf(data, "a.pdf")
    assert found.pages == ["Gr\ufffd\ufffde 45"]
    assert found.notes == ("a.pdf: page 1 has characters for which the file names no letter",)


def test_attachments_are_named() -> None:
    catalog = "/Names << /EmbeddedFiles << /Names [(a.xml) << /Type /Filespec /UF (a.xml) /EF << /F 90 0 R >> >>] >> >>"
    data = make_pdf("Hello", catalog=catalog, objects=["<< /Type /EmbeddedFile /Length 1 >>\nstream\nx\nendstream"])
    assert read_pdf(data, "a.pdf").notes == ("a.pdf: attachments left out: a.xml",)


def test_a_pair_of_surrogates_is_one_character_and_a_lone_half_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_ocr", tuple)
    data = make_pdf("ab", unicode_map="<61> <D83DDE00> <62> <D83D>")
    assert read_pdf(data, "a.pdf").pages == ["\U0001f600\ufffd"]


def test_a_picture_under_a_stamp_is_an_image_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_ocr", tuple)
    scan = Image.new("RGB", (30, 40), "grey")
    stamped = write_pdf(("Received 3 May", 50, 700), scan=scan)
    assert read_pdf(stamped, "a.pdf").notes == ("a.pdf: page 1 has pictures that were not read",)
    assert len(read_pdf(stamped, "a.pdf", with_images=True).images) == 1
    layer = [("a line of text over the scan, as OCR writes it", 50, 700 - 12 * row) for row in range(9)]
    for lines, place in (([("A letter with its logo", 50, 600)], (500, 700, 50, 50)), (layer, WHOLE)):
        found = read_pdf(write_pdf(*lines, scan=scan, place=place), "a.pdf", with_images=True)
        assert (found.notes, found.images) == ((), ())


def draw_scan() -> Image.Image:
    image = Image.new("RGB", (1700, 700), "white")
    font = ImageFont.load_default(48)
    for line, words in enumerate((("Invoice", "ABC"), ("Desk lamp", "Price"))):
        for column, text in enumerate(words):
            ImageDraw.Draw(image).text((100 + 800 * column, 100 + 150 * line), text, fill="black", font=font)
    return image


@pytest.mark.skipif(not pdf.find_ocr(), reason="tesseract is not installed")
@pytest.mark.parametrize("angle", [0, 3, -3])
def test_a_scan_is_read_by_ocr_in_rows_and_its_words_are_highlighted(angle: int) -> None:
    image = draw_scan().rotate(angle, fillcolor="white", resample=Image.Resampling.BICUBIC)
    buffers = {kind: io.BytesIO() for kind in ("PDF", "PNG")}
    for kind, buffer in buffers.items():
        image.save(buffer, kind, resolution=200)
    scan = buffers["PDF"].getvalue()
    found = read_pdf(scan, "a.pdf")
    assert (found.pages, found.images) == (["Invoice  ABC\nDesk lamp  Price"], ())
    assert found.notes == ("a.pdf: page 1 has text read by OCR",)
    assert pdf.read_picture(buffers["PNG"].getvalue(), "a.png")[0] == found.pages[0]
    start = found.pages[0].index("Price")
    boxes = find_boxes(found.boxes[0], start, start + 5)
    shown = np.asarray(Image.open(io.BytesIO(render_page(scan, "a.pdf", 0, boxes))), dtype=int)
    marked = np.argwhere(shown[..., 1] - shown[..., 0] > 20)
    height, width = shown.shape[:2]
    assert (marked.min(0) > (0.2 * height, 0.5 * width)).all()
    assert len(read_pdf(scan, "a.pdf", with_images=True).images) == 1


@pytest.mark.skipif(not pdf.find_ocr(), reason="tesseract is not installed")
def test_pictures_and_letters_without_names_are_read_by_ocr_beside_the_text() -> None:
    found = read_pdf(write_pdf(("Received", 50, 700), scan=draw_scan(), place=(0, 400, 600, 250)), "a.pdf")
    assert found.pages == ["Received\nInvoice  ABC\nDesk lamp  Price"]
    found = read_pdf(write_pdf(("Order 1042 for Jörg", 50, 700)).replace(b"/ToUnicode", b"/NoUnicode"), "a.pdf")
    assert "1042 for J" in found.pages[0] and "\ufffd" not in found.pages[0]
    assert found.notes == ("a.pdf: page 1 has text read by OCR",)
