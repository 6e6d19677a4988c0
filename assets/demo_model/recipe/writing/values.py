"""Invented plain values as documents write them: people, companies, places, codes."""

import re
import unicodedata
from collections.abc import Callable
from random import Random

from .phrases import capitalize, chance, expand
from .tables import ordinary_words, words

LETTERS = "eeeeetttaaaooiinnnssshhrrrdlllcuumwfgypbvkjxqz"
FOREIGN = ("ö", "é", "ü", "ä", "å", "ø", "ñ", "ç", "ł", "š", "í", "á", "ó")


def make_word(rng: Random, syllables: int | None = None) -> str:
    """A word that no pool contains: syllables, parts of two words, or letters as they come.

    The last two are cut into tokens that names are seldom cut into, so that copying does not rest on habits.
    """
    style = rng.random()
    if style < 0.14:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(3, 10)))
    if style < 0.3:
        pools = words("nouns_what"), words("things"), words("topics"), words("adjectives"), words("parts")
        head, tail = (rng.choice(rng.choice(pools)).split()[0].lower() for _ in range(2))
        return head[: rng.randrange(2, 7)] + tail[-rng.randrange(2, 7) :]
    if style < 0.34:
        return make_word(rng, 1) + rng.choice(FOREIGN) + make_word(rng, 1)
    count = syllables or rng.choice([1, 2, 2, 2, 3])
    return "".join(
        rng.choice(words("onsets"))
        + rng.choice(words("nuclei"))
        + (rng.choice(words("codas")) if chance(rng, 0.6) else "")
        for _ in range(count)
    )


def make_name(rng: Random, syllables: int | None = None) -> str:
    return capitalize(make_word(rng, syllables))


def first_name(rng: Random) -> str:
    return make_name(rng, rng.choice([2, 2, 3])) if chance(rng, 0.35) else rng.choice(words("first_names"))


def last_name(rng: Random) -> str:
    return make_name(rng) if chance(rng, 0.45) else rng.choice(words("last_names"))


def person(rng: Random) -> str:
    first, last = first_name(rng), last_name(rng)
    style = rng.random()
    if style < 0.06:
        return f"{first} {rng.choice('ABCDEFGHJKLMNPRSTW')}. {last}"
    if style < 0.10:
        return f"{first} {last}-{last_name(rng)}"
    if style < 0.13:
        return (
            first
            + " "
            + rng.choice(["van ", "de ", "von ", "al ", "O’", "O'", "Mc", "di ", "El ", "van der "])
            + last
        )
    if style < 0.15:
        return f"{rng.choice(['Dr.', 'Prof.'])} {first} {last}"
    if style < 0.19:
        return f"{first} {first_name(rng)} {last}"
    if style < 0.21:
        return f"{first[0]}. {last}"
    return f"{first} {last}"


def company(rng: Random) -> str:
    style = rng.random()
    word = make_name(rng) if chance(rng, 0.65) else last_name(rng)
    if style < 0.22:
        return f"{word} {rng.choice(words('company_suffixes'))}"
    if style < 0.45:
        return f"{word} {capitalize(rng.choice(words('company_nouns')))}"
    if style < 0.55:
        return f"{word} {rng.choice(['&', 'and', '+'])} {last_name(rng)}"
    if style < 0.72:
        thing = f"{capitalize(rng.choice(words('adjectives')))} {capitalize(rng.choice(words('things')))}"
        return thing + rng.choice(
            ["", "", " Co.", " Collective", " EngineCore", " House", " Shop", " Agency", " Ltd"]
        )
    if style < 0.80:
        noun = capitalize(rng.choice(words("company_nouns")))
        return f"{word} {noun} {rng.choice(words('company_suffixes'))}"
    if style < 0.86:
        return f"{city(rng).split(',')[0]} {capitalize(rng.choice(words('company_nouns')))}"
    if style < 0.90:
        return capitalize(rng.choice(words("things"))) + capitalize(rng.choice(words("things")))
    return word


def city(rng: Random) -> str:
    style = rng.random()
    if style < 0.25:
        return make_name(rng) + rng.choice(["", "", "ville", "ton", "burg", " Bay", " Falls", "by", "stad"])
    if style < 0.33:
        return f"{rng.choice(words('cities'))}, {rng.choice(words('countries'))}"
    return rng.choice(words("cities"))


def street(rng: Random) -> str:
    name = f"{make_name(rng)} {rng.choice(['Street', 'Road', 'Lane', 'Way', 'Avenue', 'Square'])}"
    if chance(rng, 0.6):
        name = rng.choice(words("street_names"))
    number = rng.choice([rng.randrange(1, 99), rng.randrange(1, 250), rng.randrange(100, 9900)])
    return f"{number} {name}" if chance(rng, 0.6) else f"{name} {number}"


def place(rng: Random) -> str:
    """Where an event takes place."""
    style = rng.random()
    if style < 0.15:
        room = rng.choice([digits(rng, 1), letters(rng, 1), digits(rng, 3), letters(rng, 1) + digits(rng, 1)])
        return (
            expand("{Room|Hall|Lecture Hall|Building|Studio|Auditorium|Floor|Gate|Meeting Room|Lab} ", rng)
            + room
        )
    if style < 0.28:
        return street(rng)
    kind = rng.choice(words("place_kinds"))
    if style < 0.42:
        return (
            f"{capitalize(rng.choice(words('adjectives')))} {capitalize(rng.choice(words('things')))} {kind}"
        )
    if style < 0.58:
        return f"{city(rng).split(',')[0]} {kind}"
    if style < 0.66:
        return city(rng)
    if style < 0.80:
        return f"{last_name(rng)} {kind}"
    return f"{make_name(rng)} {kind}, {city(rng)}" if chance(rng, 0.6) else f"{kind} {make_name(rng)}"


def job_title(rng: Random) -> str:
    style = rng.random()
    if style < 0.3:
        return rng.choice(words("job_plain"))
    if style < 0.38:
        return expand("{Head of|VP of|Director of|Head of|VP} ", rng) + rng.choice(words("job_areas"))
    title = f"{rng.choice(words('job_areas'))} {rng.choice(words('job_roles'))}"
    if style < 0.68:
        title = f"{rng.choice(words('job_levels'))} {title}"
    return title + (rng.choice([", EMEA", " II", " (Night Shift)", ", North"]) if chance(rng, 0.03) else "")


def digits(rng: Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def letters(rng: Random, count: int) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(count))


PHONE_SHAPES = [
    "+1 D DDD DDDD",
    "+44 DD DDDD DDDD",
    "+44 DDDD DDDDDD",
    "+49 DD DDDDDDD",
    "+49 DDD DDDDDD",
    "+33 D DD DD DD DD",
    "+34 DDD DDD DDD",
    "+48 DDD DDD DDD",
    "+31 D DDDDDDDD",
    "+351 DDD DDD DDD",
    "+DD DDDDDDDDD",
    "(DDD) DDD-DDDD",
    "(DDD) DDD-DDDD",
    "DDD-DDD-DDDD",
    "DDD-DDD-DDDD",
    "+1-DDD-DDD-DDDD",
    "0DDD DDDDDD",
    "DDD.DDD.DDDD",
    "+DD (DD) DDD DD DD",
    "555-DDDD",
    "0DD/DDDDDDD",
    "0D DD DD DD DD",
    "+DD-DDDD-DDDDDD",
    "0DD DDD DD DD",
    "+46 DD DDD DD DD",
    "DDDD DDDD",
]


def phone(rng: Random) -> str:
    return re.sub("D", lambda _: rng.choice("0123456789"), rng.choice(PHONE_SHAPES))


CODE_SHAPES = [
    "LL-DDDD",
    "LLL-DDDDD",
    "LL-DDDD-DDD",
    "DDDDDD",
    "LDDDDD",
    "LLDDDD",
    "DDDD-DDDD",
    "LL/DDDD/DD",
    "L-DDDD",
    "YYYY-DDDD",
    "LLL-YYYY-DDD",
    "DDDDD",
    "DDLLDDDD",
    "LL-YYYY-DD",
    "DDDDDDDD",
    "LLLDDDDDDDD",
    "LLDDDDDDDDDLL",
    "LLL-DDDD-DDDD",
    "DLDDDDDDDDDDD",
    "LLDDDDDDD",
    "LL DDD DDD DDD",
    "DDDD DDDD DDDD",
    "YYYY/DDD",
    "L/YY/DDDD",
    "YYYY-DD-DDDD",
    "LLDD-DDLL",
    "DLLLDDD",
    "LL.DDDD.DD",
]


def code(rng: Random) -> str:
    """A reference code of a random shape."""
    shape = re.sub(
        "YYYY|YY",
        lambda match: rng.choice(["2023", "2024", "2025", "2026"])[-len(match.group()) :],
        rng.choice(CODE_SHAPES),
    )
    shape = re.sub("D", lambda _: rng.choice("0123456789"), shape)
    return re.sub("L", lambda _: letters(rng, 1), shape)


def to_ascii(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return re.sub("[^a-z0-9]", "", plain)


def email(rng: Random, name: str, employer: str = "") -> str:
    """An address that resembles the name, mostly at a domain that resembles the employer."""
    parts = [to_ascii(part) for part in re.sub(r"^(Dr|Prof)\. ", "", name).split()]
    first, last = parts[0] or "info", parts[-1] or "mail"
    shapes = [
        f"{first}.{last}",
        f"{first[0]}{last}",
        first,
        last,
        f"{first}_{last}",
        f"{first}{last}",
        f"{first[0]}.{last}",
    ]
    user = rng.choice(shapes)
    if chance(rng, 0.15):
        user = rng.choice(
            [f"{first}{digits(rng, 2)}", f"{first}-{last}", f"{last}.{first}", f"{last}{first[0]}"]
        )
    if chance(rng, 0.06):
        user = rng.choice(words("mail_boxes"))
    return f"{user}@{mail_domain(rng, employer)}.{rng.choice(words('mail_endings'))}"


def mail_domain(rng: Random, employer: str) -> str:
    domain = to_ascii(employer if chance(rng, 0.3) else employer.split(" ")[0]) or make_word(rng)
    if chance(rng, 0.2):
        domain = rng.choice(["example", "mail", "post", "inbox", make_word(rng), make_word(rng)])
    return f"{domain}-{make_word(rng, 1)}" if chance(rng, 0.1) else domain


def website(rng: Random) -> str:
    return (
        expand("{www.|https://|}", rng)
        + make_word(rng)
        + rng.choice([".com", ".org", ".de", ".co.uk", ".io", ".example"])
    )


def count_word(rng: Random, count: int) -> str:
    return words("number_words")[count] if count <= 12 and chance(rng, 0.4) else str(count)


def unique(make: Callable[[Random], str], count: int, rng: Random) -> list[str]:
    """`count` different values, none contained in another."""
    found: list[str] = []
    while len(found) < count:
        value = make(rng)
        if not any(value in other or other in value for other in found):
            found.append(value)
    return found


def ordinary(rng: Random) -> str:
    """One to three plain words, as a name that gives nothing away by its form."""
    found = " ".join(rng.choice(ordinary_words()) for _ in range(rng.choice([1, 1, 1, 2, 2, 3])))
    return capitalize(found) if chance(rng, 0.35) else found
