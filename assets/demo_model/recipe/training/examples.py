"""Training examples: which document, schema and prompt style comes next, and which tokens count in the loss."""

import json
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..prompt import SPECIAL_TOKENS, SYSTEM_PROMPT, Message, extraction_prompt, list_fields, minify
from ..writing.chat import ask_for, sample_chat
from ..writing.documents import Document, write_document
from ..writing.drafts import Record
from ..writing.entities import point
from ..writing.invented import invent
from ..writing.kinds import KINDS
from ..writing.longer import lengthen
from ..writing.phrases import chance
from ..writing.scenes import play
from ..writing.schemas import Schema, vary

# The kinds that are hardest to learn come more often.
KIND_WEIGHTS = {
    "contact": 1.2,
    "invoice": 1.5,
    "event": 1.5,
    "job_posting": 1.4,
    "support_ticket": 1.4,
    "product": 1.3,
    "shipment": 1.1,
    "review": 1.3,
}
KEY_WEIGHT = 0.3  # loss weight of the keys when the prompt names them
BLIND_KEY_WEIGHT = 0.1  # the same when it does not: the grammar will force them

DECISION_WEIGHT = 2.0

Span = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One dialogue in tokens.

    `weights[i]` is the loss weight of predicting `token_ids[i]`; `spans` are the token ranges of the
    record's values, for the field accuracy of the development set. Several dialogues with one beginning
    may follow it as branches that do not see each other: `places` are the positions of the tokens in their
    own dialogue.
    """

    kind: str
    token_ids: NDArray[np.uint16]
    weights: NDArray[np.float16]
    spans: tuple[Span, ...]
    places: NDArray[np.uint16]
    branches: NDArray[np.uint8]


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
    if style < 0.85:
        user = extraction_prompt(schema, document.text)
        if chance(rng, 0.06):
            user = f"Document:\n{document.text}\n\nSchema:\n{minify(schema)}"
        if chance(rng, 0.08):
            user = f"{ask_for('schema_opening', rng)}\n\n{user}"
        return _with_system(user, 0.85, rng), KEY_WEIGHT
    if style < 0.95:
        user = f"Fields:\n{list_fields(schema)}\n\nDocument:\n{document.text}"
        return _with_system(user, 0.5, rng), KEY_WEIGHT
    return _with_system(f"{ask_for('blind_opening', rng)}\n{document.text}", 0.4, rng), BLIND_KEY_WEIGHT


def _with_system(user: str, share: float, rng: Random) -> list[Message]:
    system: list[Message] = [{"role": "system", "content": SYSTEM_PROMPT}] if chance(rng, share) else []
    return [*system, {"role": "user", "content": user}]


def sample_extraction(
    rng: Random, long_share: float, full_share: float = 0.4, num_documents: int = 1
) -> tuple[list[Document], Schema]:
    """One or more documents and the schema that asks for (some of) their records."""
    draw = rng.random()
    if draw < 0.2:
        documents, schema = _listed(invent(rng))
    elif draw < 0.74:
        documents, schema = play(rng, num_documents)
    elif draw < 0.76:
        documents, schema = _listed(point(rng))
    else:
        kind = rng.choices(list(KIND_WEIGHTS), weights=list(KIND_WEIGHTS.values()))[0]
        seed = rng.random()
        documents = []
        for _ in range(num_documents):
            document = write_document(kind, rng)
            # The same seed varies the schema in the same way for every record.
            schema, record = vary(kind, document.record, Random(seed), full_share)
            documents.append(Document(kind, document.text, record))
    if chance(rng, long_share):
        documents = [lengthen(documents[0], rng)]
    return documents, schema


def _listed(pair: tuple[Document, Schema]) -> tuple[list[Document], Schema]:
    return [pair[0]], pair[1]


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

    def extraction(
        self,
        kind: str,
        prompt: list[Message],
        record: Record,
        key_weight: float,
        decisive: frozenset[str] = frozenset(),
    ) -> Example:
        """A prompt and its answer; the values of the `decisive` fields are decisions, not copies."""
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
            # From the colon on: its token tells null from a string, whose quotation mark it may hold.
            inside = [i for i, (begin, end) in enumerate(encoded.offsets) if begin < last and end > first - 2]
            spans.append((name, starts + inside[0], starts + inside[-1] + 1))
            # Where a copy begins and what a choice is are hard; that a copied word goes on is easy.
            for i in inside if name in decisive else inside[:2]:
                body_weights[i] = DECISION_WEIGHT
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
    places, branches = np.arange(len(ids), dtype=np.uint16), np.zeros(len(ids), np.uint8)
    return Example(kind, np.array(ids, np.uint16), np.array(weights, np.float16), spans, places, branches)


def share_beginning(examples: list[Example]) -> Example:
    """One example whose branches are the examples behind their common beginning."""
    first = examples[0]
    longest = min(len(example.token_ids) for example in examples)
    stacked = np.stack([example.token_ids[:longest] for example in examples])
    common = int((stacked == stacked[0]).all(0).argmin())
    # At least the last prompt token must be a branch's own: it predicts the first answer token.
    common = min(common, *(int((example.weights > 0).argmax()) - 1 for example in examples))
    shifts = np.cumsum([0, *(len(example.token_ids) - common for example in examples[:-1])])
    spans = [
        (name, begin + int(shift), end + int(shift))
        for example, shift in zip(examples, shifts, strict=True)
        for name, begin, end in example.spans
    ]
    branches = [np.full(len(e.token_ids) - common, i, np.uint8) for i, e in enumerate(examples, 1)]
    return Example(
        first.kind,
        np.concatenate([first.token_ids[:common], *(e.token_ids[common:] for e in examples)]),
        np.concatenate([first.weights[:common], *(e.weights[common:] for e in examples)]),
        tuple(spans),
        np.concatenate([first.places[:common], *(e.places[common:] for e in examples)]),
        np.concatenate([first.branches[:common], *branches]),
    )


def find_decisive(schema: Schema) -> frozenset[str]:
    """Names of the fields whose value is chosen or reckoned rather than copied as text."""
    fields = schema["properties"].items()
    return frozenset(
        name
        for name, field in fields
        if "enum" in field or field.get("type") in ("boolean", "integer", "number")
    )


def sample_example(
    encoder: Encoder,
    rng: Random,
    long_share: float = 0.0,
    full_share: float = 0.4,
    num_branches: int = 1,
    chat_share: float = 0.1,
) -> Example:
    """A fresh example of the mix, with up to `num_branches` documents under one schema."""
    if chance(rng, chat_share):
        return encoder.chat(sample_chat(rng))
    documents, schema = sample_extraction(rng, long_share, full_share, rng.randrange(num_branches) + 1)
    seed, decisive = rng.random(), find_decisive(schema)
    examples = []
    for document in documents:
        prompt, key_weight = ask(document, schema, Random(seed))
        examples.append(encoder.extraction(document.kind, prompt, document.record, key_weight, decisive))
    return share_beginning(examples) if len(examples) > 1 else examples[0]


assert set(KIND_WEIGHTS) == set(KINDS), "a weight for every kind"
