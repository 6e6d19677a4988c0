"""Drafts of the eight kinds: the record that is the answer, and how a document may write each value."""

from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any

from . import goods, moments, values
from .goods import money
from .phrases import (
    capitalize,
    chance,
    expand,
    join_bullets,
    join_list,
    make_clause,
)
from .tables import read_sections, words

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Draft:
    """A record before it is put into words.

    `slots` holds the written form of every value; nullable values have a slot only when they are known.
    """

    kind: str
    record: Record
    slots: dict[str, str]


def say(section: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """A random phrase of one section of `facts.txt`."""
    return expand(rng.choice(read_sections("facts")[section]), rng, slots)


def answer(name: str, truth: bool, rng: Random) -> str:
    return say(f"{name}_{'yes' if truth else 'no'}", rng)


def make_distractors(rng: Random) -> dict[str, str]:
    """Slots that mean nothing to the record: other people, firms, dates and codes."""
    other, firm = values.person(rng), values.company(rng)
    return {
        "other": other,
        "other_two": values.person(rng),
        "other_first": values.first_name(rng),
        "other_email": values.email(rng, other, firm),
        "other_company": firm,
        "other_date": moments.calendar_date(rng)[1],
        "other_code": values.code(rng),
        "other_product": goods.product(rng),
        "agent": values.first_name(rng),
        "author": rng.choice([values.first_name(rng), other]),
        "city": values.city(rng),
        "origin": values.city(rng),
        "street": values.street(rng),
        "website": values.website(rng),
        "domain": values.make_word(rng, 2) + ".com",
        "time": moments.clock_time(rng)[0],
        "phone_digits": values.digits(rng, 10),
        "clause": make_clause(rng),
        "note": say("note", rng),
        "contract": say("contract", rng),
        "sku": values.code(rng),
        "weight": f"{rng.randrange(1, 400) / 2} kg",
        "extra_skill": goods.skill(rng),
    }


def list_slots(name: str, items: list[str], rng: Random) -> dict[str, str]:
    if not items:
        return {}
    spoken = [add_article(item, rng) for item in items] if chance(rng, 0.3) else items
    single = {
        f"{name}_{words('number_words')[len(items)]}_{letter}": item
        for letter, item in zip("abcdef", items, strict=False)
    }
    return single | {name: join_list(spoken, rng), f"{name}_lines": join_bullets(items, rng)}


def add_article(item: str, rng: Random) -> str:
    """The item with an article that is no part of its value, where one may stand."""
    first = item.split()[0]
    if first not in words("feature_adjectives") + words("quality_good") + words("quality_bad"):
        return item
    return f"{rng.choice(['an' if first[0] in 'aeiou' else 'a', 'the', 'its', ''])} {item}".strip()


def draft_contact(rng: Random) -> Draft:
    name, employer = values.person(rng), values.company(rng)
    record: Record = {
        "name": name,
        "email": values.email(rng, name, employer),
        "phone": values.phone(rng),
        "company": employer,
        "title": values.job_title(rng),
    }
    slots = make_distractors(rng) | record
    if chance(rng, 0.3):
        del slots["phone"]
    slots["date"] = moments.calendar_date(rng)[1]
    slots["first"] = name.split()[-2 if chance(rng, 0.5) else 0]
    return Draft("contact", record, slots)


def draft_event(rng: Random) -> Draft:
    iso, written = moments.calendar_date(rng)
    clock, spoken = moments.clock_time(rng)
    host = values.company(rng) if chance(rng, 0.3) else goods.organizer(rng)
    record: Record = {
        "title": goods.event_title(rng),
        "date": iso,
        "start_time": clock,
        "location": values.place(rng),
        "organizer": host,
    }
    slots = make_distractors(rng) | record | {"date": written, "start_time": spoken}
    slots |= {"fee": money(rng.randrange(3, 60), "EUR", rng), "end": moments.clock_time(rng)[1]}
    return Draft("event", record, slots)


def draft_support_ticket(rng: Random) -> Draft:
    category = rng.choice(["billing", "bug", "account", "shipping", "other"])
    severity = rng.choice(["low", "medium", "high"])
    issue, name = say(category, rng), values.person(rng)
    record: Record = {
        "customer_name": name,
        "product": goods.product(rng),
        "category": category,
        "severity": severity,
        "order_id": values.code(rng),
    }
    slots = make_distractors(rng) | {
        "customer_name": name,
        "product": record["product"],
        "issue": issue,
        "issue_cap": capitalize(issue),
        "urgency": say(severity, rng),
        "urgency_answer": say(f"urgency_answer_{severity}", rng),
        "email": values.email(rng, name),
        "date": moments.calendar_date(rng)[1],
    }
    if chance(rng, 0.6):
        slots |= {
            "order_id": record["order_id"],
            "order": say("order", rng, {"order_id": record["order_id"]}),
        }
    return Draft("support_ticket", record, slots)


def draft_shipment(rng: Random) -> Draft:
    tracking = values.code(rng)
    if chance(rng, 0.4):
        tracking = rng.choice(["1Z", "JD", "CX", "TRK", "PN", "SHP-", "X", "00"]) + values.digits(
            rng, rng.choice([6, 8, 10, 12])
        )
    iso, written = moments.calendar_date(rng)
    count = rng.randrange(1, 13) if chance(rng, 0.7) else rng.randrange(1, 200)
    record: Record = {
        "carrier": goods.carrier(rng),
        "tracking_number": tracking,
        "recipient": values.person(rng) if chance(rng, 0.7) else values.company(rng),
        "destination": values.city(rng) if chance(rng, 0.75) else f"{values.street(rng)}, {values.city(rng)}",
        "eta": iso,
        "items": count,
    }
    nouns = "item,parcel,package,box,carton,piece,pallet,crate,bag,envelope,case" if count == 1 else ""
    nouns = nouns or "items,parcels,packages,boxes,cartons,pieces,pallets,crates,bags,envelopes,cases"
    slots = make_distractors(rng) | {name: str(value) for name, value in record.items()}
    slots |= {
        "eta": written,
        "items_text": values.count_word(rng, count),
        "unit_noun": rng.choice(nouns.split(",")),
    }
    slots["shipped"] = moments.write_date(date.fromisoformat(iso) - timedelta(days=rng.randrange(1, 9)), rng)
    return Draft("shipment", record, slots)
