"""Numbers are read as people write them, in every reading that a spelling has."""

import pytest

from app.extraction.numbers import find_moved, find_numbers


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("(1,234.56) EUR", {1234.56, -1234.56}), ("(€ 2’345,00)", {2345, -2345}),
        ("1.234,56-", {1234.56, -1234.56}), ("1,234.56 CR", {1234.56, -1234.56}), ("DR 5.00", {5, -5}),
        ("- 1,234.56", {1234.56, -1234.56}), ("–1,234.56", {1234.56, -1234.56}),
        ("△1,200.5", {1200.5, -1200.5}), ("−5, -€6.50, € -7, EUR -8, minus 9", {-5, -6.5, -7, -8, -9}),
        *((credit, {1234.5, -1234.5}) for credit in (
            "(US$1,234.50)", "(C$ 1,234.50)", "(1,234.50 AUD)", "(1\u00a0234,50 Kč)", "(1234,5 Ft)", "(Rp1.234,50)")),
        ("-AED 5, -HK$6, -C$7", {-5, -6, -7}), ("-at 5, A-6", {5, -5, 6}),
        ("season 2019-20, a 5-day trip, x--3", {2019, 20, 5, 3}), ("CHF 1'234.5 or 1’234.5", {1234.5}),
        ("1\u00a0234,5 or 1\u202f234,5", {1234.5}), ("12,34,567.89", {1234567.89}),
        ("1,2345,6789", {123456789}), (".5 ,5", {0.5, 5}), ("1.234", {1.234, 1234}), ("0.123", {0.123}),
        ("1.234.567,89", {1234567.89}), ("1_000", {1000}), ("15%, 15 percent, 3‰", {15, 0.15, 3, 0.003}),
        ("2.5e3 and 2.5E-2", {2.5, 2500, 3, 0.025, 2}), ("1½, 2 1/4", {1, 1.5, 0.5, 2, 2.25, 0.25, 4}),
        ("१२,३४,५६७.५० ١٬٢٣٤٫٥ １２３．５", {1234567.5, 1234.5, 123.5}),
        ("$1.2 million, 3 Mio, 5 lakh, 3万", {1.2, 1200000, 3, 3000000, 5, 500000, 30000}),
        ("5 300.50", {5300.5, 5, 300.5}), ("no 4111 1111 1111 1111", {4111, 1111, 4111111111111111}),
        ("9" * 400, set()),
    ],
)
def test_a_number_is_read_in_every_spelling(text: str, values: set[float]) -> None:
    assert {value for number in find_numbers(text) for value in number.readings} == values
    assert all(text[number.start : number.end].strip() for number in find_numbers(text))


@pytest.mark.parametrize("text", ["1.2.3", "1,23,4", "5ab", "3万", "2 Mrd", "7m", "2h30", "0x1F", "1.234.56"])
def test_digits_that_may_mean_something_else_are_not_sure(text: str) -> None:
    assert not all(number.is_sure for number in find_numbers(text))
    assert all(number.is_sure for number in find_numbers("3 pens, 5kg, 62k, 1st, 7 pm, A42, Q3, 10:30, 99 EUR"))


@pytest.mark.parametrize(
    ("value", "text", "found"),
    [
        (8550, "85,50 EUR, in all 85,50", ("85,50", 85.5)), (0.855, "85,50", ("85,50", 85.5)),
        (123450, "1.234,50", ("1.234,50", 1234.5)), (-1999, "19.99 and -19.99", ("-19.99", -19.99)),
        (8550.0, "at 85.50 kg", ("85.50", 85.5)), (855, "8 550, 8555 and 85.51", None),
        (12.34, "1.234", None), (1250, "12.50 or 1,250.00 or 125.0", None), (12, "on 1.2.2026", None),
        (5, "0.05", ("0.05", 0.05)),
    ],
)
def test_a_number_whose_decimal_separator_was_moved_is_found(value: float, text: str, found: object) -> None:
    assert find_moved([value], text) == ({value: found} if found else {})
