"""Lists from tables: the heads name the columns, every row is an item, and each value is found in its own cell."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.extraction import ExtractionResult, Extractor, extract
from app.extraction.chunks import PartsDone, stream_whole
from app.extraction.extractor import make_again
from app.extraction.flags import PART_OF_CELL
from app.extraction.tables import plan_tables
from engine import LLM
from tests.app.api.harness import needs_model
from tests.fakes import FakeEngine

INVOICE: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[3] / "assets" / "schemas" / "invoice.json").read_text(encoding="utf-8")
)
SPACED = """Invoice
Vendor: Morgen Office Supply Ltd
Invoice number: MO-377
Date: 5 June 2026
Pos  Description  Quantity  Unit price EUR
1  Desk lamp  1  10.50
2  Office chair  2  11.50

Page 2 of 2
Pos  Description  Quantity  Unit price EUR
3  Whiteboard  3  12.50
Total: 71.00 EUR"""
LAMP, CLOCK = ("Desk lamp", 2, 4.2), ("Wall clock", 10, 1250.5)


def list_rows(text: str, schema: dict[str, Any] = INVOICE) -> list[str]:
    plan = plan_tables(schema, text)
    return [] if plan is None else [row.text for row in plan.rows]


@pytest.mark.parametrize(
    "text",
    [
        "| Pos. | Bezeichnung | Menge | Einzelpreis | Gesamtpreis |\n|---|---|---:|---:|---:|\n"
        "| 1 | Desk lamp | 2 | 4,20 | 8,40 |\n| 2 | Wall clock | 10 | 1.250,50 | 12.505,00 |\n"
        "|  | Gesamt |  |  | 12.513,40 |",
        "Item\tSKU\tQty\tRate\nDesk lamp\tA-1\t2\t$4.20\nWall clock\tB-2\t10\t$1,250.50\nTotal\t\t12\t\t$12,513.40",
        "  Line   Product        Units    Unit cost    Line total\n"
        "  1      Desk lamp          2         4.20          8.40\n"
        "  2      Wall clock        10     1,250.50     12,505.00\n              Total due GBP          12,513.40",
        "Libellé;Qté;Prix unitaire\nDesk lamp;2;4,20\nWall clock;10;1.250,50\nTotal;12;",
    ],
)
def test_heads_name_the_columns_in_any_layout(text: str) -> None:
    shown = [row.replace("$", "") for row in list_rows(text)]
    assert shown == [f"Description: {what}; Quantity: {n}; Unit price: {price}" for what, n, price in (LAMP, CLOCK)]


def test_a_missing_cell_moves_no_other() -> None:
    text = "No.  Item  Sent  Qty  Price\n1  Lamp  2026-01-02  2  4.50\n2  Clock  3  9.00\n3  Fan  2026-01-03  7.25"
    text += "\nCustomer  Northwind Ltd\nReference  PO-404744"
    clock, fan = list_rows(text)[1:]
    assert clock == "Description: Clock; Quantity: 3; Unit price: 9" and fan == "Description: Fan; Unit price: 7.25"


def test_what_the_heads_do_not_name_is_read_as_a_whole() -> None:
    assert plan_tables(INVOICE, "Invoice 7, Lamp Ltd\n2 x Lamp, 3.50 EUR each\nTotal  7.00") is None
    assert plan_tables(INVOICE, "Date  Carrier  Weight\n2026-01-02  Post  4.50") is None
    assert plan_tables({"type": "object"}, SPACED) is None
    assert plan_tables(INVOICE | {"anyOf": [{}]}, SPACED) is None


def test_the_rest_keeps_the_total_and_knows_where_it_stood() -> None:
    plan = plan_tables(INVOICE, SPACED)
    assert plan is not None
    assert "line_items" not in plan.rest["properties"] and "line_items" not in plan.rest["required"]
    assert plan.rest_text.endswith("5 June 2026\n\nPage 2 of 2\nTotal: 71.00 EUR")


def test_a_row_without_a_value_may_only_have_null() -> None:
    fields = {"name": {"type": "string"}, "hours": {"type": ["integer", "null"]}, "role": {"type": "string"}}
    item = {"type": "object", "properties": fields, "required": ["name", "hours"]}
    schema = {"type": "object", "properties": {"people": {"type": "array", "items": {"$ref": "#/$defs/person"}}}}
    plan = plan_tables(schema | {"$defs": {"person": item}}, "Name | Hours | Role\nAda |  | Dean\nBo | 7 |\n")
    assert plan is not None
    first, second = (plan.make_schema(row)["properties"] for row in plan.rows)
    assert first["hours"] == {"type": "null"} and "role" in first
    assert second == {"name": fields["name"], "hours": fields["hours"]}


async def test_rows_are_read_one_by_one_and_joined_in_order() -> None:
    fields = {"name": {"type": "string"}, "age": {"type": "integer"}}
    item = {"type": "object", "properties": fields, "required": ["name", "age"]}
    schema = {"type": "object", "properties": {"people": {"type": "array", "items": item}}}
    engine = FakeEngine()
    text = "Name | Age\nAda | 36\nAda | 36\n"
    *steps, last = [step async for step in stream_whole(Extractor(engine), schema, text)]
    assert steps[-1] == PartsDone(2, 2) and len(engine.requests) == 2
    assert isinstance(last, ExtractionResult) and last.valid and not last.checks
    assert last.record == {"people": [{"name": "Ada", "age": 36}] * 2}
    places = {f"/people/{n}/{field}" for n in (0, 1) for field in fields}
    assert last.confidence.keys() == last.evidence.keys() == places
    assert [last.evidence[f"/people/{n}/age"].start for n in (0, 1)] == [text.index("36"), text.rindex("36")]


async def test_a_text_that_ends_before_its_cell_is_flagged_until_it_is_corrected() -> None:
    item = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"people": {"type": "array", "items": item}}}
    text = "Name | Age\nAda | 36\nAda, Countess | 36\n"
    *_, last = [step async for step in stream_whole(Extractor(FakeEngine()), schema, text)]
    assert isinstance(last, ExtractionResult)
    flagged = [pointer for pointer, reasons in last.flags.items() if PART_OF_CELL in reasons]
    assert flagged == ["/people/1/name"]
    record = {"people": [{"name": "Ada", "age": 36}, {"name": "Ada, Countess", "age": 36}]}
    assert PART_OF_CELL not in str(make_again(schema, text, last, record).flags)


@needs_model
def test_a_table_comes_out_right_with_every_value_in_its_cell() -> None:
    with LLM(num_threads=1, num_blocks=400) as llm:
        (result,) = extract(llm, INVOICE, [SPACED])
    names = ("description", "quantity", "unit_price")
    rows = [("Desk lamp", 1, 10.5), ("Office chair", 2, 11.5), ("Whiteboard", 3, 12.5)]
    assert result.record == {
        "invoice_number": "MO-377", "vendor": "Morgen Office Supply Ltd", "date": "2026-06-05", "currency": "EUR",
        "total": 71, "line_items": [dict(zip(names, row, strict=True)) for row in rows],
    }  # fmt: skip
    assert list(result.record) == list(INVOICE["properties"]) and result.valid and all(c.holds for c in result.checks)
    for number, (_, quantity, _) in enumerate(rows):
        found = result.evidence[f"/line_items/{number}/quantity"]
        assert SPACED[found.start - 2 : found.end + 4] == f"  {quantity}  1{number}"
    assert all(SPACED[found.start : found.end] == found.quote for found in result.evidence.values())
    assert not any(pointer.startswith("/line_items") for pointer in result.flags)
