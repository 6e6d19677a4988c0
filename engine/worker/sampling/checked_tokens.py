"""check_tokens: draws the rows again whose tokens, drawn without a mask, their grammars do not allow."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engine.core.quick_matchers import QuickMatchers
from engine.worker.sampling.drafts import SampleRuns
from engine.worker.sampling.sampler import Sampler


def check_tokens(
    sampler: Sampler, matchers: QuickMatchers, handles: Mapping[int, int], runs: SampleRuns, logits: Tensor,
    token_ids: Tensor,
) -> None:
    """Advance the matchers by the drawn tokens, which are replaced where a grammar does not allow them.

    Args:
        handles: by index in the step, of the rows to check.
        runs: without drafts.
        logits: [R, V] float32 on the host, as they were before the draw.
        token_ids: [R] int64, drawn without masks; changed in place.
    """
    drawn, values = token_ids.numpy(), logits.numpy()
    again: list[int] = []
    for place, (index, token_id) in enumerate(zip(runs.indices.tolist(), drawn.tolist(), strict=True)):
        if (handle := handles.get(index)) is not None:
            best_id = int(values[place].argmax())
            if not matchers.accept(handle, token_id, best_id):
                again.append(place)
    if not again:
        return
    refused = [handles[index] for index in runs.indices[again].tolist()]
    bitmask = matchers.fill(refused)
    drawn[again] = sampler.sample(logits[again], runs.rows[again], runs.ends[again], bitmask).token_ids.numpy()
    for handle, token_id in zip(refused, drawn[again].tolist(), strict=True):
        matchers.take(handle, token_id)
