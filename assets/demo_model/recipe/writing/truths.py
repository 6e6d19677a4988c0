"""Yes or no: one thing that is so or is not, said in one of many ways, and the fields that may ask for it."""

from dataclasses import dataclass
from random import Random

from .phrases import capitalize, expand
from .tables import read_sections

FAMILIES = ("one", "some", "done", "allowed", "needed", "doing")


@dataclass(frozen=True, slots=True)
class Truth:
    """A statement, whether it says yes, and names and descriptions of the field."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    value: bool
    text: str


def state_truth(rng: Random) -> Truth:
    """A random thing that is so or is not, with even odds."""
    sections, family = read_sections("truths"), rng.choice(FAMILIES)
    value = rng.random() < 0.5
    thing = rng.choice([word.strip() for line in sections[family] for word in line.split(",")])
    key = "_".join("".join(c if c.isalpha() else " " for c in thing.lower()).split())
    names = [line.replace("<n>", key) for line in sections[f"{family}_keys"]]
    rng.shuffle(names)
    descriptions = [expand(line, rng, {"n": thing}) for line in sections[f"{family}_asks"]]
    line = expand(rng.choice(sections[f"{family}_{'yes' if value else 'no'}"]), rng, {"n": thing})
    return Truth(tuple(names), tuple(descriptions), value, capitalize(line))
