"""The fields of small worlds: a line says the names, the type and the descriptions; a part holds a fresh value."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from . import goods, moments, values
from .phrases import capitalize, chance, expand, join_bullets, join_list
from .schemas import Schema, make_object
from .tables import words

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
PLAIN_SHARE = 0.3  # of the labelled strings and of the names of things that are words of the language


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
        # `list {flute|oboe|horn}` names its items, `list person` what makes them
        maker = MAKERS[details] if details in MAKERS else lambda r: expand(details, r)
        found: list[Any] = values.unique(maker, min(count, 4), rng)
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
