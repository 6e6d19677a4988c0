"""Long documents: the same record behind filler, quoted mail, boilerplate, prose or other people's records."""

import re
from functools import cache
from pydoc_data.topics import topics
from random import Random

from . import goods, values
from .documents import Document
from .phrases import chance, expand, make_clause, make_sentence
from .scenes import play

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


PROSE = re.compile(r"[A-Z](?:[a-zA-Z0-9 ,;:()'/-]|[.] (?=[A-Z])){60,700}[.]")


@cache
def read_prose() -> tuple[str, ...]:
    """Paragraphs of plain English: those of Python's own help topics that show no code."""
    paragraphs = (" ".join(part.split()) for text in topics.values() for part in text.split("\n\n"))
    return tuple(text for text in (re.sub(r"[*`]", "", part) for part in paragraphs) if PROSE.fullmatch(text))


def make_prose(rng: Random) -> str:
    """Some running sentences of one paragraph, now and then with a name and a number in them."""
    sentences = rng.choice(read_prose()).split(". ")
    begin = rng.randrange(len(sentences))
    text = ". ".join(sentences[begin : begin + rng.randrange(1, 5)])
    if chance(rng, 0.2):
        text = f"{values.first_name(rng)} {values.last_name(rng)}, {rng.randrange(2, 99)}: {text}"
    return text if text.endswith(".") else text + "."


def make_filler(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.3:
        return make_paragraph(rng)
    if draw < 0.65:
        return make_prose(rng)
    if draw < 0.78:
        return rng.choice(BOILERPLATE)
    if draw < 0.92:
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
    if document.kind == "scene" and chance(rng, 0.5):
        # Other events: only the schema tells which of the records is asked for.
        for _ in range(rng.randrange(1, 4)):
            [other], _ = play(rng)
            side = rng.choice([before, after])
            side.insert(rng.randrange(len(side) + 1), other.text)
    joint = rng.choice(["\n", "\n\n", "\n\n", " "])
    return Document(document.kind, joint.join([*before, document.text, *after]), document.record)
