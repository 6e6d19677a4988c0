"""Entry: a request in flight, and Batch: the completions that get tokens together in each step of a replica."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from engine.front.completion import Completion
from engine.front.replica import Replica
from engine.front.router import Ticket
from engine.front.streams import OutputStream
from engine.messages import AddRequest, NewCompletion, NewTokens
from engine.metrics import Metrics
from engine.outputs import GrammarInfo
from engine.sampling_params import SamplingParams

_get_tokens = attrgetter("token_ids")


@dataclass(eq=False, slots=True)
class Entry:
    """One request in flight. It is held by a replica, or by none while it waits for one."""

    message: AddRequest
    stream: OutputStream
    accepted: asyncio.Future[GrammarInfo | None]
    open: dict[int, Completion]  # the unfinished completions by handle
    is_accepted: bool = False
    replica: Replica | None = None
    ticket: Ticket | None = None  # the router's record of the replica's load
    fingerprint: str | None = None  # of the replica that computed the latest tokens
    prefill: int | None = None  # handle under which the replica computes the prompt only
    is_prefilled: bool = False  # a replica has been asked for that
    is_queued: bool = False  # its replica has made a step since it added the request to its queue
    has_started: bool = False  # its replica has computed something
    group: list[Entry] | None = None  # the suspects with whom it is tried, if it may have crashed a core

    @property
    def min_context(self) -> int:
        """The context that its longest completion needs: its tokens, and one more unless it only makes a vector."""
        longest = max(map(len, map(_get_tokens, self.open.values())))
        return len(self.message.prompt_token_ids) + longest + (self.message.params.pooling is None)

    def make_message(self) -> AddRequest:
        """Return the request as it must be sent to a replica: its unfinished completions with their tokens."""
        completions = [
            NewCompletion(each.handle, each.seed, self.open[each.handle].token_ids[:])
            for each in self.message.completions
            if each.handle in self.open
        ]
        age_s = time.monotonic() - self.stream.times.arrival_time
        return msgspec.structs.replace(self.message, completions=completions, age_s=age_s)

    def make_prefill(self, message: AddRequest) -> AddRequest:
        """Return the request that only computes the prompt. Its handle is negative, unlike those of completions."""
        self.prefill, self.is_prefilled = -1 - message.completions[0].handle, True
        return msgspec.structs.replace(
            message, params=SamplingParams(max_tokens=1, temperature=0.0, saves_blocks=True),
            completions=[NewCompletion(self.prefill, 0)], bad_word_ids=[], prediction_token_ids=[],
        )


class Batch:
    """The completions that got tokens in a replica's last step, looked up once while they stay the same."""

    def __init__(self, handles: list[int], entries: dict[int, Entry], replica: Replica, version: int) -> None:
        self.handles, self.version = handles, version
        self.lists: list[MutableSequence[int]] = []  # tokens of each handle
        self.completions: list[Completion] = []  # of those that the replica holds
        self.streams: list[OutputStream] = []
        self.with_stops: list[tuple[int, Completion]] = []
        dropped: deque[int] = deque(maxlen=0)  # takes the tokens of all others
        for handle in handles:
            entry = entries.get(handle)
            if entry is None or entry.replica is not replica:
                self.lists.append(dropped)
                continue
            completion = entry.open[handle]
            self.lists.append(completion.token_ids)
            self.completions.append(completion)
            self.streams.append(entry.stream)
            if completion.has_stops:
                self.with_stops.append((handle, completion))
        self.appends = [each.append for each in self.lists]
        self.readers = [each for each in self.streams if not each.is_final]
        self._last_time: float | None = None

    def add(self, message: NewTokens) -> int:
        """Append the tokens of a step. Returns their number."""
        if not message.counts:
            for append, token_id in zip(self.appends, message.token_ids, strict=True):
                append(token_id)
            return len(self.completions)
        start = num_new = 0
        for token_ids, count in zip(self.lists, message.counts, strict=True):
            token_ids.extend(message.token_ids[start : start + count])
            start += count
            num_new += count if token_ids.__class__ is list else 0
        return num_new

    def note_time(self, now: float, metrics: Metrics) -> None:
        """Record the seconds since the previous tokens, as all streams of the batch got theirs at the same times."""
        if self._last_time is None:
            times = [stream.times.last_token_time for stream in self.streams]
            metrics.itl.observe_many([now - each for each in times if each is not None])
        else:
            metrics.itl.observe(now - self._last_time, len(self.streams))
        self._last_time = now
        for stream in self.streams:
            stream.times.last_token_time = now
