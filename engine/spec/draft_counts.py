"""DraftCounts: how many drafts are worth their time."""

from __future__ import annotations

import numpy as np

from engine.spec.draft_record import Draft
from engine.spec.step_costs import StepCosts
from engine.speculative_config import SpeculativeConfig

MAX_RATE = 0.99


class DraftCounts:
    """Numbers of drafts that raise the expected tokens per second of a step, from acceptances and step times."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts) -> None:
        self._config = config
        self._costs = costs

    def cut(
        self, drafts: dict[int, Draft], num_tokens: int, num_samples: int, budget: int
    ) -> dict[int, Draft]:
        """Keep the drafts that raise the expected tokens per second; those most likely right come first.

        A draft is right with the product of the acceptances up to its position. `num_tokens` and `num_samples` are
        those of the step without drafts.
        """
        if not drafts:
            return drafts
        lengths = np.array([len(each.token_ids) for each in drafts.values()])
        rates = np.array([each.rate for each in drafts.values()])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        depths = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = rates[rows] ** (depths + 1)
        order = np.argsort(-values, kind="stable")[: max(budget, 0)]
        count = len(order)
        if self._config.adaptive:
            expected = num_samples + np.concatenate(([0.0], np.cumsum(values[order])))
            times = self._costs.estimate_range(num_tokens, count) + self._costs.gap_s
            count = int((expected / times).argmax())
        kept = np.bincount(rows[order[:count]], minlength=len(lengths)).tolist()
        return {
            slot: draft._replace(token_ids=draft.token_ids[:length])
            for (slot, draft), length in zip(drafts.items(), kept, strict=True)
            if length
        }

    def choose(self, rates: np.ndarray, num_rows: int) -> np.ndarray:
        """Return how many drafts of the device save each row that drafts the most time.

        Args:
            rates: acceptance of each row's drafts.
            num_rows: rows of the step.
        """
        limit, num_drafting, costs = self._config.limit_drafts(num_rows), len(rates), self._costs
        if not self._config.adaptive:
            return np.full(num_drafting, limit)
        depths = np.arange(limit + 1)
        rights = np.cumsum(np.minimum(rates, MAX_RATE)[:, None] ** depths, axis=1) - 1
        more_s = costs.estimate_range(num_rows, num_drafting * limit)[depths * num_drafting] - costs.estimate(num_rows)
        more_s[1:] += costs.gap_s - costs.idle_s
        more_s += [costs.estimate_drafts(depth) for depth in range(limit + 1)]
        saved_s: np.ndarray = costs.price_token(num_rows, num_drafting) * rights - more_s / max(1, num_drafting)
        return saved_s.argmax(axis=1)
