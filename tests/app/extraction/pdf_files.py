"""PDF files written by hand, so that a test chooses the order in which a page is drawn."""

from collections.abc import Sequence


def make_pdf(
    *pages: str, page_entries: str = "", objects: Sequence[str] = (), catalog: str = "", unicode_map: str = ""
) -> bytes:
    """Return a file with these pages. A text is drawn as it is; a page that begins with % is a content stream.

    Args:
        page_entries: further entries of each page.
        objects: further objects, numbered from 90.
        catalog: further entries of the catalog.
        unicode_map: pairs of a character's code and its Unicode, in hexadecimal.
    """
    numbers = range(4, 4 + 2 * len(pages), 2)
    kids = " ".join(f"{number} 0 R" for number in numbers)
    found = {
        1: f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        2: f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        3: f"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica {'/ToUnicode 80 0 R' if unicode_map else ''} >>",
    }
    if unicode_map:
        table = f"begincmap {len(unicode_map.split()) // 2} beginbfchar {unicode_map} endbfchar endcmap"
        found[80] = f"<< /Length {len(table)} >>\nstream\n{table}\nendstream"
    for number, page in zip(numbers, pages, strict=True):
        content = page if page.startswith("%") or not page else draw((page, 20, 700))
        found[number] = (
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {number + 1} 0 R {page_entries} >>"
        )
        found[number + 1] = f"<< /Length {len(content)} >>\nstream\n{content}\nendstream"
    found |= dict(enumerate(objects, 90))
    data, places = b"%PDF-1.7\n", {}
    for number, text in found.items():
        places[number] = len(data)
        data += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    table = "".join(f"{number} 1\n{place:010d} 00000 n \n" for number, place in places.items())
    end = f"xref\n0 1\n0000000000 65535 f \n{table}trailer << /Size 200 /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF"
    return data + end.encode()


def draw(*texts: tuple[str, float, float], turned: bool = False) -> str:
    """Return the content stream that draws these texts at their places, in this order."""
    matrix = "0 1 -1 0" if turned else "1 0 0 1"
    return "% drawn\n" + "".join(f"BT /F1 10 Tf {matrix} {x} {y} Tm ({text}) Tj ET\n" for text, x, y in texts)


def picture(shade: float = 0.5) -> str:
    """Return the content stream of a page with marks and without text."""
    return f"% a rectangle\n{shade} g 100 100 300 200 re f"
