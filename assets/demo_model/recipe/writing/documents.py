"""Puts drafts into words: forms, tables, messages and prose, with noise around the values."""

import re
from dataclasses import dataclass
from random import Random

from .drafts import Draft, Record, say
from .kinds import KINDS, NULLABLE
from .phrases import SLOT, capitalize, chance, compose, expand, fill_slots, make_sentence
from .tables import read_sections

Rows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the record that a reader would take from it."""

    kind: str
    text: str
    record: Record


def put_case(labels: list[str], rng: Random) -> list[str]:
    """The labels in capitals, in small letters or with capitals ahead, all in one way."""
    case = rng.random()
    if case < 0.2:
        return [label.upper() for label in labels]
    if case < 0.32:
        return labels
    return [label.title() if case < 0.42 else capitalize(label) for label in labels]


def layout_form(rows: Rows, rng: Random, shuffle: bool = True) -> str:
    """Labelled values in one of a dozen layouts."""
    rows = list(rows)
    if shuffle and chance(rng, 0.6):
        rng.shuffle(rows)
    labels = put_case([label for label, _ in rows], rng)
    rows = [(label, text) for label, (_, text) in zip(labels, rows, strict=True)]
    inline = rng.choice(
        ["{l}: {v}"] * 6
        + ["- {l}: {v}", "{l} - {v}", "| {l} | {v} |", "{l} = {v}", "{l}\n{v}", "**{l}:** {v}"]
    )
    inline = (
        inline
        if chance(rng, 0.75)
        else rng.choice(
            [
                "{l}:\t{v}",
                "{l} | {v}",
                "{l}:{v}",
                "{l}\n{v}\n",
                "{l} : {v}",
                "* {l}: {v}",
                "[{l}] {v}",
                "{l};{v}",
            ]
        )
    )
    if chance(rng, 0.09):
        return "; ".join(f"{label}: {text}" for label, text in rows) + rng.choice([".", ""])
    if chance(rng, 0.05):
        return ", ".join(f"{label} {text}" for label, text in rows)
    return "\n".join(inline.replace("{l}", label).replace("{v}", text) for label, text in rows).strip()


def layout_table(rows: Rows, rng: Random) -> str:
    """A head line with the labels and a line with the values, now and then closed by a note."""
    labels, texts = put_case([label for label, _ in rows], rng), [text for _, text in rows]
    joint = _choose_joint([" | ", " | ", "|", ";", "; ", ", ", "\t", "   ", " / "], texts, rng)
    lines = [joint.join(labels), joint.join(texts)]
    if joint == " | " and chance(rng, 0.4):
        lines = [f"| {line} |" for line in lines]
        lines.insert(1, "|" + "---|" * len(rows))
    return "\n".join(lines) + (f"\n{make_sentence(rng)}" if chance(rng, 0.3) else "")


def _choose_joint(joints: list[str], texts: list[str], rng: Random) -> str:
    """One that stands in none of the texts; a line end always does not."""
    return rng.choice([joint for joint in joints if not any(joint in text for text in texts)] or ["\n"])


def layout_line(rows: Rows, rng: Random) -> str:
    """All labels and values in one line or list, each pair in the same way."""
    labels, texts = put_case([label for label, _ in rows], rng), [text for _, text in rows]
    frame = rng.choice(read_sections("labels")["pairs"])
    joint = _choose_joint([", ", ", ", "; ", ". ", " · ", "\n", " and "], texts, rng)
    pairs = (
        fill_slots(frame, {"label": label, "text": text}) for label, text in zip(labels, texts, strict=True)
    )
    return joint.join(pairs) + rng.choice([".", ""])


def write_form(draft: Draft, rng: Random) -> str:
    """A form of the kind: its labels come from the `[form]` section of the kind's table."""
    rows: Rows = []
    for line in read_sections(draft.kind)["form"]:
        slot, labels = line.split(": ", 1)
        optional, slot = slot.endswith("?"), slot.removesuffix("?")
        label, known = expand(labels, rng), slot in draft.slots
        nullable = slot in draft.record and (slot in NULLABLE.get(draft.kind, ()) or not draft.record[slot])
        if known and (not optional or chance(rng, 0.9 if slot in draft.record else 0.2)):
            listed = draft.slots.get(f"{slot}_lines")
            rows.append((label, "\n" + listed if listed and chance(rng, 0.25) else draft.slots[slot]))
        elif nullable and chance(rng, 0.4):
            rows.append((label, say("absent", rng)))
    text = layout_form(rows, rng)
    if draft.kind == "invoice":
        text = _add_lines(text, draft, rng)
    return text


def _add_lines(text: str, draft: Draft, rng: Random) -> str:
    """Invoice lines and the total below the head of a form."""
    head = expand("{Items:|Lines:||Description Qty Price|Positions:|For:|Details|---}", rng)
    total = expand("{Total|TOTAL|Amount due|Grand total|Total due|To pay|Sum}{:|} <total>", rng, draft.slots)
    return f"{text}\n{head}\n{draft.slots['rows']}\n{total}"


def write_prose(draft: Draft, rng: Random) -> str:
    """A whole document from a template whose slots are all known."""
    templates = read_sections(draft.kind)["documents"]
    while True:
        template = rng.choice(templates)
        reading = _choose_reading(template, draft, rng)
        if reading is not None:
            return compose(reading, rng, draft.slots)


def _choose_reading(template: str, draft: Draft, rng: Random) -> str | None:
    for _ in range(6):
        reading = expand(template, rng)
        if all(name in draft.slots for name in SLOT.findall(reading)):
            return reading
    return None


def settle(draft: Draft, text: str) -> Record:
    """The record that the text really supports: a nullable value that was not written is null."""
    record = dict(draft.record)
    for name in NULLABLE.get(draft.kind, ()):
        if record[name] not in text or name not in draft.slots:
            record[name] = None
    return record


def write_document(kind: str, rng: Random) -> Document:
    """A fresh document of one of the eight kinds."""
    while True:
        draft = KINDS[kind](rng)
        text = write_form(draft, rng) if chance(rng, 0.2) else write_prose(draft, rng)
        if chance(rng, 0.12):
            text = f"{make_sentence(rng)}{rng.choice([' ', chr(10)])}{text}"
        if chance(rng, 0.12):
            text = f"{text}{rng.choice([' ', chr(10), chr(10) * 2])}{make_sentence(rng)}"
        record = settle(draft, text)
        if not missing_values(record, text):
            return Document(kind, text, record)


COPIED = re.compile(
    "name|email|phone|company|title|vendor|number|location|organizer|position|product|order_id|carrier|recipient|destination"
)


def missing_values(record: Record, text: str) -> list[str]:
    """Names of copied fields whose value is not literally in the text."""
    missing = [
        name
        for name, value in record.items()
        if isinstance(value, str) and COPIED.fullmatch(_tail(name)) and value not in text
    ]
    lists = [(name, item) for name, value in record.items() if isinstance(value, list) for item in value]
    missing += [
        name for name, item in lists if (item if isinstance(item, str) else item["description"]) not in text
    ]
    return missing


def _tail(name: str) -> str:
    return name if COPIED.fullmatch(name) else name.rsplit("_", 1)[-1]
