"""What the model weighed for each value: the taken token of its least sure place, and the most likely others there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.extraction.confidence import find_free, score_tokens
from app.extraction.result import ExtractionResult
from app.extraction.schema_places import list_places
from engine import Engine, Logprob, TokenLogprobs

# Alternatives that are recorded for each token, and those that are shown.
NUM_RIVALS, NUM_SHOWN = 5, 2
MIN_SHARE = 0.001
# A value, as far as it is known, and the probability of the token that decided for it.
Weighed = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The closest choice within one value; probabilities are those before the grammar's mask."""

    taken: Weighed
    rivals: tuple[Weighed, ...]
    forbidden: tuple[Weighed, ...]  # likely, but not allowed by the schema


def find_choices(result: ExtractionResult, engine: Engine, source: str) -> dict[str, Choice]:
    """Return the closest choice of each value by pointer; values that the schema alone decided are left out."""
    completion = result.output.outputs[0] if result.output else None
    if completion is None or not completion.logprobs or engine.tokenizer is None:
        return {}
    feed_token = engine.tokenizer.make_text().feed_token
    tokens = score_tokens(completion.text, completion.token_ids, completion.logprobs, feed_token)
    found = {}
    for leaf, free in find_free(result.leaves, tokens):
        at = min(free, key=lambda each: tokens[each].logprob)
        position = describe_position(completion.logprobs[at])
        before = completion.text[leaf.start : max(tokens[at].start, leaf.start)]
        others = [each for each in position["top"] if each["text"] != position["text"] and each["p"] >= MIN_SHARE]
        taken = _weigh(before, position)
        # Several tokens may end a value alike.
        rivals = dict(reversed([_weigh(before, each) for each in others if each["pm"] != 0]))
        rivals.pop(taken[0], None)
        places = list_places(result.bounds.schema, leaf.pointer)
        known = [str(value) for place in places for value in place.get("enum", ())]
        whole = completion.text[leaf.start : leaf.end].strip('"')
        forbidden = [(each["text"].strip() or "a space", each["p"]) for each in others if each["pm"] == 0]
        best = tuple((_complete(text, known, source), share) for text, share in reversed(rivals.items()))
        found[leaf.pointer] = Choice((whole, taken[1]), best[:NUM_SHOWN], tuple(forbidden[:NUM_SHOWN]))
    return found


def _weigh(before: str, token: dict[str, Any]) -> Weighed:
    """Return the value with the token as its last; a token that ends the value adds nothing."""
    text = token["text"].lstrip() if not before else token["text"]
    is_end = bool(before.strip('"')) and text[:1] in ('"', ",", "}", "]", "\n", "")
    whole = before if is_end else before + text
    return whole.strip('"').rstrip(",\n") + ("" if is_end else "…"), token["p"]


def _complete(text: str, known: Sequence[str], source: str) -> str:
    """Return the one value of the schema that begins so, or up to the end of the word that the source has there."""
    start = text.removesuffix("…")
    if start == text:
        return text
    fitting = [value for value in known if value.startswith(start)]
    words = {*re.findall(rf"(?<!\w){re.escape(start)}\w*", source)} if start.strip() else ()
    return fitting[0] if len(fitting) == 1 else f"{min(words)}…" if len(words) == 1 else text


def describe_position(position: TokenLogprobs) -> dict[str, Any]:
    """Return the sampled token and its alternatives, with probabilities before and after the mask."""
    return {
        **_describe_token(position.token), "rank": position.token.rank, "source": position.draft_source,
        "top": [_describe_token(each) for each in position.top],
    }


def _describe_token(token: Logprob) -> dict[str, Any]:
    masked = token.masked_logprob
    return {
        "text": token.decoded_token,
        "p": _to_probability(token.logprob),
        "pm": None if masked is None else _to_probability(masked),
    }


def _to_probability(logprob: float) -> float:
    return round(math.exp(logprob), 5) if logprob > -math.inf else 0.0
