"""DraftBudget: bounds what a source of drafts may lose, over all requests."""

from __future__ import annotations

LOSS_SHARE = 0.01  # of the time of all steps
MIN_CREDIT, MAX_CREDIT = 16, 64  # steps whose time a source may lose, before its first success and after many


class DraftBudget:
    """The seconds that each source has saved, minus those it has cost.

    A source in debt is not used, until LOSS_SHARE of the time of the following steps has paid the debt. So no source
    slows the engine down by more than that share, whatever the requests are.

    Args:
        step_s: time of a step of one token.
    """

    def __init__(self, step_s: float) -> None:
        self._first, self._most = MIN_CREDIT * step_s, MAX_CREDIT * step_s
        self._balances: dict[str, float] = {}

    def add(self, source: str, seconds: float) -> None:
        """Add seconds saved; costs are negative."""
        self._balances[source] = min(self._balances.get(source, self._first) + seconds, self._most)

    def note_step(self, seconds: float) -> None:
        """Take the time of a step."""
        for source in self._balances:
            self.add(source, LOSS_SHARE * seconds)

    def allows(self, source: str) -> bool:
        return self._balances.get(source, 0.0) >= 0.0
