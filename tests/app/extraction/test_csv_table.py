"""Tables as banks, Excel and databases export them: the delimiter, the header, and what is above it."""

import pytest

from app.extraction.csv_table import read_csv
from app.extraction.decoding import UnreadableSource


def read(text: str, name: str = "a.csv") -> tuple[list[str], list[list[str]], str]:
    table = read_csv(text, name, lambda *_: None)
    return table.columns, table.rows, "; ".join(table.notes)


BODY = "id;text;amount\n1;Shop in Ghent;-12,50\n2;Cafe in Paris;-3,00\n"
ROWS = [["1", "Shop in Ghent", "-12,50"], ["2", "Cafe in Paris", "-3,00"]]


@pytest.mark.parametrize(
    "above",
    [
        "Statement of account 123\nPeriod: February 2026\n\n",
        "Statement of account 123\n",  # no blank line
        "Account;123\nPeriod;February 2026\n\n",  # with delimiters
        "Account;123;\nPeriod;February, 2026;\n;;\n",  # padded to the width of the table
        '"Statement; of ""all"" accounts"\n\n',
        "Statement, of account 123\nFrom 1,000.00 to 2,000.00\n",  # with another delimiter
        "\n\nStatement | of account\n\n",
    ],
)
def test_lines_above_the_header_are_left_out_and_noted(above: str) -> None:
    columns, rows, notes = read(above + BODY)
    assert (columns, rows) == (["id", "text", "amount"], ROWS)
    assert "above the header are not part of the table" in notes and above.strip().split("\n")[0][:7] in notes


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("Export 2026\nname;comment\nAda;nice\nBob;good\n", ["name", "comment"]),
        ("People\n\nname,comment\nAda,nice\n", ["name", "comment"]), ("  \n;;\nid;text\n1;a, b\n", ["id", "text"]),
        ("text\nA | B; c\nC | D; d\nE | F; e\n", ["text"]),
        ("notes\nHello, Ann: x\nBye, Bob: y\n", ["notes"]),  # prose
        ("trip\nHotel 3,50 EUR\nTaxi 4,20 EUR\n", ["trip"]),  # a decimal comma
        ("a,b\n1,2\n3,4\n", ["a", "b"]),
        ("when;what\n1.2.2026;a\n\n2.2.2026;b\n", ["when", "what"]),  # a blank line inside
        ("id,name\n1,Ann,x\n2,Bob,y\n", ["id", "name"]),  # rows longer than the header
    ],
)
def test_a_header_is_found_only_where_it_is_clear(text: str, columns: list[str]) -> None:
    assert read(text)[0] == columns


@pytest.mark.parametrize(
    ("text", "cell"),
    [("sep=;\na;b\n1,5;2\n", "1,5"), ('"sep=|"\na|b\n1;5|2\n', "1;5"), ("SEP=\t\na\tb\n1,5\t2\n", "1,5")],
)
def test_the_separator_line_of_excel_is_obeyed(text: str, cell: str) -> None:
    assert read(text)[:2] == (["a", "b"], [[cell, "2"]])


@pytest.mark.parametrize("mark", [";", ",", "\t", "|"])
def test_each_delimiter_is_recognised_and_quoted_line_breaks_stay(mark: str) -> None:
    text = f'id{mark}note\n1{mark}"one\n{mark}two ""x"""\n2{mark}y\n'
    assert read(text)[:2] == (["id", "note"], [["1", f'one\n{mark}two "x"'], ["2", "y"]])


def test_columns_without_a_name_of_their_own_are_noted() -> None:
    columns, rows, notes = read(f"x,,x\n{'a' * 200_000},2,3\n")
    assert columns == ["x", "column 2", "x (3)"] and len(rows[0][0]) == 200_000
    assert len(set(read("x,x (3),x\n1,2,3\n")[0])) == 3
    assert notes == "columns without a name of their own are called column 2, x (3)"


def test_an_error_names_its_line_below_what_was_left_out() -> None:
    with pytest.raises(UnreadableSource, match=r"a\.csv is not CSV, line 6: "):
        read(f"Statement\n\n{BODY}" + '"x" y;1;2\n')


@pytest.mark.parametrize("above", ["Account;123;Balance;5\n", "Account;123;Balance;5\nBank;DE1;7;x;y\n"])
def test_lines_wider_than_the_table_below_are_no_header(above: str) -> None:
    found = read_csv(above + "\nid;text;amount\n1;abc;5\n2;def;6\n", "a.csv", lambda *_: None)
    assert (found.columns, len(found.rows)) == (["id", "text", "amount"], 2) and "Account" in found.notes[0]


def test_a_header_of_figures_is_named_since_it_may_be_a_row() -> None:
    assert read("1,2\n3,4\n")[2] == "a.csv: the first row is read as names of the columns: 1 / 2"
