"""Pointer tasks: find the person, the firm, the code or the amount in prose that says nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import goods, moments, values
from .documents import Document
from .drafts import Record
from .phrases import chance, compose_sentence, expand, make_clause, make_sentence
from .schemas import Schema, dress


@dataclass(frozen=True, slots=True)
class Entity:
    """A type of thing that a schema can ask for by several keys."""

    make: Callable[[Random], str]
    keys: tuple[str, ...]
    description: str
    contexts: tuple[str, ...]


ENTITIES: tuple[Entity, ...] = (
    Entity(
        values.person,
        ("person", "name", "who", "full_name", "author", "guest"),
        "Name of the person",
        (
            "<x> {came in|laughed|was there|called|sat down|smiled|agreed|left early|had no idea}~.",
            "{I saw|We thanked|They asked|Everyone likes|Nobody knew|Please greet} <x>~.",
            "{According to|Thanks to|Together with|Next to} <x>, <c>.",
            "{My neighbour|Our guest|A certain} <x> {told me|knows|thinks} that <c>.",
        ),
    ),
    Entity(
        values.company,
        ("company", "organisation", "firm", "business", "employer"),
        "Name of the company",
        (
            "{The firm|A company called|The people at|A van of} <x> {came|agreed|sent a letter|raised its prices}~.",
            "<x> {announced|opened|closed|sold} {a new plant|its shop|an office|two buildings}~.",
            "{Shares of|The owners of|A spokesman for} <x> {fell|rose|did not answer}~.",
        ),
    ),
    Entity(
        values.city,
        ("city", "place", "town", "location", "where"),
        "Name of the place",
        (
            "{In|Near|Outside|From|All over} <x>~ <c>.",
            "{We drove to|They live in|It rained in|She moved to|The road to} <x>~.",
        ),
    ),
    Entity(
        lambda rng: values.email(rng, values.person(rng)),
        ("email", "mail", "address", "contact"),
        "Email address",
        (
            "{Write to|Send it to|The answer came from|Forward this to} <x>~.",
            "<x> {is the address|bounced|works}~.",
        ),
    ),
    Entity(
        values.phone,
        ("phone", "phone_number", "tel", "mobile"),
        "Phone number",
        ("{Call|Dial|Try|The number is|Ring} <x>~.",),
    ),
    Entity(
        goods.product,
        ("product", "item", "device", "thing"),
        "Product name",
        (
            "{I got|We tried|She returned|They sell|He wants} {the|a} <x>~.",
            "{The|Our} <x> {broke|works|was a present|is heavy}~.",
        ),
    ),
    Entity(
        values.code,
        ("code", "id", "reference", "ref", "number"),
        "Reference code",
        (
            "{The label says|Look for|Quote|Filed under|See} <x>~.",
            "<x> {is the code|was printed on it|is the reference}~.",
        ),
    ),
    Entity(
        values.job_title,
        ("title", "job", "role", "profession"),
        "Job title",
        (
            "{She works as|He became|They hired|I talked to|He is} {a|the} <x>~.",
            "{Her|His} {job|role} is <x>~.",
        ),
    ),
    Entity(
        goods.event_title,
        ("event", "occasion", "event_name"),
        "Name of the event",
        ("{We went to|I enjoyed|They cancelled|Nobody missed|See you at} the <x>~.",),
    ),
)


def point(rng: Random) -> tuple[Document, Schema]:
    """A document of mostly empty sentences with one to four things to find, and one that is absent."""
    record: Record = {}
    properties: Schema = {}
    sentences: list[str] = []
    chosen = rng.sample(ENTITIES, rng.choice([1, 2, 2, 3, 3, 4]))
    for entity in chosen:
        key, value = rng.choice(entity.keys), entity.make(rng)
        if key in record:
            continue
        record[key], properties[key] = value, {"type": "string"}
        if chance(rng, 0.5):
            properties[key]["description"] = entity.description
        elif chance(rng, 0.3):
            properties[key]["type"] = ["string", "null"]
        sentences.append(
            compose_sentence(rng.choice(entity.contexts), rng, {"x": value, "c": make_clause(rng)})
        )
    _add_absent(record, properties, chosen, rng)
    _add_amount_and_date(record, properties, sentences, rng)
    sentences += [make_sentence(rng) for _ in range(rng.choice([0, 1, 2, 3, 4]))]
    rng.shuffle(sentences)
    return Document("entity", rng.choice([" ", " ", "\n"]).join(sentences), record), dress(
        "record", properties, rng
    )


def _add_absent(record: Record, properties: Schema, chosen: list[Entity], rng: Random) -> None:
    entity = rng.choice(ENTITIES)
    key = rng.choice(entity.keys)
    if entity not in chosen and key not in record and chance(rng, 0.5):
        record[key], properties[key] = None, {"type": ["string", "null"], "description": entity.description}


def _add_amount_and_date(record: Record, properties: Schema, sentences: list[str], rng: Random) -> None:
    if chance(rng, 0.3):
        iso, written = moments.calendar_date(rng)
        key = rng.choice(["date", "day", "when"])
        sentences.append(
            expand("{It was|That happened on|The day was|Signed on|Dated} <d>.", rng, {"d": written})
        )
        record[key], properties[key] = iso, {"type": "string", "format": "date"}
    if chance(rng, 0.25):
        unit = goods.currency(rng)
        cost = goods.price(rng, 1, 3000, unit)
        key = rng.choice(["price", "amount", "cost", "sum"])
        written = goods.money(cost, unit, rng)
        sentences.append(
            expand("{It cost|We paid|The price was|They wanted|He earned} <m>.", rng, {"m": written})
        )
        record[key], properties[key] = cost, {"type": "number"}
        record["currency"], properties["currency"] = unit, {"type": "string"}
