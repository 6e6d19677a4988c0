"""Invented things for sale: money, products, features, skills, good and bad points, invoice lines."""

import math
import re
from random import Random

from .phrases import capitalize, chance, expand
from .tables import read_sections, words
from .values import digits, letters, make_name, person, unique

Number = int | float

# ISO code: (signs before the number, words after it)
CURRENCIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "USD": (("$", "$", "US$", "USD "), ("dollars", "US dollars", "$")),
    "EUR": (("€", "€", "€ ", "EUR "), ("euros", "euro", "€", "€")),
    "GBP": (("£", "£", "GBP "), ("pounds", "pounds sterling")),
    "CHF": (("CHF ", "Fr. "), ("Swiss francs", "francs")),
    "JPY": (("¥", "JPY "), ("yen", "Japanese yen")),
    "CAD": (("CA$", "C$", "CAD "), ("Canadian dollars",)),
    "AUD": (("A$", "AU$", "AUD "), ("Australian dollars",)),
    "SEK": (("SEK ",), ("Swedish kronor", "kronor", "kr")),
    "INR": (("₹", "INR "), ("rupees",)),
    "PLN": (("PLN ",), ("zloty", "zł")),
    "NOK": (("NOK ",), ("Norwegian kroner",)),
    "BRL": (("R$", "BRL "), ("reais",)),
}
SCHEMA_CURRENCIES = ("USD", "EUR", "GBP", "CHF", "JPY", "CAD", "AUD", "SEK")
COMMON_CURRENCIES = ("USD", "EUR", "GBP")


def currency(rng: Random) -> str:
    return rng.choice(COMMON_CURRENCIES if chance(rng, 0.6) else SCHEMA_CURRENCIES)


def as_number(value: float) -> Number:
    """JSON form of an amount: an integer when it has no cents."""
    value = round(value, 2)
    return int(value) if value == int(value) else value


def price(rng: Random, low: float, high: float, unit: str = "EUR") -> Number:
    """A log-uniform price that looks like a price tag more often than not."""
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    if unit == "JPY":
        return int(value * 100)
    style = rng.random()
    if style < 0.45:
        return as_number(value)
    return as_number(int(value) + (0 if style < 0.7 else rng.choice([0.99, 0.5, 0.95, 0.49, 0.9, 0.25])))


def write_number(value: Number, rng: Random, unit: str = "EUR") -> str:
    """An amount with or without cents and thousands separators, sometimes in continental style."""
    cents = isinstance(value, float) or (unit != "JPY" and chance(rng, 0.4))
    text = f"{value:,.2f}" if cents else f"{value:,}"
    style = rng.random()
    if style < 0.3:
        return text.replace(",", "")
    if unit in ("EUR", "SEK", "PLN", "BRL") and style < 0.42:
        return text.translate(str.maketrans(",.", ".," if chance(rng, 0.6) else " ,"))
    if unit == "CHF" and style < 0.5:
        return text.replace(",", "'")
    return text


def money(value: Number, unit: str, rng: Random) -> str:
    number = write_number(value, rng, unit)
    before, after = CURRENCIES[unit]
    style = rng.random()
    if style < 0.55:
        return rng.choice(before) + number
    if style < 0.68:
        return f"{unit} {number}"
    if style < 0.84:
        return f"{number} {unit}"
    return f"{number} {rng.choice(after)}"


def product(rng: Random) -> str:
    noun = rng.choice(words("products"))
    adjective, thing = rng.choice(words("adjectives")), rng.choice(words("things"))
    brand = make_name(rng) if chance(rng, 0.6) else capitalize(rng.choice([adjective, thing]))
    if chance(rng, 0.15):
        brand += capitalize(rng.choice(words("things")))
    mark = rng.choice(words("product_marks"))
    if chance(rng, 0.5):
        mark = rng.choice(
            [
                letters(rng, 1) + digits(rng, rng.choice([1, 2, 3])),
                digits(rng, rng.choice([1, 2, 3])),
                f"{letters(rng, 2)}-{digits(rng, 3)}",
                "",
            ]
        )
    shape = rng.choice(
        [
            f"{brand} {mark} {capitalize(noun)}",
            f"{brand} {mark}",
            f"{brand} {noun}",
            f"{brand} {noun.title()} {mark}",
            f"{brand} {noun.title()}",
        ]
    )
    if chance(rng, 0.1):
        shape = f"{brand} {rng.choice(words('software_nouns'))}"
    if chance(rng, 0.04):
        shape = f"{capitalize(adjective)} {noun}"
    return re.sub(" +", " ", shape).strip()


def plain_thing(rng: Random) -> str:
    """A noun with something before or behind it, from pools that have nothing to do with each other."""
    part, material = rng.choice(words("parts")), rng.choice(words("materials"))
    kind = rng.choice(words("describing") + words("feature_adjectives"))
    shapes = [f"{material} {part}", f"{kind} {part}", f"{kind} {rng.choice(words('nouns_what'))}"]
    shapes += [f"{material} {part}", f"{kind} {material} {part}", f"{part} with {material} {part}s"]
    shapes += [
        f"{rng.randrange(2, 90)} {material} {part}s",
        f"{part} and {rng.choice(words('parts'))} {part}",
    ]
    return rng.choice(shapes[:6] if chance(rng, 0.7) else shapes)


def feature(rng: Random) -> str:
    style = rng.random()
    if style < 0.18:
        return plain_thing(rng)
    if style < 0.5:
        return expand(rng.choice(words("feature_phrases")), rng)
    if style < 0.84:
        text = f"{rng.choice(words('feature_adjectives'))} {rng.choice(words('feature_nouns'))}"
        return rng.choice(words("feature_adjectives")) + " " + text if chance(rng, 0.12) else text
    if style < 0.92:
        return f"{rng.randrange(2, 60)} {rng.choice(words('feature_units'))}"
    return f"{rng.choice(words('adjectives'))} {rng.choice(words('feature_nouns'))}"


def skill(rng: Random) -> str:
    style = rng.random()
    if style < 0.08:
        return make_name(rng)
    if style < 0.1:
        return plain_thing(rng)
    if style < 0.13:
        return f"{rng.randrange(2, 9)} years of {rng.choice(words('skills'))}"
    return rng.choice(words("skills"))


def good_point(rng: Random) -> str:
    if chance(rng, 0.72):
        return rng.choice(words("pros"))
    if chance(rng, 0.25):
        return plain_thing(rng)
    return f"{rng.choice(words('quality_good'))} {rng.choice(words('feature_nouns'))}"


def bad_point(rng: Random) -> str:
    if chance(rng, 0.72):
        return rng.choice(words("cons"))
    if chance(rng, 0.25):
        return plain_thing(rng)
    return f"{rng.choice(words('quality_bad'))} {rng.choice(words('feature_nouns'))}"


def item_name(rng: Random) -> str:
    """Return an item for an invoice line."""
    style = rng.random()
    if style < 0.2:
        return product(rng)
    if style < 0.4:
        return rng.choice(words("products"))
    if style < 0.65:
        text = rng.choice(words("services"))
    elif style < 0.8:
        text = rng.choice(words("goods"))
    else:
        text = f"{rng.choice(words('adjectives'))} {rng.choice(words('goods'))}"
    return capitalize(text) if chance(rng, 0.3) else text


def invoice_lines(rng: Random, unit: str) -> list[dict[str, Number | str]]:
    names = unique(item_name, rng.choice([1, 1, 2, 2, 2, 3, 3, 4]), rng)
    counts = [rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 12, 20, rng.randrange(1, 100)]) for _ in names]
    return [
        {"description": name, "quantity": count, "unit_price": price(rng, 1, 900, unit)}
        for name, count in zip(names, counts, strict=True)
    ]


def carrier(rng: Random) -> str:
    if chance(rng, 0.55):
        return rng.choice(words("carriers"))
    return f"{make_name(rng)} {rng.choice(words('carrier_nouns'))}"


def event_title(rng: Random) -> str:
    topic, kind = rng.choice(words("topics")), rng.choice(words("event_types"))
    style, other = rng.random(), rng.choice(words("topics"))
    if style < 0.22:
        title = rng.choice(
            [
                f"{topic} and {other}",
                f"{topic} & {other}",
                f"{topic} for {other}",
                f"{kind}: {topic}",
                f"{topic} {kind}: {other}",
                f"The {capitalize(rng.choice(words('adjectives')))} {capitalize(rng.choice(words('things')))}",
                f"{topic} in {rng.choice(words('cities'))}",
                f"Introduction to {topic}",
                f"{rng.choice(words('people_labels')).title()}s {kind}",
                f"{rng.randrange(2, 40)}th {topic} {kind}",
                f"{rng.choice(words('months'))} {kind}",
                f"Annual {topic} {kind}",
            ]
        )
    elif style < 0.5:
        title = f"{topic} {kind}"
    elif style < 0.62:
        title = f"{make_name(rng)} {kind}"
    elif style < 0.74:
        title = expand(read_sections("asking")["event_opening"][0], rng) + topic
    elif style < 0.86:
        title = f"{topic} {rng.choice(words('topics'))} {kind}"
    else:
        title = (
            f"{capitalize(rng.choice(words('adjectives')))} {capitalize(rng.choice(words('things')))} {kind}"
        )
    return title + (f" {rng.randrange(2023, 2029)}" if chance(rng, 0.1) else "")


def organizer(rng: Random) -> str:
    style = rng.random()
    if style < 0.4:
        return person(rng)
    if style < 0.6:
        return f"{make_name(rng)} {rng.choice(words('group_kinds'))}"
    owner = rng.choice(
        [rng.choice(words("topics")), rng.choice(words("cities")), capitalize(rng.choice(words("things")))]
    )
    return f"{owner} {rng.choice(words('group_kinds'))}"
