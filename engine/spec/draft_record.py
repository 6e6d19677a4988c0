"""DraftRecord: the drafts of one request, and how often those of each source were right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MEMORY = 0.1  # weight of a new draft in the acceptance of one request
LONG_MEMORY = 0.02  # and in that of all requests
MIN_PAUSE, MAX_PAUSE = 8, 256  # tokens for which a source without success is not used
GAIN_MEMORY = 0.25  # weight of a new step in what a source saves
PROBE_RATE = 0.6  # assumed of a source that is tried again after a pause
MIN_LOOK, MAX_LOOK = 2, 16  # tokens between two looks for drafts while there are none
MAX_IDLE = 48  # answers without a draft, after which a source that must be asked rests
NEVER = 2**62


class Draft(NamedTuple):
    """Draft tokens for the next step of a request."""

    source: str
    token_ids: Sequence[int]
    rate: float  # estimated probability that each token is right, if those before it are
    states: list[int] | None = None  # slots for the states before each draft; None: the model has none


class SourceRecord:
    """One source's success with one request."""

    __slots__ = (
        *("_is_probe", "_num_idle", "_num_notes", "_pause", "gain_s", "num_accepted", "num_drafted", "rate"),
        "resume_at",
    )

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.resume_at = 0  # number of tokens of the request from which the source is used
        self.num_drafted = 0
        self.num_accepted = 0
        self._pause = MIN_PAUSE
        self._num_idle = 0
        self._is_probe = True
        self._num_notes = 0
        self.gain_s = 0.0  # moving average of the seconds that a step saves

    def note(self, num_drafted: int, num_accepted: int) -> None:
        # The first results count more than the rate that was assumed before them.
        weight = max(MEMORY, 1.0 / (3 + self.num_drafted))
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.rate = update_rate(self.rate, num_drafted, num_accepted, weight)

    def note_gain(self, seconds: float, first_s: float) -> None:
        """Take the seconds saved by one step. The average starts at `first_s`, so that one failure is not enough."""
        before = self.gain_s if self._num_notes else first_s
        self._num_notes += 1
        self.gain_s = before + GAIN_MEMORY * (seconds - before)

    def take_probe(self) -> bool:
        """Whether the source has not been tried since it last rested."""
        is_probe, self._is_probe = self._is_probe, False
        return is_probe

    def note_answer(self, has_drafts: bool, num_tokens: int) -> None:
        """Take an answer of a source that must be asked; after many empty ones it rests."""
        self._num_idle = 0 if has_drafts else self._num_idle + 1
        if self._num_idle > MAX_IDLE:
            self.rest(num_tokens)

    def rest(self, num_tokens: int) -> None:
        """Do not use the source for some tokens, each time for twice as many."""
        self.resume_at = num_tokens + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self.rate = max(self.rate, PROBE_RATE)
        self._is_probe = True
        self._num_notes, self.gain_s = 0, 0.0

    def resume(self) -> None:
        """Use the source: it pays."""
        self.resume_at = 0
        self._pause = MIN_PAUSE


class DraftRecord:
    """The queue of drafts of one request."""

    __slots__ = ("_look", "awaited", "names", "offered", "sources")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.awaited = names[-1]  # the source for which the request last waited
        self.sources: dict[str, SourceRecord] = {}
        # Drafts proposed elsewhere: source -> (number of tokens that they follow, token ids).
        self.offered: dict[str, tuple[int, Sequence[int]]] = {}
        self._look = MIN_LOOK

    def find_source(self, name: str, rate: float) -> SourceRecord:
        """Return the record of a source; a new one starts with `rate`."""
        record = self.sources.get(name)
        if record is None:
            record = self.sources[name] = SourceRecord(rate)
        return record

    def is_active(self, name: str, num_tokens: int) -> bool:
        """Whether the request has this source, and it does not rest."""
        source = self.sources.get(name)
        return name in self.names and (source is None or num_tokens >= source.resume_at)

    def choose_look(self, num_tokens: int) -> int:
        """Return at how many tokens to look for drafts again: rarer each time, and not while all sources rest."""
        resume_at = min(self.sources[name].resume_at if name in self.sources else 0 for name in self.names)
        look, self._look = self._look, min(2 * self._look, MAX_LOOK)
        return max(resume_at, num_tokens + look)

    def note_found(self) -> None:
        """Look often again: there are drafts."""
        self._look = MIN_LOOK

    def count(self) -> dict[str, tuple[int, int]]:
        """Return source -> (drafted tokens, accepted ones)."""
        return {
            name: (record.num_drafted, record.num_accepted)
            for name, record in self.sources.items()
            if record.num_drafted
        }


def update_rate(rate: float, num_drafted: int, num_accepted: int, weight: float = MEMORY) -> float:
    """Return the moving average after `num_accepted` right tokens and, unless all were right, a wrong one."""
    for _ in range(num_accepted):
        rate += weight * (1.0 - rate)
    return rate if num_accepted == num_drafted else rate * (1.0 - weight)
