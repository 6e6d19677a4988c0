"""Text files in the encodings that programs write: UTF-8, UTF-16 and UTF-32, and older ones by their characters."""

from __future__ import annotations

import codecs
import re
import unicodedata
from contextlib import suppress

from charset_normalizer import from_bytes

# The mark of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be",
}
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
WESTERN = "cp1252"  # the older encoding that is written most
# Its letters and signs in running text. A text of another encoding has others, or hardly a letter of ASCII.
WESTERN_SIGNS = frozenset(
    "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüÿŒœ"
    "\xa0¡¢£§¨©ª«®°±²³´µ·º»¼½¾¿×÷€‚„…‰‹‘’“”•–—™›"
)
# Other encodings with their commonest letters beyond ASCII, by which equally likely ones are distinguished.
LETTERS = {
    "cp1250": "ąćęłńóśźżáčďéěíňřšťúůýžőűäöüß", "cp1251": "оеаинтсрвлкмдпу", "cp1253": "αοιετσνηυρπκμλς",
    "cp1254": "ışğüöçİâ", "cp1255": "יוהלאתרבמשנכ", "cp1256": "ايلمنوترةبعدف", "cp1257": "ąčęėįšųūžāēīļņ",
    "cp874": "านรอกเงยมลวดท", "koi8_r": "оеаинтсрвлкмдпу",
    "cp932": "", "euc_jp": "", "gb18030": "", "big5": "", "cp949": "",
}
MIN_GUESSED = 4  # bytes, below which every encoding looks alike
MAX_SAMPLED = 2**18  # bytes used to recognise an encoding
CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\f\x1b"))
PRINTABLE = bytes(set(range(256)) - set(CONTROLS))
# Characters that almost every text has; in the wrong order of bytes they are others.
COMMON = " \n\r\t.,;:0123456789aeinorstAEINORST"
# Categories of characters that no text has: controls, unassigned, private, half a pair.
WRONG_CATEGORIES = frozenset(("Cc", "Cn", "Co", "Cs"))
# In UTF-16 at least that share of the bytes of a text of ASCII characters is zero.
MIN_ZEROS = 0.45
DECLARED = re.compile(rb"""<(?:meta[^>]*charset|\?xml[^>]*encoding)\s*=\s*["']?([\w:-]+)""", re.IGNORECASE)
# Encodings by which a declaration is believed, and wider ones for those that programs write under their names.
BELIEVED = re.compile(r"gb|big5|euc|iso|cp|shift|koi8|mac|hz|tis|kz|johab")
WIDER = {"gb2312": "gb18030", "gbk": "gb18030", "iso8859-1": "cp1252", "shift_jis": "cp932", "euc_kr": "cp949"}


# Files that may be ASCII as a whole, by how they begin.
OTHER_KINDS = {
    b"%PDF-": "a PDF; give it a name that ends with .pdf", b"%!PS": "PostScript; save it as PDF",
    b"{\\rtf": "RTF; save it as DOCX",
}
MAX_START = 64  # bytes, with blanks before the mark


class UnreadableSource(ValueError):
    """A file that gives no rows; the message names it and says why."""


def decode(data: bytes, name: str) -> str:
    """The text with plain line ends; see decode_text."""
    return decode_text(data, name)[0]


def decode_text(data: bytes, name: str, declared: str = "") -> tuple[str, str]:
    """Return a file's text with plain line ends, and its encoding if that was guessed, else "".

    Args:
        declared: the encoding that the file names.

    Raises UnreadableSource: it is binary, damaged, or in an encoding that cannot be recognised.
    """
    kind = next((kind for start, kind in OTHER_KINDS.items() if data[:MAX_START].lstrip().startswith(start)), "")
    if kind:
        raise UnreadableSource(f"{name} is not a text but {kind}")
    text = _decode_declared(data, declared)
    text, guessed = _decode(data, name) if text is None else (text, "")
    return text.replace("\r\n", "\n").replace("\r", "\n"), guessed


def find_declared(page: bytes) -> str:
    """Return the encoding that an HTML page names, "" if none."""
    found = DECLARED.search(page[:4096])
    return found[1].decode("ascii", "replace") if found else ""


def describe_guess(name: str, encoding: str) -> str:
    return f"{name} names no encoding that fits and was read as {encoding}; save it as UTF-8 if letters are wrong"


def _decode_declared(data: bytes, declared: str) -> str | None:
    """Return the text if all bytes fit the encoding; UTF-8 is believed before one that fits all bytes."""
    with suppress(LookupError, ValueError):
        encoding = codecs.lookup({"x-sjis": "shift_jis"}.get(declared.lower(), declared)).name
        if not BELIEVED.match(encoding) or b"\0" in data or data.startswith(tuple(MARKS)):
            return None
        text = data.decode(WIDER.get(encoding, encoding))
        if len(text) == len(data):
            with suppress(UnicodeDecodeError):
                return data.decode()
        return text
    return None


def _decode(data: bytes, name: str) -> tuple[str, str]:
    mark = next((mark for mark in MARKS if data.startswith(mark)), b"")
    encoding = MARKS.get(mark, "utf-8")
    is_wide = not mark and b"\0" in data
    if is_wide:
        encoding = _find_wide(data)
        if not encoding:
            where = data.index(b"\0")
            raise UnreadableSource(f"{name} is not a text: it has a NUL character at byte {where:,}")
    try:
        text = data[len(mark) :].decode(encoding)
        if "\0" in text:
            raise UnreadableSource(f"{name} is not a text: it has a NUL at character {text.index(chr(0)):,}")
        if b"\x1b$" in data and data.isascii():  # JIS and its Korean kin
            for encoding in ("iso2022_kr", "iso2022_jp_2", "iso2022_jp_ext"):
                with suppress(UnicodeDecodeError):
                    return data.decode(encoding), encoding
        return text, encoding.upper() if is_wide else ""
    except UnicodeDecodeError as error:
        reason = f"{name} is not {encoding.upper()} text: {error.reason} at byte {error.start:,}"
        encoding = "" if mark else _find_old(data, error.start)
        if not encoding:
            raise UnreadableSource(reason) from error
    return data.decode(encoding), encoding


def _find_wide(data: bytes) -> str:
    """Return the UTF-16 or UTF-32 of a text without a mark; "" for binary data."""
    sample = data[: MAX_SAMPLED // 4 * 4]
    # An 8-bit text with single NULs has few of them, and no other controls.
    is_narrow = sample.isascii() and not sample.translate(None, PRINTABLE + b"\0")
    if is_narrow and sample.count(0) < MIN_ZEROS * len(sample):
        return ""
    best, num_best = "", 0
    for encoding in WIDE:
        try:
            text = sample.decode(encoding)
        except UnicodeDecodeError:
            continue
        num_ascii = sum(map(text.count, COMMON))
        is_text = not any(
            unicodedata.category(sign) in WRONG_CATEGORIES and sign not in "\t\n\r\f" for sign in set(text)
        )
        if is_text and num_ascii > num_best:
            best, num_best = encoding, num_ascii
    return best


def _find_old(data: bytes, first: int) -> str:
    """Return the older encoding of a text that is not UTF-8 from a byte on; "" if none is likely."""
    begun = data.rfind(b"\n", 0, first) + 1
    sample = data[max(begun, first - MAX_SAMPLED // 2) :][:MAX_SAMPLED]
    as_utf8 = sample.decode(errors="replace")
    num_bad = as_utf8.count("\ufffd")
    if len(as_utf8.encode("ascii", "ignore")) + 2 * num_bad < len(as_utf8):
        return ""  # most characters beyond ASCII are UTF-8: the file is damaged
    if sample.translate(None, CONTROLS) != sample:
        return ""
    if _is_western(sample):
        likely = [WESTERN]
    elif len(sample) < MIN_GUESSED:
        return ""
    else:
        likely = [each.encoding for each in from_bytes(sample, cp_isolation=list(LETTERS))] or list(LETTERS)
        likely.sort(key=lambda encoding: -_rate(sample, encoding))
    with suppress(UnicodeDecodeError):
        data.decode(likely[0])
        return likely[0]
    return ""


def _rate(sample: bytes, encoding: str) -> float:
    """Return the share of letters that are common in the languages of an encoding; 0 for less than half of them."""
    text = sample.decode(encoding, "ignore").lower()
    num_letters = sum(text.count(sign) for sign in set(text) if sign.isalpha() and not sign.isascii())
    share = sum(map(text.count, LETTERS[encoding])) / max(num_letters, 1)
    return share if share >= 0.5 else 0


def _is_western(sample: bytes) -> bool:
    """Return whether all signs are those of a western text, and most letters are ASCII."""
    try:
        text = sample.decode(WESTERN)
    except UnicodeDecodeError:
        return False
    num_ascii, others = 0, 0
    for sign in set(text):
        if sign.isascii():
            num_ascii += text.count(sign) if sign.isalpha() else 0
        elif sign not in WESTERN_SIGNS:
            return False
        elif sign.isalpha():
            others += text.count(sign)
    return others <= num_ascii
