"""Lists that a text gives as a table: its columns are matched to the fields of an item, and each row is read alone.

table ──heads──▶ columns by field ──rows──▶ "Description: Desk lamp; Quantity: 2" ──Extractor──▶ one item
the text without the rows and the schema without the list ──Extractor──▶ the other fields
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.extraction.flags import PARTIAL, name_partial
from app.extraction.grounding import NO_EVIDENCE, Evidence, find_evidence
from app.extraction.json_spans import Leaf
from app.extraction.pointers import escape_pointer
from app.extraction.prompt import Schema
from app.extraction.result import ExtractionResult
from app.extraction.schema_places import list_kinds, list_places
from app.extraction.table_rows import Span, TableRow, find_rows
from app.extraction.verbatim import is_free_at

MAX_ROWS, MAX_CHARS = 2000, 1_000_000
# A reference to a place that is not in both parts of a divided schema.
REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)|"\$(?:dynamicRef|anchor)":')
# Keywords of a record's schema that still hold without one of its properties.
DIVISIBLE = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "type", "properties", "required",
    "additionalProperties", "x-checks",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TablePlan:
    """A text divided into the rows of its tables and the rest.

    Attributes:
        items: the schema of an item by the name of its list.
        rest: the schema of the other fields.
        kept: the lines without the rows and heads.
    """

    rows: tuple[TableRow, ...]
    items: Mapping[str, Schema]
    rest: Schema
    text: str
    kept: tuple[Span, ...]

    @property
    def rest_text(self) -> str:
        return "".join(self.text[start:end] for start, end in self.kept)

    def make_schema(self, row: TableRow) -> Schema:
        """Return the schema of a row's item: what the row lacks is left out, or null where the schema allows it."""
        item = self.items[row.name]
        needed = item.get("required", ())
        properties = {
            name: place for name, place in item["properties"].items() if name not in row.missing or name in needed
        }
        for name in row.missing & properties.keys():
            if "null" in list_kinds(item, f"/{escape_pointer(name)}"):
                properties[name] = {"type": "null"}
        return item | {"properties": properties}

    def place_rest(self, result: ExtractionResult, schema: Schema) -> ExtractionResult:
        """Return the record of the other fields, with empty lists for the items and offsets in the whole text."""
        starts = [0]
        for start, end in self.kept:
            starts.append(starts[-1] + end - start)

        def move(offset: int) -> int:
            number = max(bisect_right(starts, offset, hi=len(self.kept)) - 1, 0)
            return self.kept[number][0] + offset - starts[number]

        def place(found: Evidence) -> Evidence:
            if found.match == "none":
                return found
            start, end = move(found.start), move(found.end - 1) + 1
            return replace(found, start=start, end=end, quote=self.text[start:end])

        evidence = {pointer: place(found) for pointer, found in result.evidence.items()}
        record = result.record
        if isinstance(record, dict):
            filled = record | {name: [] for name in self.items}
            record = {name: filled[name] for name in [*schema["properties"], *filled] if name in filled}
        return replace(result, record=record, evidence=evidence)

    def place_row(self, row: TableRow, result: ExtractionResult) -> ExtractionResult:
        """Return an item as a record with a list of one, and with offsets in its line."""
        prefix = f"/{escape_pointer(row.name)}/0"
        leaves = tuple(
            replace(leaf, pointer=f"{prefix}{leaf.pointer}", path=(row.name, 0, *leaf.path)) for leaf in result.leaves
        )
        evidence = {}
        for before, leaf in zip(result.leaves, leaves, strict=True):
            if before.pointer in result.evidence:
                evidence[leaf.pointer] = self._find_evidence(row, before)
        return replace(
            result, record=None if result.record is None else {row.name: [result.record]}, leaves=leaves,
            evidence=evidence, confidence={f"{prefix}{place}": sure for place, sure in result.confidence.items()},
        )

    def list_partial(self, schema: Schema, items: Sequence[ExtractionResult]) -> tuple[str, ...]:
        """Return a note for each list with texts that end before their cells do, or begin behind their start.

        Args:
            items: the results of `place_row`, in order.
        """
        found: dict[str, list[str]] = {}
        numbers: Counter[str] = Counter()
        for row, result in zip(self.rows, items, strict=True):
            pointer = f"/{escape_pointer(row.name)}"
            for leaf in result.leaves:
                place, (start, end) = result.evidence.get(leaf.pointer), row.cells.get(str(leaf.path[-1]), (0, 0))
                is_part = place is not None and 0 < place.end - place.start < end - start
                if is_part and isinstance(leaf.value, str) and is_free_at(schema, leaf.pointer):
                    at = f"{pointer}/{numbers[row.name]}/{escape_pointer(str(leaf.path[-1]))}"
                    found.setdefault(pointer, []).append(name_partial(at, leaf.value))
            numbers[row.name] += 1
        return tuple(f"{pointer} {PARTIAL}{', '.join(places)}" for pointer, places in found.items())

    def _find_evidence(self, row: TableRow, leaf: Leaf) -> Evidence:
        """Return where the field's own cell shows the value; without a cell, where the line does."""
        start, end = row.cells.get(str(leaf.path[0]) if leaf.path else "", (row.start, row.end))
        found = find_evidence([leaf], self.text[start:end]).get(leaf.pointer, NO_EVIDENCE)
        shift = start - row.start
        return found if found.match == "none" else replace(found, start=found.start + shift, end=found.end + shift)


def plan_tables(schema: Schema, text: str) -> TablePlan | None:
    """Divide a text with a table whose heads name the fields of a list; None where it has none."""
    properties = schema.get("properties")
    if len(text) > MAX_CHARS or not isinstance(properties, dict) or not DIVISIBLE.issuperset(schema):
        return None
    if REFERENCE.search(json.dumps(schema)):
        return None
    lists = {name: item for name in properties if (item := _find_item(schema, name)) is not None}
    rows, removed = find_rows(schema, lists, text) if lists else ([], [])
    names = dict.fromkeys(row.name for row in rows)
    rest = {name: place for name, place in properties.items() if name not in names}
    if not rows or len(rows) > MAX_ROWS or (len(rows) == 1 and not rest):
        return None
    ends = [0, *(offset for span in removed for offset in span), len(text)]
    kept = tuple((start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end)
    required = [name for name in schema.get("required", ()) if name in rest]
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    without = {key: value for key, value in schema.items() if key != "x-checks"}
    return TablePlan(
        tuple(rows), {name: {**shared, **lists[name]} for name in names},
        {**without, "properties": rest, "required": required} if rest else {}, text, kept,
    )


def _find_item(schema: Schema, name: str) -> Schema | None:
    """Return the schema of the list's items if they are objects of one form."""
    pointer = f"/{escape_pointer(name)}"
    if "array" not in list_kinds(schema, pointer):
        return None
    forms = [place for place in list_places(schema, f"{pointer}/0") if isinstance(place.get("properties"), dict)]
    return forms[0] if len(forms) == 1 else None
