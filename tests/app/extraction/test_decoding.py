"""Encodings: what programs write is read, what is no text is refused."""

import os

import pytest

from app.extraction.decoding import UnreadableSource, decode_text

TEXTS = {
    "cp1252": ["Rechnung für Müller – 12,50 € fällig über Größe\n", "café", "Año señor niño", "id;Größe\n1;ü\n"],
    "cp1250": ["Żółć gęślą jaźń, faktura nr 12\n"], "cp1251": ["Привет мир, счёт номер 12\n", "Счёт"],
    "cp1253": ["Τιμολόγιο σύνολο 12"], "cp1254": ["Müşteri adı: Ayşe Yılmaz, toplam 12 TL ödenecek"],
    "cp932": ["氏名,金額\n田中,12\n"], "gb18030": ["发票总金额为一百元整。"],
    "utf-16-le": ["I live in Ghent.", "請求書\n", "Привет\n"],
    "utf-16-be": ["I live in Ghent.", "id\ttext\n1\tGhent\n"], "utf-32-le": ["I live in Ghent."],
}


@pytest.mark.parametrize(("encoding", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
@pytest.mark.parametrize("times", [1, 40])
def test_a_text_without_a_mark_is_read_and_its_encoding_named(encoding: str, text: str, times: int) -> None:
    found, guessed = decode_text((text * times).encode(encoding), "a.txt")
    assert (found, guessed.lower()) == (text * times, encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_with_a_mark_needs_no_guess(encoding: str) -> None:
    assert decode_text("é\r\n\ra".encode(encoding), "a.txt") == ("é\n\na", "")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"abc\0def\0", "NUL character at byte 3"), (b"\n%PDF-1.4\n1 0 obj", "a PDF; give it a name"),
        (rb"{\rtf1\ansi Hello}", "not a text but RTF"),
        (b"PK\3\4\x14\0\0\0\x08\0" + bytes(range(256)), "NUL character at byte 5"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "NUL character at byte 8"), (b"\xff\xfea\0\0\0", "NUL at character 1"),
        ("Größe über für".encode() * 10 + b"\xff", "not UTF-8 text: invalid start byte at byte 180"),
        (b"\xff\xfea", "not UTF-16-LE text"), (b"\xff", "not UTF-8 text"),
        (os.urandom(5000).replace(b"\0", b"x"), "not UTF-8 text"),
    ],
)
def test_what_is_no_text_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableSource, match=f"a.txt is .*{reason}"):
        decode_text(data, "a.txt")


@pytest.mark.parametrize("encoding", ["iso2022_jp", "iso2022_kr"])
def test_escape_sequences_name_the_encoding(encoding: str) -> None:
    text = "請求書" if encoding == "iso2022_jp" else "송장"
    decoded, guessed = decode_text(text.encode(encoding), "a.txt")
    assert decoded == text and guessed.startswith(encoding)
