"""Short dialogues: who the model is, how Troupe works, polite refusals, small tasks with the user's own words."""

import re
from collections.abc import Callable
from random import Random

from ..prompt import Message
from . import goods, values
from .documents import write_document
from .kinds import KINDS
from .phrases import capitalize, chance, expand, make_sentence
from .tables import read_sections, words

Exchange = tuple[str, str]
Style = Callable[[str], str]

# Questions that newcomers ask first.
FIRST_ASKED = ("greeting", "who", "who", "who", "not_other", "can", "cannot", "size", "training", "troupe")
QUESTION = re.compile(r"(what|who|how|are|can|do|is|which|where|why|should|will|when|does)\b", re.IGNORECASE)


def ask_for(section: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """A random phrase of one section of `asking.txt`."""
    return expand(rng.choice(read_sections("asking")[section]), rng, slots)


def type_question(text: str, rng: Random) -> str:
    """The text as people type it: case, question mark, a typo, a polite opening."""
    if chance(rng, 0.15):
        text = ask_for("opening", rng) + text
    text = capitalize(text) if chance(rng, 0.65) else text.lower() if chance(rng, 0.4) else text
    if chance(rng, 0.06) and len(text) > 12:
        i = rng.randrange(3, len(text) - 3)
        text = text[:i] + text[i + 1 :]
    asks = QUESTION.match(text.split(", ")[-1]) is not None
    return text + rng.choice(["?", "?", "?", "", "??"] if asks else ["", "", ".", "!"])


def intent(rng: Random) -> Exchange:
    """A question and its answer from the table; refusals and who the model is come more often than the rest."""
    table = read_sections("chat")
    draw = rng.random()
    name = "offtopic" if draw < 0.16 else rng.choice(FIRST_ASKED if draw < 0.4 else list(table))
    lines = table[name]
    question = rng.choice([line[3:] for line in lines if line.startswith("Q: ")])
    if name != "greeting" and chance(rng, 0.12):
        question = ask_for("greeting_first", rng) + question
    reply = rng.choice([line[3:] for line in lines if line.startswith("A: ")])
    slots = {
        "place": values.city(rng),
        "name": values.person(rng),
        "company": values.company(rng),
        "product": goods.product(rng),
        "topic": rng.choice(words("things") + words("topics")),
        "a": rng.randrange(2, 99),
        "b": rng.randrange(2, 99),
        "year": rng.randrange(1950, 2027),
    }
    return type_question(expand(question, rng, slots), rng), reply


def ask_topic(rng: Random) -> Exchange:
    """A question about one of the topics of `chat_topics.txt`, in one of the frames of its section."""
    sections = read_sections("chat_topics")
    name = rng.choices(list(sections), weights=[len(lines) for lines in sections.values()])[0]
    names, reply = rng.choice(sections[name]).split(" => ")
    question = ask_for(f"{name}_frames", rng, {"t": rng.choice(names.split("|"))})
    return type_question(question, rng), reply


def learned_replies() -> set[str]:
    """Every reply of the tables that holds no words of the user."""
    replies = {
        line[3:] for lines in read_sections("chat").values() for line in lines if line.startswith("A: ")
    }
    return replies | {
        line.split(" => ")[1] for lines in read_sections("chat_topics").values() for line in lines
    }


def greet_by_name(rng: Random) -> tuple[Exchange, str]:
    name = rng.choice([values.person, values.first_name])(rng)
    said = ask_for("name_given", rng, {"n": name})
    return (said, f"Nice to meet you, {name}! What can I do for you?"), name


def recall_name(name: str | None, rng: Random) -> Exchange:
    reply = f"Your name is {name}." if name else "You have not told me your name yet."
    return type_question(ask_for("name_asked", rng), rng), reply


def echo(rng: Random) -> Exchange:
    makers = [
        values.person,
        goods.product,
        values.company,
        values.code,
        goods.feature,
        goods.event_title,
        make_sentence,
    ]
    text = rng.choice(makers)(rng)
    if chance(rng, 0.2):
        return expand('{Say|Write|Repeat} "<w>"{.|}', rng, {"w": text}), text
    if chance(rng, 0.15):
        return expand("{Say|Write} <w> {twice|two times}", rng, {"w": text}), f"{text} {text}"
    return expand(
        "{Repeat after me|Repeat|Say|Please say|Echo|Write|Please repeat}: <w>", rng, {"w": text}
    ), text


ASKED = {
    "contact": {
        "email": "e-mail address|email",
        "company": "company",
        "title": "job title|role",
        "name": "name of the person|name",
    },
    "invoice": {"invoice_number": "invoice number", "vendor": "vendor|seller|name of the seller"},
    "event": {
        "location": "location|place|venue",
        "organizer": "organizer|host",
        "title": "name of the event|event",
    },
    "job_posting": {"company": "company|employer", "location": "location|city", "position": "position|job"},
    "support_ticket": {"customer_name": "name of the customer|customer", "product": "product"},
    "product": {"name": "product|name of the product"},
    "shipment": {
        "tracking_number": "tracking number",
        "carrier": "carrier",
        "destination": "destination",
        "recipient": "recipient",
    },
    "review": {"product": "product"},
}


def ask_about_text(rng: Random) -> Exchange:
    """A question about a pasted text, answered with a value from it."""
    kind = rng.choice(list(KINDS))
    document = write_document(kind, rng)
    field = rng.choice(list(ASKED[kind]))
    label = rng.choice(ASKED[kind][field].split("|"))
    question, lead = ask_for("value_asked", rng, {"f": label}), ask_for("text_lead", rng)
    text = f"{lead}{document.text}\n\n{question}" if chance(rng, 0.7) else f"{question}\n\n{document.text}"
    return text, str(document.record[field])


def make_style(rng: Random) -> tuple[str, Style]:
    """A one-line system prompt and what it does to every answer."""
    style = rng.random()
    if style < 0.45:
        return ask_for("plain_system", rng), lambda text: text
    if style < 0.6:
        return expand(
            "{Reply|Answer|Write|Always answer|Speak} in {upper case|capital letters|uppercase|all caps}.",
            rng,
        ), str.upper
    if style < 0.7:
        return expand("{Reply|Answer|Write} in {lower case|lowercase|small letters}.", rng), str.lower
    mark = rng.choice(
        [
            "Over and out.",
            "Have a nice day!",
            "Meow.",
            "Arr!",
            "Ahoy!",
            f"{values.make_name(rng)}!",
            f"{values.make_name(rng)}.",
        ]
    )
    if style < 0.85:
        line = expand(
            '{Always end with|End every answer with|Finish each reply with} "<m>"', rng, {"m": mark}
        )
        return line, lambda text: f"{text} {mark}"
    line = expand('{Always start with|Begin every answer with|Start each reply with} "<m>"', rng, {"m": mark})
    return line, lambda text: f"{mark} {text}"


def say_who(rng: Random) -> list[Message]:
    """A system prompt that may name the assistant, and the question for it: only a name given there is taken."""
    lines = read_sections("chat")["who"]
    question = expand(rng.choice([line[3:] for line in lines if line.startswith("Q: ")]), rng)
    if chance(rng, 0.25):
        question = ask_for("greeting_first", rng) + question
    if chance(rng, 0.6):
        system = ask_for("plain_system", rng)
        reply = rng.choice([line[3:] for line in lines if line.startswith("A: ")])
    else:
        name = rng.choice([values.make_name(rng, 2), rng.choice(words("first_names"))])
        system = ask_for("naming_system", rng, {"n": name})
        reply = f"My name is {name}. I run on the Troupe demo model, a tiny language model."
    return messages(system, [(type_question(question, rng), reply)])


def messages(system: str, exchanges: list[Exchange]) -> list[Message]:
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for question, reply in exchanges:
        found += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return found


def sample_chat(rng: Random) -> list[Message]:
    """A dialogue of one to four exchanges, a third of them under a system prompt."""
    if chance(rng, 0.07):
        return say_who(rng)
    system, style = make_style(rng) if chance(rng, 0.35) else ("", lambda text: text)
    name: str | None = None
    exchanges: list[Exchange] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        draw = rng.random()
        if draw < 0.06 and (name or not exchanges):
            exchange = recall_name(name, rng)
        elif draw < 0.12:
            exchange, name = greet_by_name(rng)
        elif draw < 0.17:
            exchange = echo(rng)
        elif draw < 0.25:
            exchange = ask_about_text(rng)
        elif draw < 0.42:
            exchange = ask_topic(rng)
        else:
            exchange = intent(rng)
        exchanges.append((exchange[0], style(exchange[1])))
        if name and chance(rng, 0.4):
            question, reply = recall_name(name, rng)
            exchanges.append((question, style(reply)))
    return messages(system, exchanges)
