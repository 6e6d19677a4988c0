"""DraftCounts: how many drafts are worth their time."""

from __future__ import annotations

import numpy as np

from engine.spec.draft_record import Draft
from engine.spec.step_costs import StepCosts
from engine.speculative_config import SpeculativeConfig

MAX_RATE = 0.99
MAX_KNOWN = 4096


class DraftCounts:
    """Numbers of drafts that raise the expected tokens per second of a step, from acceptances and step times."""

    def __init__(self, config: SpeculativeConfig, costs: StepCosts) -> None:
        self._config = config
        self._costs = costs
        self._known: dict[tuple[float, int, int, bool, float], int] = {}
        self._version = -1  # of the costs behind the known numbers

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

    def choose(
        self, rate: float, num_drafting: int, num_rows: int, *, has_device_cost: bool = False,
        host_s: float = 0.0,
    ) -> int:
        """Return the number of drafts per row with the most tokens per second, if all rows that draft are alike.

        Args:
            rate: acceptance of each draft.
            num_drafting, num_rows: rows of the step that draft, and all.
            has_device_cost: proposing takes time of the device.
            host_s: time of proposing for all rows, while the device waits.
        """
        limit = self._config.limit_drafts(num_rows)
        if not self._config.adaptive:
            return limit
        if self._version != self._costs.version or len(self._known) > MAX_KNOWN:
            self._known.clear()
            self._version = self._costs.version
        key = (round(min(rate, MAX_RATE), 2), num_drafting, num_rows, has_device_cost, round(host_s, 5))
        if key not in self._known:
            depths = np.arange(limit + 1)
            more = num_drafting * key[0] * (1 - key[0] ** depths) / (1 - key[0])
            expected = num_rows + self._costs.value_token(num_rows, num_drafting) * more
            times = self._costs.estimate_range(num_rows, num_drafting * limit)[depths * num_drafting]
            times = times + np.where(depths > 0, self._costs.gap_s + key[4], self._costs.idle_s)
            if has_device_cost:
                times += [self._costs.estimate_drafts(depth) for depth in depths.tolist()]
            self._known[key] = int((expected / times).argmax())
        return self._known[key]
