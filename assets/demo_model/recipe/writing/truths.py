"""Yes or no: one thing that is so or is not, said in one of many ways, and the fields that may ask for it."""

from dataclasses import dataclass
from random import Random

from .phrases import capitalize, expand
from .tables import read_sections

FAMILIES = ("one", "some", "done", "allowed", "needed", "doing")


@dataclass(frozen=True, slots=True)
class Question:
    """One thing that may be so, and the names and descriptions of a field that asks for it."""

    family: str
    thing: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]


def pose_question(rng: Random) -> Question:
    """A random thing that is so or is not."""
    sections, family = read_sections("truths"), rng.choice(FAMILIES)
    thing = rng.choice([word.strip() for line in sections[family] for word in line.split(",")])
    key = "_".join("".join(c if c.isalpha() else " " for c in thing.lower()).split())
    names = [line.replace("<n>", key) for line in sections[f"{family}_keys"]]
    rng.shuffle(names)
    descriptions = [expand(line, rng, {"n": thing}) for line in sections[f"{family}_asks"]]
    return Question(family, thing, tuple(names), tuple(descriptions))


def answer_question(question: Question, rng: Random) -> tuple[bool, str]:
    """Yes or no with even odds, and a sentence that says so."""
    value = rng.random() < 0.5
    lines = read_sections("truths")[f"{question.family}_{'yes' if value else 'no'}"]
    return value, capitalize(expand(rng.choice(lines), rng, {"n": question.thing}))
