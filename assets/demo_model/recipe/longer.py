"""Long documents: the same record behind filler, quoted mail, boilerplate or other paragraphs."""

from random import Random

from . import goods, values
from .documents import Document
from .phrases import chance, expand, make_clause, make_sentence

BOILERPLATE = (
    "This message and its attachments are confidential. If you are not the intended reader, please delete it.",
    "Please consider the environment before you print this page.",
    "You receive this mail because you signed up on our website. Unsubscribe at any time.",
    "Terms and conditions apply. All prices include the legal taxes unless stated otherwise.",
    "Registered office: see our website. Errors and omissions excepted.",
    "Opening hours: Monday to Friday 9 to 18, Saturday 10 to 14.",
    "Home | About | Contact | Imprint | Privacy | Help",
    "Accept cookies? We use cookies to improve your visit. Settings / Accept all",
)


def make_paragraph(rng: Random) -> str:
    """A few sentences that hold nothing to extract."""
    sentences = [make_sentence(rng) for _ in range(rng.randrange(2, 7))]
    if chance(rng, 0.3):
        seen = expand(
            "{Last week|Earlier|In spring|Years ago}, <w> {mentioned|wrote|said} that <c>.",
            rng,
            {"w": values.first_name(rng), "c": make_clause(rng)},
        )
        sentences.insert(rng.randrange(len(sentences)), seen)
    return " ".join(sentences)


def make_filler(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.7:
        return make_paragraph(rng)
    if draw < 0.85:
        return rng.choice(BOILERPLATE)
    if draw < 0.93:
        items = [
            rng.choice([goods.item_name, goods.skill, goods.feature])(rng) for _ in range(rng.randrange(3, 8))
        ]
        return expand("{Shopping list|Ideas|To do|Misc|Keywords}: ", rng) + ", ".join(items)
    return "\n".join(f"> {make_sentence(rng)}" for _ in range(rng.randrange(2, 6)))


def lengthen(document: Document, rng: Random, most: int = 4200) -> Document:
    """The document with filler before, after or on both sides, up to about `most` characters."""
    target = rng.randrange(600, most)
    before: list[str] = []
    after: list[str] = []
    split = rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])
    length = len(document.text)
    while length < target:
        filler = make_filler(rng)
        (before if rng.random() < split else after).append(filler)
        length += len(filler)
    joint = rng.choice(["\n", "\n\n", "\n\n", " "])
    return Document(document.kind, joint.join([*before, document.text, *after]), document.record)
