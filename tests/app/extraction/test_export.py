"""Exported records come back as they were from JSONL; tables have one column a field, and a row an item of a list."""

import csv
import io
import json
from typing import Any

import openpyxl
import pytest
from pyarrow import parquet

from app.extraction.export import ExportError, export, make_rows

RECORDS: list[dict[str, Any]] = [
    {"source": "a", "valid": True, "finish_reason": "stop", "record": {"n": 1, "who": {"name": "Zoë"}, "tags": ["x"]}},
    {"source": "b", "valid": False, "finish_reason": "error", "record": None, "error": "too long"},
    {"source": "c", "valid": True, "finish_reason": "stop", "record": {"n": 2.5, "ok": False, "valid": "my own"}},
]


def read_csv(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline="")))


def test_records_come_back_from_every_format() -> None:
    assert [json.loads(line) for line in export(RECORDS, "jsonl").splitlines()] == RECORDS
    first, second, third = make_rows(RECORDS)
    assert first["who.name"] == "Zoë" and first["tags"] == '["x"]' and second["error"] == "too long"
    assert list(first) == list(second) == list(third)
    assert third["record.valid"] == "my own" and third["valid"] is True
    rows = read_csv(export(RECORDS, "csv"))
    assert rows[0]["who.name"] == "Zoë" and rows[1]["n"] == "" and rows[2]["ok"] == "false"


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"), ("@cmd", "'@cmd"), ("+44 20 7946", "+44 20 7946"), ("-12.50", "-12.50"),
        ("-cmd", "'-cmd"), ("-2+3+cmd|' /C calc'!A0", "'-2+3+cmd|' /C calc'!A0"),
        ('+1+HYPERLINK("http://x/")', '\'+1+HYPERLINK("http://x/")'),
        ("+49 (30) 12-34/5", "+49 (30) 12-34/5"), (" =cmd", "' =cmd"), ("\n=1+1", "'\n=1+1"),
        ("\u00a0\u200b@cmd", "'\u00a0\u200b@cmd"), ("＝1+1", "'＝1+1"), ("＠cmd", "'＠cmd"), (" ＋cmd", "' ＋cmd"),
        ("－cmd", "'－cmd"), (" -12.50", " -12.50"), ("a =b", "a =b"),
    ],
)
def test_a_text_that_a_spreadsheet_would_run_is_quoted_and_data_is_not(value: str, cell: str) -> None:
    assert read_csv(export([{"source": "s", "record": {"x": value}}], "csv"))[0]["x"] == cell
    key = next(reversed(read_csv(export([{"source": "x", "record": {"=HYPERLINK(1)": 1}}], "csv"))[0]))
    assert key == "'=HYPERLINK(1)"


def test_parquet_keeps_types_and_gaps() -> None:
    rows = parquet.read_table(io.BytesIO(export(RECORDS, "parquet"))).to_pylist()
    assert [row["n"] for row in rows] == [1.0, None, 2.5] and rows[2]["ok"] is False and rows[0]["valid"] is True


TEXTS = {"True": "true", "None": None}


@pytest.mark.parametrize("values", [(1, "a", None, True, 2**70), (0.5, 10**400)])
def test_a_column_of_mixed_kinds_or_too_large_integers_becomes_text(values: tuple[Any, ...]) -> None:
    mixed = [{"source": "s", "record": {"x": value}} for value in values]
    read = parquet.read_table(io.BytesIO(export(mixed, "parquet"))).to_pylist()
    assert [row["x"] for row in read] == [TEXTS.get(repr(value), str(value)) for value in values]


HALF: list[dict[str, Any]] = [
    {"source": "fine", "valid": True, "record": {"x": "é"}},
    {"source": "odd", "valid": True, "record": {"x": "so happy \ud83d"}},
]


def test_jsonl_keeps_half_a_surrogate_pair_and_other_formats_are_refused() -> None:
    data = export(HALF, "jsonl")
    assert [json.loads(line) for line in data.splitlines()] == HALF and "é".encode() in data
    assert all(len(export([], file_format).splitlines()) <= 1 for file_format in ("jsonl", "csv"))
    with pytest.raises(ExportError, match="'xml' is not one of jsonl, csv, xlsx, parquet"):
        export(RECORDS, "xml")


@pytest.mark.parametrize("file_format", ["csv", "xlsx", "parquet"])
def test_what_cannot_be_written_is_an_export_error_that_names_the_source(file_format: str) -> None:
    with pytest.raises(ExportError, match="'odd' contains an unpaired surrogate"):
        export(HALF, file_format)


LINES = [{"what": "=1+1", "n": 2}, {"what": "pen\x07", "tags": ["red", 7, None]}]
ORDERS: list[dict[str, Any]] = [
    {"source": "a", "valid": True, "record": {"no": 10**20, "sold": {"lines": LINES}, "to": ["x", "y; z"]}},
    {"source": "b", "valid": True, "record": {"no": 7, "sold": {"lines": []}, "to": [], "grid": [[1], [2]]}},
    {"source": "c", "valid": True, "record": {"no": 8, "sold": None}},
]


def test_the_items_of_the_only_list_are_rows_that_repeat_the_other_fields() -> None:
    rows = read_csv(export(ORDERS, "csv"))
    fields = ("source", "no", "sold.lines.what", "sold.lines.n", "sold.lines.tags", "to", "grid", "sold")
    assert [tuple(row[name] for name in fields) for row in rows] == [
        ("a", f"{10**20}", "'=1+1", "2", "", "x; y; z", "", ""),
        ("a", f"{10**20}", "pen\x07", "", "red; 7; null", "x; y; z", "", ""),
        ("b", "7", "", "", "", "", "[[1], [2]]", ""),
        ("c", "8", "", "", "", "", "", ""),
    ]
    book = openpyxl.load_workbook(io.BytesIO(export(ORDERS, "xlsx")))
    heads, first, second, *_ = book["records"].values
    assert book.sheetnames == ["records"] and book["records"].max_row == 5
    row = dict(zip(heads, first, strict=True))
    assert (row["no"], row["sold.lines.what"], row["sold.lines.n"], row["to"]) == (str(10**20), "=1+1", 2, "x; y; z")
    assert dict(zip(heads, second, strict=True))["sold.lines.what"] == "pen\ufffd"
    assert book["records"].cell(2, heads.index("sold.lines.what") + 1).data_type == "s"
    (one, *_) = parquet.read_table(io.BytesIO(export(ORDERS, "parquet"))).to_pylist()
    assert json.loads(one["sold.lines"]) == LINES and json.loads(one["to"]) == ["x", "y; z"]
    (row,) = read_csv(export([{"source": "d", "record": [{"n": 1}, 2]}], "csv"))
    assert row["value"] == '[{"n": 1}, 2]'


def test_several_lists_are_json_text_and_sheets_of_a_workbook() -> None:
    record = {"lines": [{"what": "ink", "#": "mine"}, {"what": "pen"}], "taxes": [{"rate": 19}]}
    records = [{"source": "a", "record": {"lines": [{"what": "nib"}]}}, {"source": "b", "record": record}]
    assert json.loads(read_csv(export(records, "csv"))[1]["lines"]) == record["lines"]
    book = openpyxl.load_workbook(io.BytesIO(export(records, "xlsx")))
    assert book.sheetnames == ["records", "lines", "taxes"] and book["records"].max_row == 3
    lines = [("#", "what", "#"), (1, "nib", None), (2, "ink", "mine"), (2, "pen", None)]
    assert list(book["lines"].values) == lines and list(book["taxes"].values) == [("#", "rate"), (2, 19)]
    with pytest.raises(ExportError, match="a text has 40,000 characters; Excel takes 32,767"):
        export([{"source": "c", "record": {"text": "x" * 40_000}}], "xlsx")


def test_no_field_hides_another_of_the_same_name() -> None:
    record = {"a": {"b": "inner"}, "a.b": "outer", "source": "mine", "record": {"source": "deep"}}
    (row,) = make_rows([{"source": "x", "valid": True, "finish_reason": "stop", "record": record}])
    assert (row["a.b"], row["a.b (2)"]) == ("inner", "outer")
    assert (row["source"], row["record.source"], row["record.source (2)"]) == ("x", "mine", "deep")


def test_what_stood_beside_the_text_comes_before_the_record() -> None:
    first = {"source": "x", "valid": True, "row": {"id": "7", "source": "mail"}, "record": {"id": 9, "city": "Ulm"}}
    second = {"source": "y", "valid": True, "approved": True, "record": {"city": "Bonn"}}
    one, two = make_rows([first, second])
    assert list(one) == [
        "source", "valid", "finish_reason", "confidence", "to_check", "approved",
        "id", "row.source", "record.id", "city",
    ]
    assert (one["approved"], two["approved"]) == (None, True)
    assert (one["id"], one["row.source"], one["record.id"], two["id"]) == ("7", "mail", 9, None)
