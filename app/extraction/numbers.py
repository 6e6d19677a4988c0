"""The one reader of numbers: every number of a text in every reading, and whether it is understood for sure.

Countries group digits in threes, in twos before a last three (12,34,567) or in fours, with points, commas, apostrophes
or spaces; `1.234` fits two conventions. A minus may stand before or behind; parentheses, CR and DR may mean one.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

# A plain space may separate groups of three digits: "12 500", but not "7 30".
DIGITS = re.compile(
    r"(?:\d+|(?<![\w.,)])[.,]\d+)(?:[.,．，\u066b\u066c'’‘`\u00a0\u202f\u2009\u2007_]\d+| \d{3}(?!\d))*|[¼-¾⅐-⅞]"
)
SEPARATORS = str.maketrans({**dict.fromkeys("\u00a0\u202f\u2009\u2007", " "), **dict.fromkeys("’‘`", "'"),
                            "．": ".", "，": ",", "\u066c": ","})
POINTS = ".,\u066b"
NO_DIGIT = re.compile(r"\A[^1-9]+|\D")  # nor one that counts
PIECE = re.compile("[^ ]+")
MAX_GROUPS = 4  # of one number with plain spaces
MAX_DIGITS = 308  # a double holds no larger number
MAX_TEXT_CHARS = 64  # of one number in any spelling
CONTEXT_CHARS = 16  # searched before a number
SURE_MINUS = "−﹣－-"
MINUS = rf"‐‑–—△▲{re.escape(SURE_MINUS)}"
CURRENCY_SIGN = r"[$¢-¥֏؋৲৳૱௹฿៛\u20a0-\u20cf﷼﹩＄￠￡￥￦]"
# Any code of three capitals, short symbols such as Kč, Ft and Rp, and letters with a sign such as US$.
CURRENCY = rf"(?:(?:[^\W\d_]{{1,3}}\.?)?{CURRENCY_SIGN}|(?<![^\W\d_])[^\W\d_]{{1,3}}(?:\.|/\.?)?(?![^\W\d_]))"
KNOWN_CURRENCY = (
    rf"(?:[A-Z]{{0,3}}{CURRENCY_SIGN}|\b(?:EUR|USD|GBP|CHF|JPY|CNY|INR|BRL|PLN|SEK|NOK|DKK|Rs|Fr|kr|zł)\b\.?)"
)
# A minus of the digits after it, not a hyphen, a range or a list bullet.
BEFORE = re.compile(
    rf"(?:\(\s?(?:{CURRENCY}\s?)?|(?<![\w.,){MINUS}\]])(?:(?:{KNOWN_CURRENCY}\s?)?(?P<sign>[{MINUS}])(?P<gap>\s{{0,2}})"
    rf"|(?P<word>minus|negative|moins|menos|meno|минус|[CD]R\.?)\s)(?P<unit>{CURRENCY}\s?)?)\Z",
    re.IGNORECASE,
)
# A minus behind the digits ends a word, or stands alone at the end of a line or cell.
BEHIND = re.compile(
    rf"(?:\s?{CURRENCY})?(?:[{MINUS}](?![\w(])|[ \t]{{1,4}}[{MINUS}][ \t]{{0,4}}(?=[\r\n|;]|\Z)"
    r"|\s?(?:[CD][Rr]|[cd]r|[SH])\b)"
)
CLOSING = re.compile(rf"(?:\s?{CURRENCY})?\s?\)")
EXPONENT = re.compile(
    r"[eE](?P<plain>[+-]?\d{1,3})(?!\w)"
    r"|\s?[×x·*⋅]\s?10(?:(?:\^|\*\*)(?P<raised>[+−-]?\d{1,3})|(?P<small>[⁺⁻]?[⁰¹²³⁴-⁹]{1,3}))(?!\w)"
)
PERCENT = re.compile(
    r"\s?(?:(?P<mille>‰)|[%٪％]|(?:percent|per cent|pct|prozent|pour cent|por cien|percento|procent)\w{0,2}\b)",
    re.IGNORECASE,
)
SCALES = {
    "k": 3, "tsd": 3, "thousand": 3, "tausend": 3, "mille": 3, "mil": 3, "тыс": 3, "m": 6, "mn": 6, "mio": 6, "mln": 6,
    "million": 6, "millions": 6, "millionen": 6, "millón": 6, "millones": 6, "milhão": 6, "milhões": 6, "milioni": 6,
    "miljoen": 6, "млн": 6, "миллион": 6, "миллионов": 6, "b": 9, "bn": 9, "billion": 9, "billions": 9, "mrd": 9,
    "milliard": 9, "milliards": 9, "milliarden": 9, "miljard": 9, "miliardi": 9, "млрд": 9, "t": 12, "tn": 12,
    "trillion": 12, "trillions": 12, "hundred": 2, "hundert": 2, "lakh": 5, "lakhs": 5, "lac": 5, "crore": 7,
    "crores": 7,
}
_WORDS = "|".join(sorted((word for word in SCALES if len(word) > 1), key=len, reverse=True))
SCALE = re.compile(
    rf"(?:[\s-]?(?P<word>{_WORDS})|\s?(?P<big>(?-i:[kKM]))|(?P<one>[mbt]|(?-i:MM)))(?![^\W_])", re.IGNORECASE
)
POWERS = {"百": 2, "千": 3, "천": 3, "万": 4, "萬": 4, "만": 4, "億": 8, "亿": 8, "억": 8}
# Letters right behind digits that leave the number as it is: ordinals, units, times of day and currencies.
UNIT = re.compile(
    r"(?:st|nd|rd|th|er|re|x|am|pm|[ap]|h|hrs?|min|sec|s|kg|g|mg|lbs?|oz|l|ml|cl|cm|mm|km|kmh|px|gb|mb|tb|kb|w|kw|kwh|v|hz|c|f"
    r"|eur|usd|gbp|chf|jpy|uhr|[CD]R|S|H)(?![^\W_])|[年月日년월일時时點点分秒円元圆圓块塊원個个人名回号號]",
    re.IGNORECASE,
)
FRACTION = re.compile(r"\s?(?P<sign>[¼-¾⅐-⅞])|(?:\s(?P<above>\d{1,2}))?[/⁄](?P<below>\d{1,2})(?![\d/])")
# Groups of digits that may be one identifier, as in an account number.
JOINED = re.compile(r"(?<!\d)\d++(?:[ -]\d++)+")
JOINED_DIGITS = range(8, 20)


@dataclass(frozen=True, slots=True)
class Number:
    """A number at [start, end) of a text; `is_sure` if one of its readings must be the right one."""

    readings: tuple[int | float, ...]
    start: int
    end: int
    is_sure: bool = True


def find_numbers(text: str) -> Iterator[Number]:
    """Yield every number of the text. One that may be negative comes twice; only then its span has the sign.

    "2 300" may be one number or two: it is yielded as a whole and in parts.
    """
    for match in DIGITS.finditer(text):
        pieces = [piece.span() for piece in PIECE.finditer(text, *match.span())]
        sizes = [*([len(pieces)] if len(pieces) > MAX_GROUPS else []), *range(min(len(pieces), MAX_GROUPS), 0, -1)]
        for size in sizes:
            for (start, _), (_, end) in zip(pieces, pieces[size - 1 :], strict=False):
                yield from _read(text, start, end)
    for match in JOINED.finditer(text):
        digits = re.sub(r"\D", "", match.group())
        if len(digits) in JOINED_DIGITS:
            yield Number((int(digits),), *match.span())


def read_number(text: str) -> set[int | float]:
    """Return the readings of a text that is one number as a whole; none of any other."""
    numbers = find_numbers(text) if len(text) <= MAX_TEXT_CHARS else ()
    return {value for each in numbers if (each.start, each.end) == (0, len(text)) for value in each.readings}


def find_moved(values: Collection[int | float], text: str) -> dict[int | float, tuple[str, int | float]]:
    """Return, by value, the one number of the text with its digits and another separator: as written, and its value."""
    found: dict[tuple[str, bool], dict[int | float, tuple[str, int | float]]] = {}
    for each in find_numbers(text) if values else ():
        written = text[each.start : each.end]
        if written[-1].isdecimal() and any(point in written for point in POINTS):
            for number in each.readings:
                for digits in (NO_DIGIT.sub("", written), NO_DIGIT.sub("", str(number))):
                    found.setdefault((digits, number < 0), {})[number] = written, number
    same = {value: found.get((NO_DIGIT.sub("", str(_tidy(value))), value < 0), {}) for value in values}
    return {value: next(iter(each.values())) for value, each in same.items() if len(each) == 1}


def read_digits(number: str) -> tuple[int | float, ...]:
    """Return the values that digits with separators may have, in rising order; none for `1.2.3`."""
    if not number[-1].isdecimal():
        return unicodedata.numeric(number),
    groups, marks = re.findall(r"\d+", number), re.findall(r"\D", number.translate(SEPARATORS))
    if sum(map(len, groups)) > MAX_DIGITS:
        return ()
    if len(marks) == len(groups):  # .5
        fraction = float(f"0.{int(groups[0]):0{len(groups[0])}}")
        return () if len(groups) > 1 else (fraction,) if marks[0] == "." else (fraction, int(groups[0]))
    found: set[int | float] = set()
    if _are_thousands(groups, marks):
        found.add(int("".join(groups)))
    *front, last = groups
    if marks and marks[-1] in POINTS and marks[-1] not in marks[:-1] and _are_thousands(front, marks[:-1]):
        found.add(_tidy(float(f"{int(''.join(front))}.{int(last):0{len(last)}}")))
    return tuple(sorted(found))


def _are_thousands(groups: Sequence[str], marks: Sequence[str]) -> bool:
    """Return whether marks of one kind separate groups of three digits, Indian groups or groups of four."""
    if not marks:
        return True
    first, *middle, last = map(len, groups)
    return (
        len(set(marks)) == 1
        and marks[0] != "\u066b"
        and int(groups[0][0]) > 0
        and (
            (first <= 3 and last == 3 and {*middle} <= {3})
            or (first <= 2 and last == 3 and {*middle} == {2})
            or (first <= 4 and last == 4 and {*middle} <= {4} and marks[0] == ",")
        )
    )


def _read(text: str, start: int, end: int) -> Iterator[Number]:
    """Yield the number that stands in digits at [start, end), with what stands around it."""
    readings = read_digits(text[start:end])
    if not readings:
        # Each run of digits may be a number, as in a date or a version. No double holds the longest.
        for run in re.finditer(r"\d+", text[start:end] if " " not in text[start:end] else ""):
            if run.end() - run.start() <= MAX_DIGITS:
                yield Number(read_digits(run.group()), start + run.start(), start + run.end(), False)
        return
    more, more_end, is_sure = _read_behind(text, end, readings)
    before = BEFORE.search(text, max(0, start - CONTEXT_CHARS), start)
    is_negative = False
    if before is not None and (sign := before["sign"]):
        # Only a minus right before the digits is sure: a dash with a space may be a bullet.
        is_negative = sign in SURE_MINUS and not before["gap"] and not (before["unit"] or "").islower()
    elif before is not None and (word := before["word"]):
        is_negative = word[1].lower() != "r"  # CR and DR are a minus to some
    for values, last in ((readings, end), (more, more_end)):
        values = tuple(_tidy(value) for value in values if abs(value) <= sys.float_info.max)
        if not values:
            continue
        if not is_negative:
            yield Number(values, start, last, is_sure)
        first, stop = (before.start(), last) if before is not None else (start, last)
        if before is not None and before.group().startswith("("):
            closing = CLOSING.match(text, last)
            first, stop = (before.start(), closing.end()) if closing is not None else (start, last)
        elif before is None and (behind := BEHIND.match(text, last)) is not None:
            stop = behind.end()
        if (first, stop) != (start, last):
            yield Number(tuple(-value for value in values), first, stop, is_sure)


def _read_behind(text: str, end: int, readings: Sequence[int | float]) -> tuple[list[int | float], int, bool]:
    """Return the values with what follows the digits, such as a percent sign, its end, and whether it is understood."""
    if match := EXPONENT.match(text, end):
        power = match["plain"] or match["raised"] or "".join(map(_plain_digit, match["small"]))
        return [float(f"{value}e{power.replace('−', '-')}") for value in readings], match.end(), True
    if match := PERCENT.match(text, end):
        return [float(f"{value}e{-3 if match['mille'] else -2}") for value in readings], match.end(), True
    if match := SCALE.match(text, end):
        word = (match["word"] or match["big"] or match["one"]).lower()
        return [_scale(value, SCALES.get(word, 6)) for value in readings], match.end(), word == "k"
    if (power := POWERS.get(text[end : end + 1])) is not None:
        return [_scale(value, power) for value in readings], end + 1, False
    if match := FRACTION.match(text, end):
        return [*_add_fraction(match, readings)], match.end(), True
    is_word = text[end : end + 1].isalpha()
    return [], end, not is_word or UNIT.match(text, end) is not None


def _add_fraction(match: re.Match[str], readings: Sequence[int | float]) -> Iterator[float]:
    """Yield 1.5 for 1½ and 1 1/2, and 0.5 for 1/2."""
    for value in readings:
        if match["sign"]:
            yield value + unicodedata.numeric(match["sign"])
        elif int(match["below"]) > 0:
            below = int(match["below"])
            yield value + int(match["above"]) / below if match["above"] else value / below


def _scale(value: int | float, power: int) -> int | float:
    return value * 10**power if isinstance(value, int) else float(f"{value}e{power}")


def _tidy(value: int | float) -> int | float:
    """Return a whole number as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain_digit(char: str) -> str:
    return {"⁺": "+", "⁻": "-"}.get(char) or str(unicodedata.digit(char))
