"""A record as HTML: the badge, the table of fields with confidence and evidence, and the marked source."""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from app.extraction import Evidence, ExtractionResult, Leaf, describe_added
from app.extraction.flags import LOW_CONFIDENCE
from app.extraction.json_spans import Path
from app.extraction.review import Change
from app.ui.figures import describe_output

# Colours of the bar.
HIGH_CONFIDENCE = LOW_CONFIDENCE
MIDDLE_CONFIDENCE = 0.9
NO_CHANGES: Mapping[str, Change] = {}
MATCH_WORDS = {
    "exact": "verbatim", "normalised": "reformatted", "none": "not in the text",
}  # fmt: skip

EMPTY = (
    '<div class="empty"><p><b>The record appears here.</b></p>'
    "<p>Every value comes with the model's confidence and the place in the text that shows it. "
    "Values can be corrected in place.</p></div>"
)
NO_SOURCE = (
    '<div class="empty"><p>After an extraction the text is shown here with its evidence marked.</p></div>'
)


def render_badge(kind: str, text: str, detail: str = "") -> str:
    """Return a verdict in words and colour; never colour alone."""
    more = f'<span class="detail">{html.escape(detail)}</span>' if detail else ""
    return f'<div class="status-line {kind}" role="status"><span class="badge">{html.escape(text)}</span>{more}</div>'


def render_status(result: ExtractionResult) -> str:
    """Return whether the record may be used, and why not."""
    if result.valid:
        return render_badge("good", "fits the schema", "please check whether the values are right")
    if result.finish_reason == "length":
        return render_badge("cut", "cut off", result.errors[0])
    return render_badge("bad", "not valid", "; ".join(result.errors))


def render_fields(
    leaves: Iterable[Leaf],
    result: ExtractionResult | None,
    changes: Mapping[str, Change] = NO_CHANGES,
    by_hand: frozenset[str] = frozenset(),
    find_page: Callable[[Evidence], int] = lambda evidence: 0,
) -> str:
    """Return the table of values; with a result, also confidence, evidence and controls to edit and store it.

    Args:
        changes: differences from a verified record, by pointer; empty without one.
        by_hand: pointers of values that a person edited.
        find_page: returns the page of the opened PDF that shows a value; 0: none.
    """
    rows = list(leaves)
    if not rows:
        return EMPTY
    body: list[str] = []
    group = ""
    for number, leaf in enumerate(rows):
        parent = leaf.pointer.rpartition("/")[0]
        if parent != group:
            group = parent
            if parent:
                buttons = (
                    "" if result is None or not isinstance(leaf.path[-2], int) else _render_items(parent)
                )
                name = show_path(leaf.path[:-1])
                body.append(f'<tr class="group"><th colspan="3">{name}{buttons}</th></tr>')
        if result is None:
            body.append(_render_growing(number, leaf))
        else:
            evidence = result.evidence.get(leaf.pointer)
            page = 0 if evidence is None else find_page(evidence)
            change, is_by_hand = changes.get(leaf.pointer), leaf.pointer in by_hand
            body.append(_render_row(number, leaf, result, change, is_by_hand, page))
    body += [_render_missing(change) for change in changes.values() if change.kind == "missing"]
    head = (
        '<thead><tr><th scope="col">Field</th><th scope="col">Value</th><th scope="col" title="mean token '
        'probability, relative: it ranks fields, it is not a chance of being right">Confidence</th></tr></thead>'
    )
    table = f"<table>{head}<tbody>{''.join(body)}</tbody></table>"
    return (
        f'<div class="record">{_render_review(rows, result, changes, by_hand) if result else ""}{table}</div>'
    )


def _render_review(
    rows: list[Leaf], result: ExtractionResult, changes: Mapping[str, Change], by_hand: frozenset[str]
) -> str:
    num_flagged = sum(leaf.pointer in result.flags and leaf.pointer not in by_hand for leaf in rows)
    num_others = len(rows) - num_flagged - sum(leaf.pointer in by_hand for leaf in rows)
    counts = [f"{num_flagged} to check"] if num_flagged else []
    counts += [f"{num_others} not looked at"] if num_others else []
    text = ", ".join(counts) or "You typed all values"
    against = ""
    if changes:
        num_same = sum(change.kind == "same" for change in changes.values())
        against = (
            f'<span class="against">{num_same} of {len(changes)} fields as in the record you verified</span>'
        )
    failed = "".join(
        f'<div class="note">{html.escape(check.message)}</div>' for check in result.checks if not check.holds
    )
    return (
        f'<div class="review"><button type="button" data-act="next"{"" if num_flagged else " disabled"} '
        'title="Enter: this value is fine, on to the next · Alt+↓ and Alt+↑: step · Esc: undo">'
        f'{text}</button><button type="button" data-act="keep">Keep as verified</button>{against}</div>{failed}'
    )


def _render_items(pointer: str) -> str:
    """Return the buttons of a list item."""
    place = html.escape(pointer, quote=True)
    return "".join(
        f'<button type="button" class="item" data-items="{action}" data-pointer="{place}" '
        f'aria-label="{word} {place}" title="{word}">{sign}</button>'
        for action, word, sign in (("add", "Add an item after", "+"), ("remove", "Remove the item", "×"))
    )


def _render_growing(number: int, leaf: Leaf) -> str:
    return (
        f'<tr data-field="{number}">{_render_name(leaf)}'
        f'<td class="{_kind_of(leaf)}">{html.escape(_spell(leaf))}</td><td></td></tr>'
    )


def _render_row(
    number: int, leaf: Leaf, result: ExtractionResult, change: Change | None, is_by_hand: bool, page: int
) -> str:
    shown = _spell(leaf)
    evidence, reasons = result.evidence.get(leaf.pointer), result.flags.get(leaf.pointer, ())
    small = []
    if evidence:
        where = MATCH_WORDS.get(evidence.match, evidence.match) + (f", page {page}" if page else "")
        small.append(f'<small class="match {evidence.match}">{where}</small>')
    if change is not None and change.kind in ("changed", "new"):
        before = "not in it" if change.kind == "new" else json.dumps(change.verified, ensure_ascii=False)
        small.append(f'<small class="differs">verified: {html.escape(before)}</small>')
    elif change is not None:
        small.append('<small class="agrees">as verified</small>')
    classes = [
        word
        for word, holds in (("flagged", bool(reasons) and not is_by_hand), ("by-hand", is_by_hand))
        if holds
    ]
    num_lines = min(6, max(1, -(-len(shown) // 34)))
    why = html.escape("; ".join(reasons), quote=True)
    items = _render_items(leaf.pointer) if leaf.path and isinstance(leaf.path[-1], int) else ""
    return (
        f'<tr data-field="{number}" class="{" ".join(classes)}" title="{why}">{_render_name(leaf)}'
        f'<td class="{_kind_of(leaf)}"><div class="cell">{items}<textarea class="value" rows="{num_lines}" '
        f'spellcheck="false" '
        f'data-pointer="{html.escape(leaf.pointer, quote=True)}" aria-label="{show_path(leaf.path)}"'
        f"{' data-paged' * bool(page)}>"
        f"{html.escape(shown)}</textarea>{''.join(small)}</div></td>"
        f"<td>{_render_confidence(result.confidence.get(leaf.pointer), is_by_hand)}</td></tr>"
    )


def _render_missing(change: Change) -> str:
    shown = html.escape(json.dumps(change.verified, ensure_ascii=False))
    return (
        f'<tr class="gone"><th scope="row">{show_path(change.path)}</th><td>no longer there '
        f'<small class="differs">verified: {shown}</small></td><td></td></tr>'
    )


def _render_name(leaf: Leaf) -> str:
    """Return the header cell of a row: the last step of the field's path, indented below another field."""
    indent = ' class="inner"' if len(leaf.path) > 1 else ""
    return f'<th scope="row"{indent}>{show_path(leaf.path[-1:])}</th>'


def _kind_of(leaf: Leaf) -> str:
    return {str: "text", bool: "flag", type(None): "null"}.get(type(leaf.value), "number")


def _spell(leaf: Leaf) -> str:
    return leaf.value if isinstance(leaf.value, str) else json.dumps(leaf.value)


def show_path(path: Path) -> str:
    """Return a value's path as HTML for people; list indices count from one."""
    steps = [str(step + 1) if isinstance(step, int) else step for step in path]
    return html.escape(" › ".join(steps), quote=True)


def _render_confidence(confidence: float | None, is_by_hand: bool) -> str:
    if is_by_hand:
        return '<span class="fixed" title="you typed this value">by hand</span>'
    if confidence is None:
        return '<span class="fixed" title="the schema left no choice">fixed</span>'
    level = (
        "high" if confidence >= HIGH_CONFIDENCE else "middle" if confidence >= MIDDLE_CONFIDENCE else "low"
    )
    return (
        f'<span class="confidence {level}"><i style="width:{confidence:.0%}"></i></span>'
        f'<span class="percent">{confidence:.0%}</span>'
    )


def render_source(rows: Iterable[Leaf], evidence: Mapping[str, Evidence], text: str) -> str:
    """Return the source with the evidence of every field marked, by the row number of the field."""
    leaves = list(rows)
    marks = [
        (found.start, found.end, number)
        for number, leaf in enumerate(leaves)
        if (found := evidence.get(leaf.pointer)) is not None and found.match != "none"
    ]
    # Split the text at every start and end of a mark, so that each piece lists all its fields.
    cuts = sorted({0, len(text), *(cut for start, end, _ in marks for cut in (start, end))})
    pieces: list[str] = []
    for start, end in itertools.pairwise(cuts):
        numbers = [number for first, last, number in marks if first <= start and end <= last]
        piece = html.escape(text[start:end])
        if numbers:
            names = ", ".join(show_path(leaves[number].path) for number in numbers)
            fields = " ".join(map(str, numbers))
            piece = f'<mark data-field="{fields}" title="{names}">{piece}</mark>'
        pieces.append(piece)
    return f'<div class="source"><pre tabindex="0" aria-label="Text with its evidence">{"".join(pieces)}</pre></div>'


def render_figures(result: ExtractionResult) -> str:
    """Return the last line: speed, backend, added limits, and notes."""
    parts = [describe_output(result.output)] if result.output else []
    added = describe_added(result.bounds)
    if added:
        parts.append("added limits: " + ", ".join(added))
    notes = "".join(f'<div class="note">{html.escape(note)}</div>' for note in result.notes)
    return f'<div class="figures-line">{html.escape(" · ".join(parts))}</div>{notes}'


def render_table(record: Any) -> str:
    """Return the tables of a record as HTML."""
    singles, lists = _split(record, ())
    parts = []
    if singles:
        heads = "".join(f'<th scope="col">{show_path(path) or "value"}</th>' for path, _ in singles)
        cells = "".join(f"<td>{_cell(value)}</td>" for _, value in singles)
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>")
    for path, items in lists:
        parts.append(f"<h2>{show_path(path) or 'items'}</h2>{_render_list(items)}")
    return f'<div class="tables" tabindex="0">{"".join(parts)}</div>' if parts else ""


def _split(value: Any, path: Path) -> tuple[list[tuple[Path, Any]], list[tuple[Path, list[dict[str, Any]]]]]:
    """Split single values from lists of objects, each with its path."""
    if isinstance(value, dict):
        singles: list[tuple[Path, Any]] = []
        lists: list[tuple[Path, list[dict[str, Any]]]] = []
        for name, inner in value.items():
            more, others = _split(inner, (*path, name))
            singles += more
            lists += others
        return singles, lists
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [], [(path, value)]
    return [(path, value)], []


def _render_list(items: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for item in items for name in item))
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(item.get(name))}</td>" for name in columns) + "</tr>" for item in items
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
