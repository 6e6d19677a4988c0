"""A record as HTML: the badge, the table of fields with confidence and evidence, and the marked source."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable

from app.extraction import Evidence, ExtractionResult, Leaf
from app.ui.conversation import describe_output
from app.ui.explain import Explanation

# The style sheet links rows and marks of the same number on hover for that many fields.
NUM_LINKED = 48
MATCH_WORDS = {"exact": "verbatim", "normalised": "reformatted", "none": "not in the text"}

EMPTY = (
    '<div class="empty"><p>The record appears here.</p>'
    "<p>Every value comes with the model's confidence and the place in the text that shows it.</p></div>"
)


def render_badge(kind: str, text: str, detail: str = "") -> str:
    """One verdict in words and colour; never colour alone."""
    more = f'<span class="detail">{html.escape(detail)}</span>' if detail else ""
    return f'<div class="verdict {kind}"><span class="badge">{html.escape(text)}</span>{more}</div>'


def render_verdict(result: ExtractionResult) -> str:
    """Whether the record may be used, and why not."""
    if result.valid:
        return render_badge("good", "schema-valid", "checked by an independent validator")
    if result.finish_reason == "length":
        return render_badge("cut", "cut off", result.errors[0])
    return render_badge("bad", "not valid", "; ".join(result.errors))


def render_error(explanation: Explanation) -> str:
    """An error where the result or the schema would stand."""
    parts = (html.escape(part) for part in (explanation.what, explanation.why, explanation.next_step))
    what, why, next_step = parts
    return f'<div class="problem" role="alert"><b>{what}</b> <span>{why}</span> <em>{next_step}</em></div>'


def render_fields(leaves: Iterable[Leaf], result: ExtractionResult | None, text: str) -> str:
    """The table of values; with a result also confidence, evidence and the source with its marks."""
    rows = list(leaves)
    if not rows:
        return EMPTY
    confidence = result.confidence if result else {}
    evidence = result.evidence if result else {}
    body: list[str] = []
    group = ""
    for number, leaf in enumerate(rows):
        parent = leaf.pointer.rpartition("/")[0]
        if parent != group:
            group = parent
            body += [f'<tr class="group"><th colspan="3">{show_pointer(parent)}</th></tr>'] if parent else []
        found = (confidence.get(leaf.pointer), evidence.get(leaf.pointer))
        body.append(_render_row(number, leaf, *found, is_final=result is not None))
    table = (
        '<table><thead><tr><th>Field</th><th>Value</th><th title="mean token probability, relative: it ranks fields, '
        f'it is not a chance of being right">Confidence</th></tr></thead><tbody>{"".join(body)}</tbody></table>'
    )
    source = _render_source(rows, evidence, text) if result else ""
    return f'<div class="record">{table}{source}</div>'


def _render_row(
    number: int, leaf: Leaf, confidence: float | None, evidence: Evidence | None, is_final: bool
) -> str:
    parent, _, step = leaf.pointer.rpartition("/")
    kind = {str: "text", bool: "flag", type(None): "null"}.get(type(leaf.value), "number")
    shown = leaf.value if isinstance(leaf.value, str) else json.dumps(leaf.value)
    match = (
        f' <small class="match {evidence.match}">{MATCH_WORDS[evidence.match]}</small>' if evidence else ""
    )
    inner = ' class="inner"' if parent else ""
    return (
        f'<tr data-field="{number % NUM_LINKED}"><th{inner}>{show_pointer("/" + step)}</th>'
        f'<td class="{kind}">{html.escape(shown)}{match}</td>'
        f"<td>{_render_confidence(confidence, is_final)}</td></tr>"
    )


def show_pointer(pointer: str) -> str:
    """A JSON pointer for people, as HTML; they count from one."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    return html.escape(
        " › ".join(str(int(step) + 1) if step.isdigit() else step for step in steps), quote=True
    )


def _render_confidence(confidence: float | None, is_final: bool) -> str:
    if confidence is None:
        return '<span class="fixed" title="the schema left no choice">fixed</span>' if is_final else ""
    level = "high" if confidence >= 0.9 else "middle" if confidence >= 0.6 else "low"
    return (
        f'<span class="confidence {level}"><i style="width:{confidence:.0%}"></i></span>'
        f'<span class="percent">{confidence:.0%}</span>'
    )


def _render_source(rows: list[Leaf], evidence: dict[str, Evidence], text: str) -> str:
    marks = [
        (found.start, found.end, number)
        for number, leaf in enumerate(rows)
        if (found := evidence.get(leaf.pointer)) is not None and found.match != "none"
    ]
    pieces: list[str] = []
    position = 0
    for start, end, number in sorted(marks, key=lambda mark: (mark[0], -mark[1])):
        # Marks cannot overlap in HTML as flat as this; the one that starts first stays.
        if start < position:
            continue
        name = show_pointer(rows[number].pointer)
        pieces.append(html.escape(text[position:start]))
        pieces.append(
            f'<mark data-field="{number % NUM_LINKED}" title="{name}">{html.escape(text[start:end])}</mark>'
        )
        position = end
    pieces.append(html.escape(text[position:]))
    return f'<div class="source"><h4>Evidence in the text</h4><pre>{"".join(pieces)}</pre></div>'


def render_figures(result: ExtractionResult) -> str:
    """The quiet last line: speed, backend, limits that were added, and what to know about them."""
    parts = [describe_output(result.output)] if result.output else []
    if result.bounds.added:
        values = {bound.keyword: bound.value for bound in result.bounds.added}
        limits = []
        if "maxLength" in values:
            limits.append(f"{values['maxLength']} characters a text")
        if "maxItems" in values:
            limits.append(f"{values['maxItems']} items a list")
        parts.append("added limits: " + ", ".join(limits))
    notes = "".join(f'<div class="note">{html.escape(note)}</div>' for note in result.notes)
    return f'<div class="figures-line">{html.escape(" · ".join(parts))}</div>{notes}'
