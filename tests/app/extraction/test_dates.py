"""Dates are read as people write them; what may be one and is not understood is named."""

import datetime

import pytest
from babel.dates import format_date

from app.extraction.dates import LANGUAGES, find_dates, find_unread_date, read_dates

SKIPPED = {("th", "medium"): "abbreviations with a point inside"}


@pytest.mark.parametrize("width", ["full", "long", "medium"])
def test_a_date_is_read_as_each_language_writes_it(width: str) -> None:
    days = [datetime.date(2026, month, 21) for month in range(1, 13)]
    written = [
        (day.isoformat(), format_date(day, width, language))
        for language in LANGUAGES
        for day in days
        if (language, width) not in SKIPPED
    ]
    assert [each for each in written if each[0] not in [iso for iso, _, _ in find_dates(f"x {each[1]} x")]] == []


@pytest.mark.parametrize(
    ("text", "isos"),
    [
        *((f"due 5 {month} 2024", "2024-03-05") for month in ("March", "Mar", "mar.", "MARCH", "mars", "marzo")),
        ("1er février 2026, 1º marzo 2026", "2026-02-01 2026-03-01"), ("12 de marzo del 2026", "2026-03-12"),
        ("March the 12th, 2026", "2026-03-12"), ("fevrier: 5 fevrier 2026, 6 KASIM 2026", "2026-02-05 2026-11-06"),
        ("12. 3. 2026 / 12 / 03 / 2026", "2026-03-12 2026-12-03 2026-03-12 2026-12-03"),
        ("2026_03_12, 20260312, 2026-03-12T10:30:00+01:00", "2026-03-12 2026-03-12 2026-03-12"),
        ("于2026年3月12日签署, 2026년 3월 12일", "2026-03-12 2026-03-12"), ("ngày 12 tháng 3 năm 2026", "2026-03-12"),
        ("１２／０３／２０２６ ١٢ مارس ٢٠٢٦", "2026-03-12 2026-12-03 2026-03-12"),
        ("Invoice 7, March 12, 2026", "2026-03-12"),
        ("Order 3 items, 2024-05-01", "2024-05-01"),
        *((f"on {days}", "2026-03-12 2026-03-15") for days in (
            "12-15 March 2026", "12.–15. März 2026", "12 & 15 March 2026", "12th to 15th of March 2026",
            "2026-03-12/15", "du 12 au 15 mars 2026", "del 12 al 15 de marzo de 2026", "2026年3月12日〜15日")),
        ("12, 13 and 14 March 2026", "2026-03-12 2026-03-13 2026-03-14"), ("1. 12 March 2026", "2026-03-12"),
        ("1° dicembre 2026, 1 Jänner 2026", "2026-12-01 2026-01-01"), ("2026 年 3 月 12 日", "2026-03-12"),
        ("the 12th day of March, 2026", "2026-03-12"), ("令和8年3月12日、昭和64年1月7日", "2026-03-12 1989-01-07"),
        ("05.03.24", "2024-03-05 2024-05-03 2005-03-24 1924-03-05 1924-05-03 1905-03-24"),
        ("1 Marketing 2024, 3 Maya 2024, 31.02.2026, 192.168.10.12", ""),
    ],
)
def test_a_date_is_read_in_every_common_spelling(text: str, isos: str) -> None:
    assert [iso for iso, _, _ in find_dates(text)] == isos.split()


@pytest.mark.parametrize(
    "unread",
    ["12 March", "March 2026", "03/2026", "12/03", "5 Mar '24", "05.03.24", "12.III.2026", "30 February 2026",
     "2569-03-12", "8年3月12", "二〇二六年", "2026-W1", "12 foobar 2026", "1.2.2026", "12032026",
     "on the 12th", "2026 03 12", "12 03 2026", "March 12"],
)
def test_what_may_be_a_date_and_is_not_understood_is_named(unread: str) -> None:
    text = f"made 2026-02-12, due {'9.' if unread == '1.2.2026' else ''}{unread} or so"
    assert find_unread_date(text, read_dates(text)).removeprefix("9.") == unread


def test_understood_dates_and_other_numbers_leave_nothing_unread() -> None:
    text = "made 2026-02-12 10:30, paid 12 March 2026: 7.30 EUR for 3 pens; version 1.20.333, (016) 32-10-00"
    text += ", on the 5th floor"
    assert find_unread_date(text, read_dates(text)) == ""
