"""One field over many rows: how many rows ask a person to check it, and its values beside their places in the texts."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.extraction.pointers import escape_pointer, split_pointer

NUM_NAMED = 4  # fields that the line above the table names
AROUND = 60  # characters of the text on each side of a value


def has_record(record: Mapping[str, Any]) -> bool:
    return record["record"] is not None


def find_field(record: Any, pointer: str) -> str:
    """Return a pointer with `*` in place of the numbers of items, so that it names the same field in every row."""
    field = ""
    for step in split_pointer(pointer):
        is_item = isinstance(record, list)
        field += "/*" if is_item else f"/{escape_pointer(step)}"
        record = record[int(step)] if is_item else record[step]
    return field


def list_asking(record: Mapping[str, Any], field: str) -> list[str]:
    """Return the pointers of the values of a field that a person should check in one row."""
    flags = record["flags"] if has_record(record) else ()
    return [pointer for pointer in flags if find_field(record["record"], pointer) == field]


def count_fields(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return the fields that ask in several rows, with the number of those rows, the most first."""
    rows = ({find_field(each["record"], pointer) for pointer in each["flags"]} for each in records if has_record(each))
    counts = Counter(field for row in rows for field in sorted(row))
    return [(field, count) for field, count in counts.most_common() if count > 1]


def name_field(field: str) -> str:
    """Return what people call a field: the last name of its pointer."""
    return next((step for step in reversed(split_pointer(field)) if step != "*"), "the value")


def render_fields(counts: list[tuple[str, int]], num_rows: int) -> str:
    """Return the line that says which fields ask most often; each opens its values side by side."""
    buttons: list[str] = []
    for field, count in counts[:NUM_NAMED]:
        pointer, of_all = html.escape(field, quote=True), "" if buttons else f" of {num_rows:,}"
        buttons.append(
            f'<button type="button" data-field="{pointer}" title="{pointer}: look at it in these rows side by side">'
            f"<b>{html.escape(name_field(field))}</b> asks in {count:,}{of_all} rows</button>"
        )
    return f'<p class="ask-line">{" ".join(buttons)}</p>' if buttons else ""


def render_undo(records: Mapping[int, Mapping[str, Any]], confirmed: Mapping[int, Sequence[str]]) -> str:
    """Return the line that takes back the approval of a field in many rows; "" without one."""
    if not confirmed:
        return ""
    index, pointers = next(iter(confirmed.items()))
    name = html.escape(name_field(find_field(records[index]["record"], pointers[0])))
    count = f"{len(confirmed):,} row{'s' if len(confirmed) != 1 else ''}"
    undo = '<button type="button" data-act="undo">Undo</button>'
    return f'<p class="ask-line" role="status"><b>{name}</b> is approved in {count}. {undo}</p>'


def render_field(field: str, rows: Mapping[int, Mapping[str, Any]], cuts: Mapping[int, Mapping[str, str]]) -> str:
    """Return the values of a field in the rows where it asks, each with its place in the text.

    Args:
        rows: their records, by index.
        cuts: the places in the text as HTML, by index and pointer.
    """
    name = html.escape(name_field(field))
    body = ""
    for index, record in rows.items():
        head = (
            f'<td>{index + 1}</td><th scope="row"><button type="button" class="open" title="Review this row">'
            f'{html.escape(record["source"])}</button></th>'
        )
        for pointer in list_asking(record, field):
            why = html.escape("; ".join(record["flags"][pointer]))
            value = html.escape(_read_value(record["record"], pointer))
            cut = cuts.get(index, {}).get(pointer, "–")
            body += (
                f'<tr data-row="{index}" tabindex="-1">{head}<td class="flagged"><bdi>{value}</bdi></td>'
                f"<td>{cut}</td><td>{why}</td></tr>"
            )
    count, pointer = f"{len(rows):,} row{'s' if len(rows) != 1 else ''}", html.escape(field, quote=True)
    return (
        f'<p class="ask-line"><b>{name}</b> asks in {count}. '
        f'<button type="button" class="main" data-act="confirm" data-of="{pointer}">'
        f"Approve {name} in all {count} shown</button> "
        '<button type="button" data-field="">Show all rows</button></p>'
        '<div class="batch-table" tabindex="0"><table><thead><tr><th scope="col">#</th><th scope="col">source</th>'
        f'<th scope="col">{name}</th><th scope="col">in the text</th><th scope="col">why it asks</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def cut_text(text: str, evidence: Mapping[str, Any] | None) -> str:
    """Return the place of a value in its text as HTML, with the words around it; a dash without a place."""
    if evidence is None or evidence["match"] == "none":
        return "–"
    start, end = evidence["start"], evidence["end"]
    before, after = text[max(start - AROUND, 0) : start], text[end : end + AROUND]
    head, tail = "…" if start > AROUND else "", "…" if end + AROUND < len(text) else ""
    return f"{head}{html.escape(before)}<mark>{html.escape(text[start:end])}</mark>{html.escape(after)}{tail}"


def _read_value(record: Any, pointer: str) -> str:
    for step in split_pointer(pointer):
        record = record[int(step)] if isinstance(record, list) else record[step]
    return record if isinstance(record, str) else "" if record is None else f"{record}"
