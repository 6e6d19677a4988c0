"""Labels of any words of the language, and the keys and descriptions that ask for what stands under them.

Labels from a list are learned by heart, and then a schema with other words is guessed at. Twelve thousand words,
alone and in twos, can only be compared: in small letters or capitals, whole or in part, singular or plural.
"""

import re
from functools import cache
from random import Random

from .phrases import capitalize, chance, expand
from .tables import ordinary_words, read_sections

ADJECTIVE = re.compile(".*(ed|able|ible|ful|less|ing|ous|en)")
PLURAL = re.compile(".*[^siu]s")


@cache
def _words(pattern: re.Pattern[str] | None) -> tuple[str, ...]:
    return tuple(word for word in ordinary_words() if pattern is None or pattern.fullmatch(word))


def make_word(rng: Random) -> str:
    """Any word of the language."""
    return rng.choice(_words(None))


def make_label(rng: Random) -> str:
    """One word, or two or three that belong together as little as any."""
    return " ".join(make_word(rng) for _ in range(rng.choice([1, 1, 1, 1, 2, 2, 2, 3])))


def make_adjective(rng: Random) -> str:
    """A label for what is so or is not."""
    return rng.choice(_words(ADJECTIVE))


def make_plural(rng: Random) -> str:
    """A label for what can be counted or listed."""
    word = rng.choice(_words(PLURAL))
    return f"{make_word(rng)} {word}" if chance(rng, 0.3) else word


@cache
def _doers() -> dict[str, str]:
    """Who has done it, by the past of the verb."""
    deeds = [deed.split(":") for line in read_sections("labels")["deeds"] for deed in line.split()]
    return dict((deed[1], deed[2]) if deed[1:] else _conjugate(deed[0]) for deed in deeds)


def _conjugate(verb: str) -> tuple[str, str]:
    ending = "" if verb.endswith("e") else "e"
    return f"{verb}{ending}d", f"{verb}{ending}r"


def make_deed(rng: Random) -> str:
    """A label for who has done something: "painted by"."""
    return f"{rng.choice(list(_doers()))} by"


def stem(label: str) -> set[str]:
    """The words of a label that tell it from others, in the singular."""
    return {word.removesuffix("s") for word in label.split()} - {"by"}


def near_name(label: str, others: set[str], rng: Random) -> str:
    """Another name for what the label names, in small letters; `others` are stems that mean something else."""
    if label.endswith(" by"):
        return _name_doer(label.removesuffix(" by"), rng)
    parts = label.split()
    draw = rng.random()
    if draw < 0.3 and len(parts) > 1:
        kept = [part for part in (parts[-1], parts[0]) if not stem(part) & others]
        return rng.choice(kept) if kept else label
    if draw < 0.42 and len(parts) > 1:
        return f"{parts[-1]} of {' '.join(parts[:-1])}"
    if draw < 0.6:
        word = parts[-1]
        word = word[:-1] if PLURAL.fullmatch(word) else word if word.endswith("s") else word + "s"
        return " ".join([*parts[:-1], word])
    return expand(rng.choice(read_sections("labels")["names"]), rng, {"label": label})


def _name_doer(past: str, rng: Random) -> str:
    doer = _doers()[past]
    return rng.choice([doer, doer, doer, f"{doer} name", f"who {past}", f"{past} by", f"name of {doer}"])


def describe(label: str, rng: Random) -> str:
    """A description that tells which label is meant."""
    if label.endswith(" by"):
        past = label.removesuffix(" by")
        line = rng.choice(read_sections("labels")["doers"])
        return expand(line, rng, {"deed": past, "doer": _name_doer(past, rng)})
    return capitalize(expand(rng.choice(read_sections("labels")["descriptions"]), rng, {"label": label}))
