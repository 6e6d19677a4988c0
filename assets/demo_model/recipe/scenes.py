"""Small worlds: records of everyday life (a booking, a match, a flat) whose fields go by several names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from . import goods, moments, values
from .documents import Document
from .drafts import Record, make_distractors
from .invented import Field, boolean_field, write_fields
from .phrases import SLOT, capitalize, chance, compose, expand, join_bullets, join_list
from .schemas import Schema, dress, make_object, to_camel
from .tables import read_worlds, words
from .truths import state_truth

MAKERS: dict[str, Callable[[Random], str]] = {
    "person": values.person,
    "first": values.first_name,
    "company": values.company,
    "club": lambda r: club(r),
    "city": values.city,
    "place": values.place,
    "street": values.street,
    "code": values.code,
    "product": goods.product,
    "title": goods.event_title,
    "word": lambda r: name_thing(r),
    "thing": goods.plain_thing,
    "good": goods.item_name,
    "skill": goods.skill,
    "job": values.job_title,
    "phone": values.phone,
    "ingredient": lambda r: r.choice(words("ingredients")),
    "vehicle": lambda r: r.choice(("car", "bus", "bicycle", "lorry", "tram", "scooter", "van")),
    "flight": lambda r: values.letters(r, 2) + r.choice(["", " "]) + values.digits(r, r.choice([3, 4])),
    "dish": lambda r: expand(
        "{grilled|pickled|smoked|braised|baked|stuffed|cold} {trout|leek|goose|beetroot|mushrooms|cod|pears}"
        " {with|on|in} {dill|rye toast|cider|mustard|lentils|brown butter|salt crust|plum sauce}",
        r,
    ),
    "song": lambda r: expand(
        "{Paper|Winter|Copper|Midnight|Empty|Sailor's|Seven} {Harbour|Letters|Train|Rain|Sister|Roses}"
        "{| Blues| Waltz| Tonight| Again}",
        r,
    ),
    "animal": lambda r: expand(
        "{grey|young|tame|wild|spotted|brown|lame} {heron|badger|goat|newt|lynx|mule|stoat|hare|adder|swan}",
        r,
    ),
    "gate": lambda r: r.choice("ABCDE") + values.digits(r, r.choice([1, 2])),
    "country": lambda r: r.choice(words("countries")),
    "material": lambda r: r.choice(words("materials")),
    "department": lambda r: r.choice(words("job_areas")),
    "task": lambda r: expand(
        "{check|replace|paint|order|label|test|clean|move|count|repair} {all|the|both|two|the old|our}"
        " {pumps|lamps|signs|cables|racks|forms|valves|doors|filters|tanks|keys|shelves}",
        r,
    ),
    "version": lambda r: f"{r.choice(['', 'v'])}{r.randrange(12)}.{r.randrange(20)}.{r.randrange(9)}",
}

LITERAL_SHARE = 0.3  # of the choices that stand in the text by their own name
TRUTH_SHARES = (0.6, 0.2, 0.15, 0.05)  # of the documents with 0, 1, 2 and 3 statements of yes or no beside
PLAIN_SHARE = 0.3  # of the labelled strings and of the names of things that are words of the language
FORM_SHARE = 0.35  # of the documents that state field after field under labels


def club(rng: Random) -> str:
    """A club or a team."""
    town = values.city(rng).split(",")[0]
    group = rng.choice(words("group_kinds"))
    return rng.choice(
        [f"FC {town}", f"{town} United", f"{town} {group}", f"SV {values.make_name(rng)}", f"{town} Rovers"]
    )


def name_thing(rng: Random) -> str:
    """A name of one or two words, made up or taken from the language."""
    if chance(rng, PLAIN_SHARE):
        return capitalize(values.ordinary(rng))
    return values.make_name(rng) + rng.choice(["", "", f" {values.make_name(rng)}"])


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a scene with its value and the slots that write it."""

    names: tuple[str, ...]
    schema: Schema
    value: Any
    slots: dict[str, str]
    descriptions: tuple[str, ...] = ()
    is_statement: bool = False  # its text is a sentence of its own


def make_part(line: str, rng: Random) -> Part:
    """A field from its line `names: type ... -- descriptions`; a type with `?` may be absent."""
    line, _, described = line.partition(" -- ")
    heads, rest = line.split(": ", 1)
    part = _make_value(tuple(heads.split("|")), rest, rng)
    return replace(part, descriptions=tuple(described.split("|")) if described else ())


def _make_value(names: tuple[str, ...], rest: str, rng: Random) -> Part:
    kind, _, details = rest.partition(" ")
    slot, optional = names[0], kind.endswith("?")
    if optional:
        schema: Schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}
        schema = {"type": ["string", "null"]} if chance(rng, 0.5) else schema
        if kind == "date?":
            value, text = moments.calendar_date(rng)
        else:
            value = text = expand(details, rng) if kind == "text?" else MAKERS[kind[:-1]](rng)
        known = chance(rng, 0.55)
        return Part(names, schema, value if known else None, {slot: text} if known else {})
    if kind in MAKERS or kind == "text":
        value = expand(details, rng) if kind == "text" else MAKERS[kind](rng)
        return Part(names, {"type": "string"}, value, {slot: value})
    if kind in ("list", "rows"):
        return _make_list(names, kind, details, rng)
    return _make_scalar(names, kind, details, rng)


def _make_scalar(names: tuple[str, ...], kind: str, details: str, rng: Random) -> Part:
    slot = names[0]
    if kind in ("integer", "number", "money"):
        low, high = (int(bound) for bound in details.split())
        value: Any = rng.randrange(low, high + 1)
        if high > 1000 and kind == "integer" and not 1900 < low < 2100 and chance(rng, 0.5):
            value = rng.randrange(low, low + 300)
        if kind == "number":
            value = goods.as_number(round(rng.uniform(low, high), rng.choice([0, 1, 1, 2])))
        text = values.count_word(rng, value) if kind == "integer" and value >= 0 else str(value)
        text = f"{value:,}" if value > 9999 and chance(rng, 0.5) else text
        if kind == "money":
            value = goods.price(rng, low, high)
            text = goods.money(value, goods.currency(rng) if chance(rng, 0.5) else "EUR", rng)
        return Part(names, {"type": "integer" if kind == "integer" else "number"}, value, {slot: text})
    if kind == "date":
        value, text = moments.calendar_date(rng)
        return Part(names, {"type": "string", "format": "date"}, value, {slot: text})
    if kind == "time":
        value, text = moments.clock_time(rng)
        return Part(names, {"type": "string", "description": "HH:MM"}, value, {slot: text})
    if kind == "yes":
        yes, no = details.split(" / ")
        value = chance(rng, 0.5)
        return Part(names, {"type": "boolean"}, value, {slot: expand(yes if value else no, rng)})
    options = dict(option.split("=", 1) for option in details.split("; "))
    value = rng.choice(list(options))
    text = value.replace("_", " ") if chance(rng, LITERAL_SHARE) else expand(options[value], rng)
    return Part(names, {"type": "string", "enum": list(options)}, value, {slot: text})


def _make_list(names: tuple[str, ...], kind: str, details: str, rng: Random) -> Part:
    slot, count = names[0], rng.choice([1, 2, 2, 3, 3, 4])
    if kind == "list":
        found: list[Any] = values.unique(MAKERS[details], min(count, 4), rng)
        slots = {slot: join_list(found, rng), f"{slot}_lines": join_bullets(found, rng)}
        return Part(names, {"type": "array", "items": {"type": "string"}}, found, slots)
    fields, template = details.split(" / ", 1)
    columns = [column.split("=") for column in fields.split("; ")]
    rows = [[make_part(f"{name}: {kind}", rng) for name, kind in columns] for _ in range(count)]
    seed = rng.random()
    texts = [
        expand("{" + template + "}", Random(seed), {part.names[0]: part.slots[part.names[0]] for part in row})
        for row in rows
    ]
    items = make_object({part.names[0]: part.schema for part in rows[0]})
    found = [{part.names[0]: part.value for part in row} for row in rows]
    return Part(names, {"type": "array", "items": items}, found, {slot: join_list(texts, rng)})


@dataclass(frozen=True, slots=True)
class Telling:
    """One document of a scene: its fields, its text, and which fields (by index) one may ask for."""

    parts: list[Part]
    text: str
    known: list[int]


def tell(lines: tuple[str, ...], rng: Random) -> Telling:
    """A document of the scene of these lines, with fresh values: one of its templates, or a plain statement."""
    if chance(rng, FORM_SHARE):
        return state(make_parts(lines, rng), rng)
    while True:
        parts = make_parts(lines, rng)
        slots = make_distractors(rng)
        for part in parts:
            # A distractor must not stand in for a field of its name that is absent.
            slots.pop(part.names[0], None)
            slots |= part.slots
        template = expand(rng.choice([line[2:] for line in lines if line.startswith("> ")]), rng)
        template = _add_truths(template, parts, rng)
        if all(name in slots for name in SLOT.findall(template)):
            break
    said = set(SLOT.findall(template))
    known = [i for i, part in enumerate(parts) if part.value is None or said & part.slots.keys()]
    return Telling(parts, compose(template, rng, slots), known)


def make_parts(lines: tuple[str, ...], rng: Random) -> list[Part]:
    """The fields of the scene, and perhaps some of any scene that are true or false."""
    parts = [make_part(line, rng) for line in lines if not line.startswith("> ")]
    taken = {name for part in parts for name in part.names}
    for _ in range(rng.choices(range(len(TRUTH_SHARES)), TRUTH_SHARES)[0]):
        truth = state_truth(rng)
        if not taken & set(truth.names):
            taken |= set(truth.names)
            slots = {truth.names[0]: truth.text}
            parts.append(Part(truth.names, {"type": "boolean"}, truth.value, slots, truth.descriptions, True))
    return parts


def _add_truths(template: str, parts: list[Part], rng: Random) -> str:
    """Put the statements that the template knows nothing of before or behind it."""
    for part in parts:
        if part.is_statement:
            joint, slot = rng.choice([" ", " ", "\n"]), f"<{part.names[0]}>"
            template = f"{slot}{joint}{template}" if chance(rng, 0.3) else f"{template}{joint}{slot}"
    return template


def state(parts: list[Part], rng: Random) -> Telling:
    """A form, or sentences that name one field each: labels and keys are two names of one thing."""
    parts = [_put_plainly(part, rng) for part in parts]
    said = [part for part in parts if chance(rng, 0.85)] or parts[:2]
    known = [i for i, part in enumerate(parts) if part in said]
    return Telling(parts, write_fields([label(part, rng) for part in said], rng), known)


def _put_plainly(part: Part, rng: Random) -> Part:
    """Beside a label any words can be a value: it is not to be known by its looks alone."""
    if part.schema != {"type": "string"} or not chance(rng, PLAIN_SHARE):
        return part
    value = values.ordinary(rng)
    return replace(part, value=value, slots={part.names[0]: value})


def label(part: Part, rng: Random) -> Field:
    """The field as a form has it: one of its names in words, or its description, beside the value."""
    name, text = rng.choice(part.names).replace("_", " "), part.slots.get(part.names[0])
    name = name.removeprefix("is ")
    if isinstance(part.value, bool) and chance(rng, 0.5):
        return replace(boolean_field(name, rng, part.value), schema=part.schema)
    if part.descriptions and not isinstance(part.value, bool) and chance(rng, 0.2):
        described = expand(rng.choice(part.descriptions), rng).removesuffix(", HH:MM")
        name = described[0].lower() + described[1:]
    return Field(name, part.schema, part.value, text)


def play(rng: Random, num_documents: int = 1) -> tuple[list[Document], Schema]:
    """Documents of a random scene, at least one, and a schema that asks for some of its fields."""
    lines = rng.choice(list(read_worlds().values()))
    tellings = [tell(lines, rng)]
    known = tellings[0].known
    asked = [i for i in known if chance(rng, 0.85)] or known[:2]
    if chance(rng, 0.3):
        rng.shuffle(asked)
    others = (tell(lines, rng) for _ in range(num_documents - 1))
    tellings += [other for other in others if set(asked) <= set(other.known)]
    properties = _name([tellings[0].parts[i] for i in asked], rng)
    flat = dress("record", properties, rng)
    nested, seed = chance(rng, 0.2) and len(asked) > 3, rng.random()
    schema, documents = flat, []
    for telling in tellings:
        record: Record = {key: telling.parts[i].value for key, i in zip(properties, asked, strict=True)}
        if nested:
            schema, record = nest(flat, record, Random(seed))
        documents.append(Document("scene", telling.text, record))
    return documents, schema


def _name(parts: list[Part], rng: Random) -> Schema:
    """Properties under one of the names of each field."""
    properties: Schema = {}
    style, described = rng.random(), chance(rng, 0.3)
    for number, part in enumerate(parts, 1):
        key = rng.choice(part.names)
        key = key if key not in properties else part.names[0]
        schema = dict(part.schema)
        if described or style < 0.06:
            form = schema.get("description")
            schema["description"] = _describe(part, rng) + (f", {form}" if form else "")
        if style < 0.06:
            key = f"{rng.choice('abcfqx')}{number}"
        elif style < 0.2:
            key = to_camel(key)
        elif style < 0.24:
            key = key.upper()
        elif style < 0.27:
            key = key.replace("_", "-")
        properties[key] = schema
    return properties


def _describe(part: Part, rng: Random) -> str:
    if part.descriptions and chance(rng, 0.7):
        return expand(rng.choice(part.descriptions), rng)
    return capitalize(rng.choice(part.names).replace("_", " "))


def nest(schema: Schema, record: Record, rng: Random) -> tuple[Schema, Record]:
    """Move some neighbouring fields into an inner object."""
    keys = list(record)
    start = rng.randrange(len(keys) - 1)
    inner = keys[start : start + rng.choice([2, 2, 3])]
    name = rng.choice(["details", "info", "data", "extra", "meta", "who", "where", "facts", "main", "basics"])
    fields, properties, nested = schema["properties"], {}, {}
    for key in keys:
        if key == inner[0]:
            properties[name] = dress("", {k: fields[k] for k in inner}, rng)
            nested[name] = {k: record[k] for k in inner}
        if key not in inner:
            properties[key], nested[key] = fields[key], record[key]
    return dress("record", properties, rng), nested
