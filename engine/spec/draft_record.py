"""DraftRecord: the sources of one request, how often their drafts were right, and what they have saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 0.1  # weight of a new draft in the acceptance of one request
LONG_MEMORY = 0.02  # and in that of all requests
MIN_PAUSE, MAX_PAUSE = 8, 256  # tokens for which a source that loses time is not used
GAIN_MEMORY = 0.25  # weight of a new step in what a source saves
PROBE_RATE = 0.6  # acceptance assumed of a source that is tried again after a pause
NEVER = 2**62


class Draft(NamedTuple):
    """Draft tokens for the next step of a request."""

    source: str
    token_ids: Sequence[int]
    rate: float  # estimated probability that each token is right, if those before it are
    states: list[int] | None = None  # slots for the states before each draft; None: the model has none


class SourceRecord:
    """One source's success with one request.

    Attributes:
        gain_s: moving average of the seconds that a step with this source saves; None: the next step is a probe.
        pause: tokens of the next rest; it doubles with each rest and starts again when the source saves time.
        resume_at: number of tokens of the request from which the source is used.
    """

    __slots__ = ("gain_s", "num_accepted", "num_drafted", "pause", "rate", "resume_at")

    def __init__(self, rate: float, pause: int) -> None:
        self.rate = rate
        self.pause = pause
        self.resume_at = 0
        self.num_drafted = self.num_accepted = 0
        self.gain_s: float | None = None

    def note(self, num_drafted: int, num_accepted: int) -> None:
        # The first results count more than the rate that was assumed before them.
        weight = max(MEMORY, 1.0 / (3 + self.num_drafted))
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.rate = update_rate(self.rate, num_drafted, num_accepted, weight)

    def note_gain(self, seconds: float, first_s: float) -> bool:
        """Take the seconds saved by one step. Returns whether the source pays.

        The average of a probe starts at `first_s`, so that a failure which costs little is not enough.
        """
        before = first_s if self.gain_s is None else self.gain_s
        self.gain_s = before + GAIN_MEMORY * (seconds - before)
        if seconds > 0:
            self.pause = MIN_PAUSE
        return self.gain_s >= 0

    def rest(self, num_tokens: int) -> None:
        """Do not use the source for some tokens, each time for twice as many; then probe it."""
        self.resume_at = num_tokens + self.pause
        self.pause = min(2 * self.pause, MAX_PAUSE)
        self.rate = max(self.rate, PROBE_RATE)
        self.gain_s = None


class DraftRecord:
    """The sources of one request.

    Attributes:
        awaited: the source for which the request last waited.
        offered: drafts proposed elsewhere, source -> (number of tokens that they follow, token ids).
    """

    __slots__ = ("awaited", "offered", "sources")

    def __init__(self, sources: dict[str, SourceRecord]) -> None:
        self.sources = sources
        self.awaited = next(reversed(sources))
        self.offered: dict[str, tuple[int, Sequence[int]]] = {}

    def is_active(self, name: str | None, num_tokens: int) -> bool:
        """Whether the request has this source, and it does not rest."""
        return name in self.sources and num_tokens >= self.sources[name].resume_at

    def find_wake(self, num_tokens: int) -> int:
        """Return the number of tokens, from `num_tokens`, at which the first source does not rest."""
        return max(num_tokens, min(source.resume_at for source in self.sources.values()))

    def count(self) -> dict[str, tuple[int, int]]:
        """Return source -> (drafted tokens, accepted ones)."""
        return {
            name: (source.num_drafted, source.num_accepted)
            for name, source in self.sources.items()
            if source.num_drafted
        }


def update_rate(rate: float, num_drafted: int, num_accepted: int, weight: float = MEMORY) -> float:
    """Return the moving average after `num_accepted` right tokens and, unless all were right, a wrong one."""
    for _ in range(num_accepted):
        rate += weight * (1.0 - rate)
    return rate if num_accepted == num_drafted else rate * (1.0 - weight)
