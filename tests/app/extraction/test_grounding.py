"""Evidence is where a value stands in the source: as it is, written otherwise, or nowhere."""

import json
import unicodedata
from typing import Any

import pytest

from app.extraction.grounding import Evidence, find_evidence
from app.extraction.json_spans import scan

SOURCE = "Invoice No. 42-A\nNorthwind  Paper Ltd, 3rd of March 2024\n2 x Pens 1,234.50\n1 x Ink 3.5\nDue at 2:30 pm"


def evidence_of(value: object, source: str = SOURCE) -> Evidence:
    return find_evidence(scan(json.dumps({"v": value}) + " ").leaves, source)["/v"]


@pytest.mark.parametrize(
    ("value", "match", "quote"),
    [
        ("42-A", "exact", "42-A"), ("northwind paper ltd", "normalised", "Northwind  Paper Ltd"),
        ("2024-03-03", "normalised", "3rd of March 2024"), ("14:30", "normalised", "2:30 pm"),
        ("Southwind", "none", ""), (1234.5, "normalised", "1,234.50"), (3.5, "exact", "3.5"),
        (2, "exact", "2"), (99, "none", ""),
    ],
)
def test_a_value_is_found_as_it_is_or_written_otherwise(value: object, match: str, quote: str) -> None:
    found = evidence_of(value)
    assert (found.match, found.quote) == (match, quote)
    assert SOURCE[found.start : found.end] == quote


DATES = ["2026-04-09", "9 April 2026", "Apr 9, 2026", "09.04.2026", "04/09/2026", "2026/04/09", "9-Apr-2026"]


@pytest.mark.parametrize(
    ("value", "source", "quote"),
    [
        *(("2026-04-09", f"Due {written}.", written) for written in DATES),
        ("2026-02-30", "31.02.2026, 30 February 2026", ""),
        (1200, "Sum: 1,200.00 EUR", "1,200.00"),
        (1200, "Sum: 1.200,00 EUR", "1.200,00"),
        (1200, "Sum: 1 200 EUR", "1 200"),
        (1200.5, "Sum: 1'200.50 EUR", "1'200.50"),
        (3, "Sum: three EUR", "three"),
        (30, "due in thirty days", "thirty"),
        (1250, "One thousand two hundred and fifty euros", "One thousand two hundred and fifty"),
        (100, "a hundred pens", "a hundred"),
        (2, "numbers one two three", "two"),
        (12, "nach zwölf Tagen", "zwölf"),
        ("DE89370400440532013000", "IBAN DE89 3704 0044 0532 0130 00", "DE89 3704 0044 0532 0130 00"),
        ("+4930123456", "Tel. +49 (0)30 / 12 34 56.", "49 (0)30 / 12 34 56"),
        ("555.123.4567", "call 555-123-4567", "555-123-4567"),
        ("123456", "1234.56 EUR", ""),
        ("5kg", "a bag of 5 kg", "5 kg"),
        ("15kg", "a bag of 1 5kg", ""),
        ("Rechnung", "Rech\u00adnung 5", "Rech\u00adnung"),
        ("hyphenated word", "a hyphen-\nated word", "hyphen-\nated word"),
        ("Jean-Paul", "by Jean-\n Paul", "Jean-\n Paul"),
        (1200000, "worth $1.2 million", "1.2 million"),
        (0.15, "VAT 15 %", "15 %"),
        (3, "12 March 2026", "12 March 2026"),
        (2024, "on 05/03/24", "05/03/24"),
        ("1234.50", "1.234,50 EUR", "1.234,50"),
        ("007", "7 pens", ""),
        ("2024-03-05", "on 05/03/24", "05/03/24"),
        ("12/03/2026", "12 March 2026", "12 March 2026"),
        ("2026-03", "in March 2026", "March 2026"),
        # A date with its time of day; an offset from UTC counts where the text has one.
        ("2026-03-12T10:30:00Z", "12 March 2026 10:30 UTC", "12 March 2026 10:30"),
        ("2026-03-12T10:30:00+01:00", "at 10:30 on 12/03/2026", "10:30 on 12/03/2026"),
        ("2026-03-12T09:30:00Z", "2026-03-12T10:30:00+01:00", "2026-03-12T10:30:00"),
        ("2026-03-12T10:30:00Z", "2026-03-12T10:30:00+01:00", ""),
        ("2026-03-12T10:31:00Z", "12 March 2026 10:30", ""),
        ("2026-03-12T00:00:00", "12 March 2026", "12 March 2026"),
        # Numbers with a space between are one or two.
        (2300.0, "pieces: 2 300 40", "2 300"),
        (2.0, "pieces: 2 300 40", "2"),
        (300.0, "pieces: 2 300 40", "300"),
        (40.0, "pieces: 2 300 40", "40"),
        (20, "2024, 1.20, 20.5 and 120", ""),
        (1.2, "1,200.00", ""),
        # Digits with a dot are a time where the words around say so.
        ("07:30", "costs 7.30 EUR", ""),
        ("07:30", "at 7.30 EUR each", ""),
        ("07:30", "version 7.30", ""),
        ("09:00", "9 a day", ""),
        ("07:30", "at 7.30", "7.30"),
        ("22:30", "於22時30分", "22時30分"),
        ("22:30", "오후 10시 30분", "오후 10시 30분"),
        ("10:00", "um 10 Uhr", "10 Uhr"),
        ("10:30", "à 10 h 30", "10 h 30"),
        ("19:30", "Doors 19.30 Uhr", "19.30"),
        ("17:30", "open from 9.00 to 17.30", "17.30"),
        ("09:00", "open 9.00–17.30 h", "9.00"),
        ("14:30", "2.30 p.m.", "2.30 p.m"),
        ("14:30", "2:30p", "2:30p"),
        ("17:00", "17h00", "17h00"),
        # A short value is a whole word.
        ("Tea", "Steam", ""),
        ("art", "Martin", ""),
        ("Tea", "Steam and tea", "tea"),
        ("東京", "東京都港区", "東京"),
        ("paper", "newspaper", "paper"),
    ],
)
def test_a_value_is_found_in_every_common_spelling_and_not_in_another_value(
    value: object, source: str, quote: str
) -> None:
    found = evidence_of(value, source)
    assert found.quote == quote and (found.match == "none") == (quote == "")


def test_a_whole_word_goes_before_a_part_of_one() -> None:
    assert evidence_of("art", "smart art").start == 6
    assert evidence_of("mart", "smart").match == "exact"


def test_flags_nulls_and_empty_texts_have_no_evidence_to_find() -> None:
    leaves = scan('{"a": true, "b": null, "c": ""}').leaves
    assert find_evidence(leaves, SOURCE) == {}


PAIR = [{"n": "Ann", "q": 2}, {"n": "Bob", "q": 2}]
ANY_ORDER = {"l": [{"q": 2, "n": "Ann"}, {"q": 3, "n": "Bob"}]}
SHARED = {"l": [{"n": "Ann", "c": "EUR", "q": 2}, {"n": "Bob", "c": "EUR", "q": 2}]}
SAME_LINE = {"l": [{"p": 1.5, "q": 2}, {"p": 1.5, "q": 2}]}


@pytest.mark.parametrize(
    ("record", "source", "starts"),
    [
        ({"i": [{"n": 2, "p": 1.5}] * 2}, "2 pens at 1.50\n2 pads at 1.50", [0, 10, 15, 25]),
        (PAIR, "Ann bought 2. Bob bought 2.", [0, 11, 14, 25]),
        (ANY_ORDER, "Ann 2, Bob 3, Ann 4, Bob 5", [4, 0, 11, 7]),
        (SHARED, "Ann 2, Bob 2, Ann 3, Bob 3; all in EUR", [0, 35, 4, 7, 35, 11]),
        (SAME_LINE, "2 pens at 1.50\n2 pads at 1.50", [10, 0, 25, 15]),
    ],
)
def test_items_of_a_list_are_found_one_behind_the_other(record: Any, source: str, starts: list[int]) -> None:
    leaves = scan(json.dumps(record) + " ").leaves
    found = find_evidence(leaves, source)
    assert [found[leaf.pointer].start for leaf in leaves] == starts


@pytest.mark.parametrize(
    ("value", "source", "match", "quote"),
    [
        (5, "Temperature -5 degrees", "none", ""), (-5, "Temperature -5 degrees", "exact", "-5"),
        (-5, "Temperature −5 degrees", "normalised", "−5"),
        (-1250, "balance -1,250.00", "normalised", "-1,250.00"), (1250, "balance -1,250.00", "none", ""),
        (-1250, "balance -€1,250.00", "normalised", "-€1,250.00"), (-5, "season 2019-5", "none", ""),
        (5, "season 2019-5", "exact", "5"), (5, "- 5 pens", "exact", "5"),
    ],
)
def test_the_sign_of_a_number_counts(value: float, source: str, match: str, quote: str) -> None:
    found = evidence_of(value, source)
    assert (found.match, found.quote) == (match, quote)


NAMES = unicodedata.normalize("NFD", "Name: José Café in Béa's café")


@pytest.mark.parametrize(
    ("value", "match", "quote"),
    [
        ("José Café", "normalised", "José Café"),
        (unicodedata.normalize("NFD", "José Café"), "exact", "José Café"), ("Jose", "none", ""),
        ("Cafe in", "none", ""), ("a", "none", ""), ("café", "normalised", "Café"),
    ],
)
def test_an_accent_belongs_to_its_letter_however_it_is_written(value: str, match: str, quote: str) -> None:
    found = evidence_of(value, NAMES)
    assert (found.match, unicodedata.normalize("NFC", found.quote)) == (match, quote)
    assert NAMES[found.start : found.end] == found.quote


@pytest.mark.parametrize("value", ["서울특별시", "ガス", "दिल्ली"])
def test_characters_of_several_code_points_are_found(value: str) -> None:
    source = f"x {unicodedata.normalize('NFD', value)} y"
    found = evidence_of(value, source)
    assert found.match != "none" and unicodedata.normalize("NFC", found.quote) == value
    assert evidence_of("ガス", "ｶﾞｽ").quote == "ｶﾞｽ"
