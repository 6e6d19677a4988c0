"""A record as HTML: the badge, its fields and grids with evidence and reasons to check, and the marked source."""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence

from app.extraction import Evidence, ExtractionResult, Leaf, describe_added
from app.extraction.flags import ENDED, LOOPED, NOT_FOUND
from app.extraction.json_spans import Path
from app.extraction.pointers import escape_pointer
from app.extraction.review import Change
from app.ui.extract.shown import FILL_IN, Shown, digest
from app.ui.extract.table_rows import count_rows
from app.ui.figures import describe_output

EMPTY = (
    '<div class="empty"><p><b>The record appears here.</b></p>'
    "<p>Every value lights up its place in the text. Doubtful ones ask to be checked.</p></div>"
)
NO_SOURCE = (
    '<div class="empty"><p><b>Paste a text</b> under Text, or open a file.</p>'
    "<p>After an extraction it is shown here with its evidence marked.</p></div>"
)
STOPPED = "stopped: it repeated itself"
LOOK_FIRST, APPROVE_ANYWAY = "Go to marked, then approve", "Approve, the sum differs"
HELP = "Enter: this value is right, on to the next. Alt and arrow: step. Esc: as before."


def render_badge(kind: str, text: str, detail: str = "", model: str = "") -> str:
    """Return a verdict in words and colour, never colour alone, and the model that read the text."""
    more = f'<span class="detail">{html.escape(detail)}</span>' if detail else ""
    more += f'<span class="detail">Read by {html.escape(model)}</span>' if model else ""
    return f'<div class="status-line {kind}" role="status"><span class="badge">{html.escape(text)}</span>{more}</div>'


def render_status(shown: Shown) -> str:
    """Return whether the record may be used, and why not."""
    return render_badge(*_judge(shown), model=shown.model)


def _judge(shown: Shown) -> tuple[str, str, str]:
    result = shown.result
    if shown.is_approved:
        count, unseen = len(result.leaves), len(shown.unseen)
        if shown.to_check:
            num_open = len(shown.to_check)
            words = f"{num_open} marked value{'s' * (num_open > 1)} not opened, still to check"
            return "cut", "approved", words
        words = f"{unseen} of {count} values not opened: not counted as checked" if unseen else "every value checked"
        return "good", "approved", words
    if shown.to_fill:
        return "cut", FILL_IN, "the row that was added has empty values"
    if not result.valid:
        if result.finish_reason == "length":
            return "cut", "cut off", result.errors[0].removeprefix("cut off: ")
        return "bad", "not valid", "; ".join(result.errors)
    if any(ENDED in shown.reasons[pointer] for pointer in shown.to_check):
        return "cut", STOPPED, "what it wrote before is shown; something may be missing"
    if shown.to_check:
        return "cut", "please check", "valid JSON; the marked values may be wrong"
    return "plain", "valid JSON", "fits the schema; whether it is right, only you can say"


def render_fields(shown: Shown) -> str:
    """Return the values with controls to correct, step through and approve them."""
    view = _View(shown.result.leaves, shown)
    if not view.leaves:
        return EMPTY
    rows = [_render_missing(each, "approved before") for each in shown.changes.values() if each.kind == "missing"]
    if shown.other:
        word = f"only in {shown.other[0]}"
        rows += [_render_missing(each, word) for each in shown.differences.values() if each.kind == "missing"]
    gone = f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    source = html.escape(shown.result.source, quote=True)
    made_of = f'data-text="{digest(shown.text)}" data-schema="{digest(shown.schema)}" data-source="{source}"'
    made_of += f' data-reading="{html.escape(shown.reading, quote=True)}"'
    return f'<div class="record" {made_of}>{_render_review(shown)}{view.render()}{gone}</div>'


def render_growing(leaves: Sequence[Leaf]) -> str:
    """Return the values of a record while it is written."""
    return f'<div class="record">{_View(leaves, None).render()}</div>' if leaves else EMPTY


class _View:
    """The blocks of one record: tables of single values, and a grid for each list. Leaves are numbered in order."""

    def __init__(self, leaves: Sequence[Leaf], shown: Shown | None) -> None:
        self.leaves = leaves
        self.shown = shown
        self.reasons = shown.reasons if shown else {}
        self.changes = shown.changes if shown else {}
        self.differences = shown.differences if shown else {}
        self.moved = shown.moved if shown else {}
        self.unseen = frozenset(shown.unseen) if shown else frozenset()
        self.to_check = frozenset(shown.to_check) if shown else frozenset()

    def render(self) -> str:
        numbered = list(enumerate(self.leaves))
        lists = _find_lists(self.leaves)
        blocks = []
        for path, leaves in itertools.groupby(numbered, key=lambda pair: _find_owner(pair[1].path, lists)):
            group = list(leaves)
            blocks.append(self._render_singles(group) if path is None else self._render_grid(path, group))
        return "".join(blocks)

    def _render_singles(self, group: list[tuple[int, Leaf]]) -> str:
        body: list[str] = []
        above: Path = ()
        for number, leaf in group:
            parent = leaf.path[:-1]
            if parent != above:
                above = parent
                if parent:
                    items = self._render_items(parent) if isinstance(parent[-1], int) else ""
                    body.append(f'<tr class="group"><th colspan="2">{show_path(parent)}{items}</th></tr>')
            inner = ' class="inner"' if parent else ""
            name = f'<th scope="row"{inner}>{show_name(leaf.path[-1:])}</th>'
            value = self._render_value(leaf) + "".join(_render_note(*note) for note in self._list_notes(leaf))
            body.append(f"<tr {self._mark(number, leaf)}>{name}<td>{value}</td></tr>")
        return f"<table><tbody>{''.join(body)}</tbody></table>"

    def _render_grid(self, path: Path, group: list[tuple[int, Leaf]]) -> str:
        """Return one row an item; below it, why its values should be checked."""
        depth = len(path)
        columns = list(dict.fromkeys(leaf.path[depth + 1 :] for _, leaf in group))
        rows = []
        for index, item in itertools.groupby(group, key=lambda pair: pair[1].path[depth]):
            cells = {leaf.path[depth + 1 :]: (number, leaf) for number, leaf in item}
            tds = "".join(
                f"<td {self._mark(*cells[name])}>{self._render_value(cells[name][1])}</td>"
                if name in cells
                else "<td></td>"
                for name in columns
            )
            buttons = f'<td class="items">{self._render_items((*path, index))}</td>' if self.shown else ""
            rows.append(f"<tr><th scope='row'>{int(index) + 1}</th>{tds}{buttons}</tr>")
            # One line for all values of the item with the same reason.
            notes: dict[tuple[str, str, str], list[str]] = {}
            for name, (_, leaf) in cells.items():
                for note in self._list_notes(leaf, is_in_grid=True):
                    notes.setdefault(note, []).append(show_path(name))
            if lines := "".join(_render_note(*note, ", ".join(names)) for note, names in notes.items()):
                rows.append(f'<tr class="value-notes"><td></td><td colspan="{len(columns) + 1}">{lines}</td></tr>')
        heads = "".join(f'<th scope="col">{show_name(name)}</th>' for name in columns)
        end = '<td class="items"></td>' if self.shown else ""
        return (
            f'<section class="list"><h2>{show_path(path) or "items"}{self._count(path, group)}</h2><div class="wide">'
            f'<table class="grid"><thead><tr><td></td>{heads}{end}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
            "</div></section>"
        )

    def _count(self, path: Path, group: list[tuple[int, Leaf]]) -> str:
        num_items = len({leaf.path[len(path)] for _, leaf in group})
        words = f'<small>{num_items} row{"s" if num_items > 1 else ""}</small>'
        if self.shown is None:
            return words
        pointer = "".join(f"/{escape_pointer(str(step))}" for step in path)
        notes = [note for note in self.shown.result.notes if note.startswith(f"{pointer} ")]
        num_rows = count_rows(self.shown.text) if len(group) > num_items else 0
        if num_rows > num_items:
            notes.append(f"the text has a table of {num_rows} rows")
        texts = (html.escape(note.removeprefix(pointer)) for note in notes)
        return words + "".join(f'<small class="check">{each}</small>' for each in texts)

    def _render_value(self, leaf: Leaf) -> str:
        if self.shown is None:
            return f'<span class="growing">{html.escape(spell(leaf))}</span>'
        text = "" if leaf.pointer in self.shown.to_fill else html.escape(spell(leaf))
        num_lines = min(6, max(1, -(-len(text) // 40)))
        place, name = html.escape(leaf.pointer, quote=True), show_path(leaf.path) or "value"
        return (
            f'<textarea class="value" rows="{num_lines}" spellcheck="false" data-key="v:{place}" '
            f'data-pointer="{place}" aria-label="{name}">{text}</textarea>'
        )

    def _mark(self, number: int, leaf: Leaf) -> str:
        words = [{str: "text", bool: "flag", type(None): "null"}.get(type(leaf.value), "number")]
        if self.shown is not None:
            pointer = leaf.pointer
            words += ["flagged"] * (pointer in self.to_check)
            words += ["checked"] * (pointer in self.shown.checked)
            words += ["seen"] * (pointer not in self.unseen)
            words += ["by-hand"] * (pointer in self.shown.by_hand)
        return f'data-field="{number}" class="{" ".join(words)}"'

    def _list_notes(self, leaf: Leaf, is_in_grid: bool = False) -> list[tuple[str, str, str]]:
        """Return kind, text and the button of the notes on a value.

        They say why to check it, who typed it, the value approved before, and what another model read.
        """
        if self.shown is None:
            return []
        pointer = leaf.pointer
        notes: list[tuple[str, str, str]] = []
        is_checked = pointer in self.shown.checked
        if pointer in self.reasons:
            kind, sign = (
                ("check", "") if pointer in self.shown.to_fill
                else ("aside", "checked by you: ") if is_checked
                else ("aside", "approved, not opened: ") if self.shown.is_approved
                else ("check", "Check: ")
            )
            why, use = "; ".join(self.reasons[pointer]), ""
            if pointer in self.moved and kind == "check":
                why = why.replace(NOT_FOUND, f"{self.moved[pointer][0]} in the text")
                use = _render_offer("use", f"Use {self.moved[pointer][1]}", pointer)
            notes.append((kind, sign + why, use))
        if pointer in self.shown.by_hand:
            notes.append(("aside", "typed by you", ""))
        evidence = self.shown.result.evidence.get(pointer)
        page = self.shown.find_page(evidence)
        where = ["written differently in the text"] * (evidence is not None and evidence.match == "normalised")
        where += [f"page {page}"] * bool(page)
        if not is_in_grid and where:
            notes.append(("aside", ", ".join(where), ""))
        change = self.changes.get(pointer)
        if change is not None and change.kind in ("changed", "new"):
            before = "absent" if change.kind == "new" else json.dumps(change.verified, ensure_ascii=False)
            notes.append(("check", f"approved before: {before}", ""))
        difference = self.differences.get(pointer)
        if difference is not None and self.shown.other is not None:
            is_new = difference.kind == "new"
            read = "nothing here" if is_new else json.dumps(difference.verified, ensure_ascii=False)
            take = "" if is_new else _render_offer("take", "Take it", pointer)
            notes.append(("check", f"{self.shown.other[0]} read: {read}", take))
        return notes

    def _render_items(self, path: Path) -> str:
        """Return the buttons of a list item."""
        if self.shown is None:
            return ""
        pointer = "".join(f"/{escape_pointer(str(step))}" for step in path)
        place, name = html.escape(pointer, quote=True), show_path(path)
        return "".join(
            f'<button type="button" class="item" data-act="{action}" data-key="{action}:{place}" '
            f'data-pointer="{place}" '
            f'aria-label="{word} {name}" title="{word} {name}">{sign}</button>'
            for action, word, sign in (("add", "Add an item after", "+"), ("remove", "Remove", "×"))
        )


def _render_note(kind: str, text: str, button: str, names: str = "") -> str:
    lead = f"<b>{names}</b> " if names else ""
    return f'<small class="tell {kind}">{lead}{html.escape(text)}{button}</small>'


def _render_offer(action: str, words: str, pointer: str) -> str:
    place = html.escape(pointer, quote=True)
    name = f'aria-label="{words}: {place}"'
    return f' <button type="button" data-act="{action}" data-pointer="{place}" {name}>{words}</button>'


def _find_lists(leaves: Sequence[Leaf]) -> set[Path]:
    """Return the lists that fit a grid: their items are single values or plain objects."""
    depths: dict[Path, set[int]] = {}
    for leaf in leaves:
        at = next((at for at, step in enumerate(leaf.path) if isinstance(step, int)), None)
        if at is not None:
            depths.setdefault(leaf.path[:at], set()).add(len(leaf.path) - at)
            if any(isinstance(step, int) for step in leaf.path[at + 1 :]):
                depths[leaf.path[:at]].add(99)
    return {path for path, found in depths.items() if max(found) <= 3}


def _find_owner(path: Path, lists: set[Path]) -> Path | None:
    return next((path[:at] for at in range(len(path)) if path[:at] in lists), None)


def _render_review(shown: Shown) -> str:
    text = f"{len(shown.to_check)} to check" if shown.to_check else "No more to check"
    changes = shown.changes.values()
    num_same = sum(change.kind == "same" for change in changes)
    against = f'<span class="against">{num_same} of {len(changes)} fields as approved before</span>' if changes else ""
    word = (
        "Approved" if shown.is_approved
        else "Approve when filled in" if shown.to_fill
        else "Approve when valid" if not shown.result.valid
        else APPROVE_ANYWAY if any(not each.holds and each.kind != "order" for each in shown.result.checks)
        else "Approve"
    )
    can_approve = word in ("Approve", APPROVE_ANYWAY)
    disabled = "" if can_approve else " disabled"
    unseen = f", {len(shown.unseen)} not opened" if shown.unseen and " when " not in word else ""
    undo = _render_undo(shown) if shown.before else ""
    if shown.other and (count := len(shown.differences)):
        against += f'<span class="against">differs from {html.escape(shown.other[0])} in {count} '
        against += f"field{'s' * (count > 1)}</span>"
    is_to_look = can_approve and not set(shown.to_check).isdisjoint(shown.unseen)
    approve = LOOK_FIRST if is_to_look else f"{word}{unseen}"
    return (
        f'<div class="review"><button type="button" data-act="next" data-key="next" title="{HELP}"'
        f'{"" if shown.to_check else " disabled"}>{text}</button>'
        f'<button type="button" class="approve" data-act="approve" data-key="approve" data-word="{word}"{disabled}>'
        f"{approve}</button>{undo}{against}</div>"
    )


def _render_undo(shown: Shown) -> str:
    if shown.before is not None and shown.before.reading == shown.reading:
        return '<button type="button" data-act="bring back">Undo the removal</button>'
    return (
        '<button type="button" data-act="bring back">Undo: bring back your record</button>'
        '<span class="against">Your record of this text, as you corrected it, is kept under Recent</span>'
    )


def _render_missing(change: Change, word: str) -> str:
    value = html.escape(json.dumps(change.verified, ensure_ascii=False))
    return (
        f'<tr class="gone"><th scope="row">{show_path(change.path)}</th><td>not here '
        f'<small class="tell check">{html.escape(word)}: {value}</small></td></tr>'
    )


def spell(leaf: Leaf) -> str:
    """Return a value as it is typed."""
    return leaf.value if isinstance(leaf.value, str) else json.dumps(leaf.value)


def show_path(path: Path) -> str:
    """Return a value's path as HTML for people; list indices count from one."""
    steps = [str(step + 1) if isinstance(step, int) else step for step in path]
    return html.escape(" › ".join(steps), quote=True)


def show_name(path: Path) -> str:
    """Return the heading of a value; a long name may break behind an underscore."""
    return (show_path(path) or "value").replace("_", "_<wbr>")


def render_source(
    rows: Iterable[Leaf], evidence: Mapping[str, Evidence], text: str, to_check: Sequence[str] = ()
) -> str:
    """Return the source with the evidence of every field marked, by the row number of the field.

    Args:
        to_check: pointers of the doubtful values, whose marks differ.
    """
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
            doubt = any(leaves[number].pointer in to_check for number in numbers)
            kind, names = (' class="doubtful"', f"Check: {names}") if doubt else ("", names)
            piece = f'<mark data-field="{fields}"{kind} title="{names}">{piece}</mark>'
        pieces.append(piece)
    # Browsers leave out a line break at the beginning of <pre>.
    return f'<div class="source"><pre tabindex="0" aria-label="Text with its evidence">\n{"".join(pieces)}</pre></div>'


def render_figures(result: ExtractionResult) -> str:
    """Return the last line: speed, backend, added limits, and notes."""
    parts = [describe_output(result.output)] if result.output else []
    if any(LOOPED in note for note in result.notes):
        # A list or a text was ended, though the answer that was generated then is complete.
        parts = [part.removesuffix(" · complete") for part in parts]
    added = describe_added(result.bounds)
    if added:
        parts.append("added limits: " + ", ".join(added))
    notes = "".join(f'<div class="note">{html.escape(note)}</div>' for note in result.notes)
    return f'{notes}<div class="figures-line">{html.escape(" · ".join(parts))}</div>'
