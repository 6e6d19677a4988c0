"""Scores: token-level accuracy under teacher forcing, and field accuracy of whole records."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from .batches import Batch
from .drafts import Record
from .examples import Example
from .model import Decoder

Figures = dict[str, float | dict[str, float]]


@torch.no_grad()
def score_development(
    model: Decoder, examples: list[Example], make_batch: Callable[[list[Example]], Batch], rows: int = 16
) -> Figures:
    """Share of record values whose tokens are all predicted right, per kind; chat scores whole answers."""
    right: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    ordered = sorted(examples, key=lambda example: len(example.token_ids))
    for start in range(0, len(ordered), rows):
        group = ordered[start : start + rows]
        batch = make_batch(group)
        hits = model.logits_at(batch.token_ids, batch.positions).argmax(-1) == batch.targets
        table = torch.ones(batch.token_ids.numel(), dtype=torch.bool)
        table[batch.positions] = hits
        table = table.view(batch.token_ids.shape)
        for row, example in enumerate(group):
            spans = example.spans or (("reply", 1, len(example.token_ids)),)
            right[example.kind] += sum(bool(table[row, begin - 1 : end - 1].all()) for _, begin, end in spans)
            count[example.kind] += len(spans)
    kinds = {kind: round(right[kind] / count[kind], 3) for kind in sorted(count)}
    fields = [kind for kind in count if kind != "chat"]
    total = sum(right[kind] for kind in fields) / max(1, sum(count[kind] for kind in fields))
    return {"field": round(total, 4), "kinds": kinds}


def normalize(value: Any) -> Any:
    """The form in which values are compared: trimmed and case-folded strings, numbers as floats."""
    if isinstance(value, str):
        return value.strip().casefold()
    if isinstance(value, bool) or value is None:
        return repr(value), "literal"  # never equal to a number
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict):
        return tuple(sorted((name, normalize(inner)) for name, inner in value.items()))
    return [normalize(item) for item in value]


def score_field(found: Any, wanted: Any) -> float:
    """1 or 0 for scalars, F1 over the items for lists."""
    a, b = normalize(found), normalize(wanted)
    if not isinstance(b, list):
        return float(a == b)
    if not isinstance(a, list) or (not a) != (not b):
        return 0.0
    if not b:
        return 1.0
    shared = sum(min(a.count(item), b.count(item)) for item in {repr(x): x for x in b}.values())
    return 2 * shared / (len(a) + len(b))


def score_record(found: Record | None, wanted: Record) -> dict[str, float]:
    """The score of each wanted field; all zero when nothing was found."""
    return {name: score_field((found or {}).get(name), value) for name, value in wanted.items()}
