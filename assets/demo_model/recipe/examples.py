"""Training examples: which document, schema and prompt style comes next, and which tokens count in the loss."""

import json
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .chat import ask_for, sample_chat
from .documents import Document, write_document
from .drafts import Record
from .entities import point
from .invented import invent
from .kinds import KINDS
from .longer import lengthen
from .phrases import chance
from .prompt import SPECIAL_TOKENS, SYSTEM_PROMPT, Message, extraction_prompt, list_fields, minify
from .schemas import Schema, vary

# Kinds whose answers hold free lists come more often: lists are the hardest part.
KIND_WEIGHTS = {
    "contact": 1.1,
    "invoice": 1.0,
    "event": 1.1,
    "job_posting": 1.3,
    "support_ticket": 1.0,
    "product": 2.0,
    "shipment": 0.9,
    "review": 2.0,
}
KEY_WEIGHT = 0.3  # loss weight of the keys when the prompt names them
BLIND_KEY_WEIGHT = 0.1  # the same when it does not: the grammar will force them

Span = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One dialogue in tokens.

    `weights[i]` is the loss weight of predicting `token_ids[i]`; `spans` are the token ranges of the
    record's values, for the field accuracy of the development set.
    """

    kind: str
    token_ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A record as text with the character ranges of its keys and values."""

    text: str
    keys: tuple[tuple[int, int], ...]
    values: tuple[Span, ...]


def write_answer(record: Record) -> Answer:
    """The record as `json.dumps` writes it by default, without ASCII escapes."""
    text, keys, values = "{", [], []
    for i, (name, value) in enumerate(record.items()):
        text += ", " if i else ""
        key = json.dumps(name, ensure_ascii=False)
        keys.append((len(text), len(text) + len(key)))
        text += key + ": "
        written = json.dumps(value, ensure_ascii=False)
        values.append((name, len(text), len(text) + len(written)))
        text += written
    return Answer(text + "}", tuple(keys), tuple(values))


def ask(document: Document, schema: Schema, rng: Random) -> tuple[list[Message], float]:
    """The prompt in one of the three styles, and the loss weight of the answer's keys."""
    style = rng.random()
    if style < 0.62:
        user = extraction_prompt(schema, document.text)
        if chance(rng, 0.12):
            user = f"Document:\n{document.text}\n\nSchema:\n{minify(schema)}"
        if chance(rng, 0.15):
            user = f"{ask_for('schema_opening', rng)}\n\n{user}"
        return _with_system(user, 0.6, rng), KEY_WEIGHT
    if style < 0.85:
        user = f"Fields:\n{list_fields(schema)}\n\nDocument:\n{document.text}"
        return _with_system(user, 0.5, rng), KEY_WEIGHT
    return _with_system(f"{ask_for('blind_opening', rng)}\n{document.text}", 0.4, rng), BLIND_KEY_WEIGHT


def _with_system(user: str, share: float, rng: Random) -> list[Message]:
    system: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}] if chance(rng, share) else []
    return [*system, {"role": "user", "content": user}]


def sample_extraction(rng: Random, long_share: float, full_share: float = 0.4) -> tuple[Document, Schema]:
    """A document and a schema that asks for (some of) its record."""
    draw = rng.random()
    if draw < 0.26:
        document, schema = invent(rng)
    elif draw < 0.36:
        document, schema = point(rng)
    else:
        kind = rng.choices(list(KIND_WEIGHTS), weights=list(KIND_WEIGHTS.values()))[0]
        document = write_document(kind, rng)
        schema, record = vary(kind, document.record, rng, full_share)
        document = Document(kind, document.text, record)
    return (lengthen(document, rng), schema) if chance(rng, long_share) else (document, schema)


class Encoder:
    """Turns dialogues into tokens and loss weights."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end = SPECIAL_TOKENS.index("<|im_start|>"), SPECIAL_TOKENS.index("<|im_end|>")
        self.newline = tokenizer.encode("\n").ids
        self.roles = {
            role: [self.start, *tokenizer.encode(f"{role}\n").ids] for role in ("system", "user", "assistant")
        }

    def chat(self, messages: list[Message]) -> Example:
        ids, weights = self._prompt([])
        for message in messages:
            if message["role"] == "assistant":
                body = self.tokenizer.encode(message["content"]).ids
                self._append(ids, weights, "assistant", body, [1.0] * len(body), 1.0)
            else:
                body = self.tokenizer.encode(message["content"]).ids
                self._append(ids, weights, message["role"], body, [0.0] * len(body), 0.0)
        return _pack("chat", ids, weights, ())

    def extraction(self, kind: str, prompt: list[Message], record: Record, key_weight: float) -> Example:
        ids, weights = self._prompt(prompt)
        answer = write_answer(record)
        encoded = self.tokenizer.encode(answer.text)
        body_weights = [1.0] * len(encoded.ids)
        starts = len(ids) + len(self.roles["assistant"])
        for i, (begin, end) in enumerate(encoded.offsets):
            if any((begin >= first and end <= last) or first < begin < last for first, last in answer.keys):
                body_weights[i] = key_weight
        spans = []
        for name, first, last in answer.values:
            inside = [i for i, (begin, end) in enumerate(encoded.offsets) if begin < last and end > first]
            spans.append((name, starts + inside[0], starts + inside[-1] + 1))
        self._append(ids, weights, "assistant", encoded.ids, body_weights, 1.0)
        return _pack(kind, ids, weights, tuple(spans))

    def _prompt(self, prompt: list[Message]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for message in prompt:
            body = self.tokenizer.encode(message["content"]).ids
            self._append(ids, weights, message["role"], body, [0.0] * len(body), 0.0)
        return ids, weights

    def _append(
        self,
        ids: list[int],
        weights: list[float],
        role: str,
        body: list[int],
        body_weights: list[float],
        end_weight: float,
    ) -> None:
        head = self.roles[role]
        ids += [*head, *body, self.end, *self.newline]
        weights += [0.0] * len(head) + body_weights + [end_weight] + [0.0] * len(self.newline)


def _pack(kind: str, ids: list[int], weights: list[float], spans: tuple[Span, ...]) -> Example:
    return Example(kind, np.array(ids, np.uint16), np.array(weights, np.float16), spans)


def sample_example(
    encoder: Encoder, rng: Random, long_share: float = 0.0, full_share: float = 0.4, chat_share: float = 0.15
) -> Example:
    """A fresh example of the mix."""
    if chance(rng, chat_share):
        return encoder.chat(sample_chat(rng))
    document, schema = sample_extraction(rng, long_share, full_share)
    prompt, key_weight = ask(document, schema, rng)
    return encoder.extraction(document.kind, prompt, document.record, key_weight)


assert set(KIND_WEIGHTS) == set(KINDS), "a weight for every kind"
