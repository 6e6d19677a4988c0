"""Turns templates into text: alternatives in braces, <slots>, and random English around them.

Template marks: `{a|b}` picks one (may nest), `<name>` is a slot, `~` may become a clause that goes on
after a slot, `@@` may become a whole sentence. Noise never touches the text of a slot.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random

from .tables import read_sections, words

# A template is a sequence of literal strings and choices; a choice is a tuple of templates.
Template = tuple["str | tuple[Template, ...]", ...]  # type: ignore[misc]

SLOT = re.compile(r"<([a-z_]+)>")


def chance(rng: Random, share: float) -> bool:
    return rng.random() < share


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


@cache
def parse(template: str) -> Template:
    """Parse the nested alternatives of a template once."""
    parts, end = _parse_until(template, 0, "")
    assert end == len(template), f"unbalanced braces in {template!r}"
    return parts


def _parse_until(text: str, start: int, stops: str) -> tuple[Template, int]:
    parts: list[str | tuple[Template, ...]] = []
    position = start
    while position < len(text) and text[position] not in stops:
        if text[position] == "{":
            options: list[Template] = []
            while text[position] != "}":
                option, position = _parse_until(text, position + 1, "|}")
                options.append(option)
            parts.append(tuple(options))
            position += 1
        else:
            stop = next((i for i in range(position, len(text)) if text[i] in "{" + stops), len(text))
            parts.append(text[position:stop])
            position = stop
    return tuple(parts), position


def choose(parts: Template, rng: Random) -> str:
    """One random reading of a parsed template; slots stay in place."""
    return "".join(p if isinstance(p, str) else choose(p[int(rng.random() * len(p))], rng) for p in parts)


def expand(template: str, rng: Random, slots: Mapping[str, object] | None = None) -> str:
    """Pick alternatives and fill slots, without noise."""
    text = choose(parse(template), rng)
    return fill_slots(text, slots) if slots else text


def fill_slots(text: str, slots: Mapping[str, object]) -> str:
    return SLOT.sub(lambda match: str(slots[match.group(1)]), text)


def compose(template: str, rng: Random, slots: Mapping[str, object]) -> str:
    """Pick alternatives, add noise to the literal text, then fill the slots."""
    text = choose(parse(template), rng)
    text = re.sub("~", lambda _: make_tail(rng), text)
    text = re.sub("@@", lambda _: make_sentence(rng) if chance(rng, 0.5) else "", text)
    # A double space is left by an empty alternative; longer ones are columns.
    text = re.sub(r"(?<! )  (?! )", " ", _roughen(text, rng))
    text = fill_slots(text, slots)
    text = re.sub(r"(?<!\.)\.\.(?!\.)", ".", text)
    return re.sub(r" +\n", "\n", text).strip()


def compose_sentence(template: str, rng: Random, slots: Mapping[str, object]) -> str:
    """Like `compose`, with a capital at the start unless the sentence starts with a slot."""
    return compose(capitalize(expand(template, rng)), rng, slots)


def _roughen(text: str, rng: Random) -> str:
    """Typos and careless case in the literal text of a few documents."""
    style = rng.random()
    if style > 0.13:
        return text
    pieces = re.split(r"(<[a-z_]+>)", text)
    for i in range(0, len(pieces), 2):
        if style < 0.05:
            pieces[i] = pieces[i].lower()
        elif style < 0.065:
            pieces[i] = pieces[i].upper()
        else:
            pieces[i] = re.sub(r"[a-z]{5,}", lambda match: _mistype(match.group(), rng), pieces[i])
    return "".join(pieces)


def _mistype(word: str, rng: Random) -> str:
    if rng.random() > 0.12:
        return word
    i = rng.randrange(1, len(word) - 1)
    swapped = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return rng.choice([swapped, word[:i] + word[i + 1 :], word[:i] + word[i] + word[i:]])


def _thing(rng: Random) -> str:
    owner = rng.choice(
        ["the", "a", "our", "their", "my", "your", "this", "every", "one", "his", "her", "some"]
    )
    adjective = rng.choice(words("describing")) + " " if chance(rng, 0.45) else ""
    return f"{owner} {adjective}{rng.choice(words('nouns_what'))}"


def _who(rng: Random) -> str:
    if chance(rng, 0.5):
        return rng.choice(["we", "they", "I", "she", "he", "you", "people", "everyone", "nobody", "someone"])
    adjective = rng.choice(words("describing")) + " " if chance(rng, 0.3) else ""
    return (
        f"{rng.choice(['the', 'our', 'their', 'my', 'a', 'one'])} {adjective}{rng.choice(words('nouns_who'))}"
    )


def make_clause(rng: Random) -> str:
    """An arbitrary English clause: grammatical, meaning nothing."""
    clause = f"{_who(rng)} {rng.choice(words('verbs'))} {_thing(rng)}"
    if chance(rng, 0.4):
        clause += f" {rng.choice(words('prepositions'))} {_thing(rng)}"
    if chance(rng, 0.25):
        clause += " " + rng.choice(words("when"))
    return clause


def make_sentence(rng: Random) -> str:
    """A sentence that holds nothing to extract: an everyday one, or arbitrary clauses."""
    if chance(rng, 0.6):
        return expand(rng.choice(read_sections("filler")["sentences"]), rng)
    sentence = make_clause(rng)
    if chance(rng, 0.15):
        sentence += rng.choice(
            [", and ", ", but ", ", so ", " because ", " while ", " although "]
        ) + make_clause(rng)
    if chance(rng, 0.15):
        sentence = rng.choice(words("when")) + rng.choice([" ", ", "]) + sentence
    return capitalize(sentence) + rng.choice([".", ".", ".", "!"])


def make_tail(rng: Random) -> str:
    """Text that may follow a slot inside a sentence; empty more often than not."""
    if chance(rng, 0.55):
        return ""
    if chance(rng, 0.2):
        return rng.choice([" ", ", "]) + rng.choice(words("when"))
    if chance(rng, 0.12):
        return f" {rng.choice(words('prepositions'))} {_thing(rng)}"
    if chance(rng, 0.12):
        return f"{rng.choice([' and ', ', which ', ', who '])}{rng.choice(words('verbs'))} {_thing(rng)}"
    joint = rng.choice(
        [", so ", " because ", " while ", " - ", ", and ", " if ", " when ", ", where ", ", but ", " ("]
    )
    return joint + make_clause(rng) + (")" if joint == " (" else "")


def join_list(items: Sequence[str], rng: Random) -> str:
    """The items as running text: commas, "and", slashes or semicolons."""
    if len(items) == 1:
        return items[0]
    style = rng.random()
    if style < 0.42:
        return ", ".join(items[:-1]) + rng.choice([" and ", " and ", " & ", " plus "]) + items[-1]
    if style < 0.58:
        return ", ".join(items[:-1]) + ", and " + items[-1]
    if style < 0.84:
        return ", ".join(items)
    return rng.choice([" / ", "; ", " + ", ". ", " · "]).join(items)


def join_bullets(items: Sequence[str], rng: Random) -> str:
    """The items on lines of their own, with bullets or numbers."""
    mark = rng.choice(["- ", "* ", "• ", "– ", "+ ", "", "# "])
    if mark == "# ":
        return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    return "\n".join(mark + item for item in items)
