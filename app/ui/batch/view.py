"""HTML of a batch: rows before it, progress during it, records after it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from app.extraction.flags import ENDED
from app.extraction.pointers import escape_pointer
from app.extraction.sources import Table
from app.ui.batch.fields import count_fields, render_field, render_fields, render_undo
from app.ui.batch.run import NUM_SHOWN, BatchRun
from app.ui.extract.record_view import STOPPED

NUM_PREVIEWED = 5
MAX_CELL_CHARS = 160

STALE_NOTE = (
    '<p class="stale-note" role="status">The column or the schema has changed since these records were read. '
    "Run again, or undo the change.</p>"
)
EMPTY_BATCH = (
    '<div class="empty"><p><b>Many texts, one schema.</b></p>'
    "<p>Open a CSV, Excel or JSONL file, or several texts and PDFs, zipped or not. Every row becomes a record:</p>"
    '<div class="batch-table"><table><thead><tr><th scope="col">text of a row</th><th scope="col">vendor</th>'
    '<th scope="col">date</th><th scope="col">total</th></tr></thead><tbody>'
    "<tr><td>INV-7 of 2026-03-02, Northwind Paper, 79.50 EUR</td><td>Northwind Paper</td><td>2026-03-02</td>"
    "<td>79.5</td></tr><tr><td>Blue Harbour Foods, 3 March: 412.00 EUR</td><td>Blue Harbour Foods</td>"
    '<td class="flagged" title="date: the year is not in the text">2026-03-03</td><td>412.0</td></tr></tbody></table>'
    "</div><p>A marked value asks you to check it: this year is not in the text. Click a row to correct it beside its "
    "text,<br>approve what is right, and download all of it as CSV, Excel, JSONL or Parquet.</p></div>"
)


def render_preview(table: Table, column: str | None, batch_id: str) -> str:
    """Return the first rows, the chosen column first, with the id by which a later page finds them."""
    if not table.rows:
        return EMPTY_BATCH
    columns = sorted(table.columns, key=lambda name: name != column)
    heads = "".join(
        f'<th scope="col"{" class=chosen" if name == column else ""}>{html.escape(name)}</th>' for name in columns
    )
    body = ""
    for row in table.rows[:NUM_PREVIEWED]:
        if row.error is not None:
            body += f'<tr class="failed"><td colspan="{max(len(columns), 1)}">{html.escape(row.error)}</td></tr>'
        else:
            cells = "".join(f"<td>{_clip(row.cells.get(name, ''))}</td>" for name in columns)
            body += f"<tr>{cells}</tr>"
    num_bad = sum(row.error is not None for row in table.rows)
    num_read = len(table.rows) - num_bad
    counts = [f"{num_read:,} row{'s' if num_read != 1 else ''}"] if num_read else []
    counts += [f"{num_bad:,} cannot be read"] if num_bad else []
    count = ", ".join(counts)
    more = f"{count}; the first {NUM_PREVIEWED} are shown" if len(table.rows) > NUM_PREVIEWED else count
    return (
        f'<div class="batch-table" data-run="{batch_id}"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        f'<p class="figures-line">{more}.</p>'
    )


def render_note(text: str) -> str:
    """Return a line in place of the progress."""
    return f'<p class="batch-figures" role="status">{html.escape(text)}</p>'


def render_progress(run: BatchRun) -> str:
    """Return the progress as a bar and one line of figures."""
    records = run.records.values()
    num_done, num_rows, seconds = len(records), run.num_rows, run.seconds
    num_ended, num_failed = sum(map(_is_ended, records)), sum("error" in each for each in records)
    num_valid = sum(each["valid"] and not _is_ended(each) for each in records)
    parts = [f"<b>{num_done:,}</b> of {num_rows:,} rows", f"{num_valid:,} valid", *_count_reviewed(run)]
    if num_failed:
        parts.append(f'<span class="bad">{num_failed:,} failed</span>')
    if num_ended:
        parts.append(f'<span class="bad">{num_ended:,} {STOPPED}</span>')
    if not_valid := num_done - num_valid - num_failed - num_ended:
        parts.append(f"{not_valid:,} not valid")
    if num_done:
        parts.append(f"{num_done / seconds:,.1f} rows/s")
    if run.cached_share is not None:
        parts.append(f"{run.cached_share:.0%} of the prompts from the prefix cache")
    if run.is_running:
        state, left = "running", seconds / num_done * (num_rows - num_done) if num_done else None
        parts.append("starting" if left is None else f"about {format_duration(left)} left")
    elif run.job.body["status"] == "completed":
        state = "done"
        parts.append(f"done in {format_duration(seconds)}")
    else:
        state, why = "stopped", run.job.body.get("error")
        parts.append("stopped; what is done is kept" + html.escape(f": {why}" if why else ""))
    parts.append(f"read by {html.escape(run.model)}")
    share = num_done / num_rows if num_rows else 1.0
    return (
        f'<div class="progress {state}" role="progressbar" aria-label="Batch" aria-valuemin="0" '
        f'aria-valuemax="{num_rows}" aria-valuenow="{num_done}"><i style="width:{share:.1%}"></i></div>'
        f'<p class="batch-figures" role="status">{" · ".join(parts)}</p>'
    )


def _count_reviewed(run: BatchRun) -> list[str]:
    num_approved = sum(bool(record.get("approved")) for record in run.records.values())
    num_open = sum(bool(record["flags"]) for record in run.records.values() if record["record"] is not None)
    return [f"{num_open:,} to check"] * bool(num_open) + [f"{num_approved:,} approved"] * bool(num_approved)


def format_duration(seconds: float) -> str:
    """Return seconds, or minutes and hours for long durations."""
    if seconds < 90:
        return f"{seconds:,.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
    minutes = seconds / 60
    return f"{minutes:,.0f} min" if minutes < 90 else f"{minutes / 60:,.1f} h"


def render_records(run: BatchRun) -> str:
    """Return the finished records, one per row, a column per field, with the id by which a later page finds them."""
    set_aside = " inert" if run.is_stale and not run.is_running else ""
    return f'<div data-run="{run.job.id}"{set_aside}>{_render_table(run)}</div>'


def _render_table(run: BatchRun) -> str:
    done = run.list_rows()
    if not done:
        return EMPTY_BATCH
    shown = done[:NUM_SHOWN]
    undo = render_undo(run.records, run.confirmed)
    if run.focus:
        return undo + render_field(run.focus, {index: run.records[index] for index in shown}, run.cuts)
    asking = "" if run.is_running else render_fields(count_fields(run.records.values()), len(run.records))
    columns = dict.fromkeys(
        name
        for index in shown
        if isinstance(run.records[index]["record"], dict)
        for name in run.records[index]["record"]
    )
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = "".join(_render_record(index + 1, run.records[index], list(columns)) for index in shown)
    more = f'<p class="figures-line">The first {NUM_SHOWN} of {len(done):,} rows; the downloads have all of them.</p>'
    return (
        f'{undo}{asking}<div class="batch-table" tabindex="0"><table><thead><tr><th scope="col">#</th>'
        '<th scope="col">source</th><th scope="col">state</th><th scope="col">to check</th>'
        f"{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{more if len(done) > NUM_SHOWN else ''}"
    )


def _render_record(number: int, record: dict[str, Any], columns: list[str]) -> str:
    name, opens = html.escape(record["source"]), ""
    if record["record"] is not None:
        name = f'<button type="button" class="open" title="Review this row">{name}</button>'
        opens = f' data-row="{number - 1}" tabindex="-1"'
    head = f'<td>{number}</td><th scope="row">{name}</th>'
    if "error" in record:
        span = max(len(columns), 1)
        return (
            f'<tr class="failed">{head}<td><span class="state bad">failed</span></td>'
            f'<td colspan="{span + 1}">{html.escape(record["error"])}</td></tr>'
        )
    values = record["record"] if isinstance(record["record"], dict) else {}
    cells = "".join(
        f'<td class="{_mark(name, record)}" title="{_describe(name, record)}">'
        f"{_show(values[name]) if name in values else ''}</td>"
        for name in columns
    )
    kind, word = ("plain", "valid") if record["valid"] else ("cut", record["finish_reason"])
    if _is_ended(record):
        kind, word = "cut", STOPPED
    if record.get("approved"):
        kind, word = "good", "approved"
    word = "not valid" if word == "stop" else "cut off" if word == "length" else word
    num_flags = len(record["flags"])
    flags = f'<span class="state cut">{num_flags} to check</span>' if num_flags else "–"
    return f'<tr{opens}>{head}<td><span class="state {kind}">{word}</span></td><td>{flags}</td>{cells}</tr>'


def _is_ended(record: dict[str, Any]) -> bool:
    """Return whether the model repeated itself in a valid record that has not been checked yet."""
    return bool(record["valid"]) and any(ENDED in reasons for reasons in record["flags"].values())


def _mark(name: str, record: dict[str, Any]) -> str:
    """Return the CSS class of a cell: `flagged` if a value in it must be checked, `by-hand` if one was typed."""
    if _list_inside(name, record["flags"]):
        return "flagged"
    return "by-hand" if _list_inside(name, record.get("corrected", ())) else ""


def _describe(name: str, record: dict[str, Any]) -> str:
    """Return the tooltip of a cell: the reasons to check its values."""
    reasons = dict.fromkeys(why for each in _list_inside(name, record["flags"]) for why in record["flags"][each])
    return html.escape(": ".join(filter(None, [name, "; ".join(reasons)])), quote=True)


def _list_inside(name: str, pointers: Iterable[str]) -> list[str]:
    pointer = f"/{escape_pointer(name)}/"
    return [each for each in pointers if f"{each}/".startswith(pointer)]


def _spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        first = ", ".join(_spell(inner) for inner in value[0].values())
        count = f"{len(value)} item{'s' if len(value) > 1 else ''}"
        return f"<b>{count}:</b> <bdi>{_clip(first)}</bdi>{' …' if len(value) > 1 else ''}"
    return _clip(_spell(value))


def _clip(text: str) -> str:
    return html.escape(text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…")
