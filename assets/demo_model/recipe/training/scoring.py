"""The token-level score under teacher forcing; `app.extraction.scoring` scores whole records."""

from collections import defaultdict
from collections.abc import Callable

import torch

from .batches import Batch
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
        logits = model.logits_at(batch.token_ids, batch.positions, batch.places, batch.branches)
        hits = logits.argmax(-1) == batch.targets
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
