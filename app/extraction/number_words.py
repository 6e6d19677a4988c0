"""Whole numbers in words: those up to twelve in several languages, larger ones in English."""

from __future__ import annotations

import re
from collections.abc import Iterator

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six"), *("seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
# Numbers from two to twelve, and some more, in other languages.
FOREIGN_WORDS = {
    "zwei zwo deux dos due twee dwa dwie duas dois": 2, "drei trois tres tre drie trzy três": 3,
    "vier quatre cuatro quattro cztery quatro": 4, "fünf cinq cinco cinque vijf pięć": 5,
    "sechs seis sei zes sześć": 6, "sieben sept siete sette zeven siedem sete": 7,
    "acht huit ocho otto osiem oito": 8, "neun neuf nueve nove negen dziewięć": 9,
    "zehn dix diez dieci tien dziesięć dez": 10, "elf onze undici jedenaście": 11,
    "zwölf douze doce dodici twaalf dwanaście doze": 12,
}
ENGLISH = {word: value for value, word in enumerate(ONES)} | {word: 10 * n for n, word in enumerate(TENS, 2)}
FOREIGN = {word: value for words, value in FOREIGN_WORDS.items() for word in words.split()}
INTEGER_WORDS = ENGLISH | FOREIGN | {
    "a": 1, "an": 1, "once": 1, "single": 1, "both": 2, "pair": 2, "twice": 2, "dozen": 12, "no": 0, "none": 0,
}
_WORD = rf"(?:{'|'.join([*ENGLISH, *SCALES])})"
ENGLISH_NUMBER = re.compile(
    rf"\b(?:an?\s(?={'|'.join(SCALES)}))?{_WORD}(?:(?:\s+and\s+|[\s-]+){_WORD})*\b", re.IGNORECASE
)
# "sei" and the like are words of other kinds in most texts.
FOREIGN_NUMBER = re.compile(rf"\b(?:{'|'.join(word for word in FOREIGN if len(word) > 3)})\b", re.IGNORECASE)


def find_number_words(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield (number, start, end) of each number in words; of words that are not one number, each on its own."""
    for match in ENGLISH_NUMBER.finditer(text):
        value = _read(re.findall(r"\w+", match.group().lower()))
        if value is not None:
            yield value, *match.span()
            continue
        for word in re.finditer(r"\w+", match.group()):
            if (number := ENGLISH.get(word.group().lower())) is not None:
                yield number, match.start() + word.start(), match.start() + word.end()
    for match in FOREIGN_NUMBER.finditer(text):
        yield FOREIGN[match.group().lower()], *match.span()


def _read(words: list[str]) -> int | None:
    """Return the number that the words make; None for two numbers, as "one two"."""
    total = part = 0
    room = 100  # the next word has to be smaller
    for word in words:
        if word in ("a", "an", "and"):
            continue
        if word == "hundred" and 0 <= part < 100:
            part, room = max(part, 1) * 100, 100
        elif word in SCALES:
            total, part, room = total + max(part, 1) * SCALES[word], 0, 100
        elif (value := ENGLISH[word]) < room and (value or len(words) == 1):
            part, room = part + value, 10 if value >= 20 else 0
        else:
            return None
    return total + part
