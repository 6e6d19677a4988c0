"""Journal: every unfinished request and the tokens of its completions, so that another replica can continue it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from engine.cluster.router import Ticket
from engine.messages import AddRequest, Detail, NewCompletion, NewTokens

NOWHERE = -1


@dataclass(eq=False, slots=True)
class Entry:
    """One request. It is held by a replica, or by none while it waits for one."""

    message: AddRequest
    token_ids: dict[int, list[int]]  # of the unfinished completions, by handle
    replica: int = NOWHERE
    ticket: Ticket | None = None  # the router's record of the replica's load
    fingerprint: str | None = None  # of the replica that computed the latest tokens
    is_accepted: bool = False
    is_prefilled: bool = False  # a prefill replica has been asked to compute the prompt
    aborted: set[int] = field(default_factory=set)  # handles whose abort was sent and not confirmed yet
    num_crashes: int = 0  # cores that crashed while they held this request, since its last new token

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the longest unfinished completion."""
        return len(self.message.prompt_token_ids) + max(map(len, self.token_ids.values()))

    @property
    def min_context(self) -> int:
        """The context that it needs: its tokens, and room for one more unless it only makes a vector."""
        return self.num_tokens + (self.message.params.pooling is None)

    def make_message(self, age_s: float = 0.0) -> AddRequest:
        """Return the request as it must be sent to a replica: its unfinished completions with their tokens."""
        seeds = {completion.handle: completion.seed for completion in self.message.completions}
        completions = [NewCompletion(handle, seeds[handle], ids[:]) for handle, ids in self.token_ids.items()]
        return msgspec.structs.replace(
            self.message, completions=completions, age_s=self.message.age_s + age_s
        )


@dataclass(slots=True)
class _Batch:
    """The completions that got tokens in a replica's last step, looked up once while they stay the same."""

    handles: list[int]
    appends: list[Callable[[int], None]]
    version: int


class Journal:
    """Finds entries by handle. A replica's messages about completions that it does not hold are dropped."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by handle
        self._batches: dict[int, _Batch] = {}  # by replica
        self._version = 0  # changes when a completion ends or changes its replica

    def add(self, message: AddRequest) -> Entry:
        tokens = {each.handle: each.generated_token_ids[:] for each in message.completions}
        entry = Entry(message, tokens)
        self._entries |= dict.fromkeys(tokens, entry)
        return entry

    def find(self, handle: int) -> Entry | None:
        return self._entries.get(handle)

    def assign(self, entry: Entry, replica: int) -> None:
        entry.replica = replica
        self._version += 1

    def remove(self, handles: Iterable[int]) -> Iterator[Entry]:
        """Remove completions. Yields the requests of which none is left."""
        for handle in handles:
            entry = self._entries.pop(handle, None)
            if entry is None:
                continue
            self._version += 1
            del entry.token_ids[handle]
            entry.aborted.discard(handle)
            if not entry.token_ids:
                yield entry

    def list_held(self, replica: int) -> list[Entry]:
        """Return the requests that a replica holds, oldest first."""
        return [entry for entry in dict.fromkeys(self._entries.values()) if entry.replica == replica]

    def record(self, message: NewTokens, replica: int) -> NewTokens:
        """Add new tokens to the entries.

        Returns the message for the front: with the same `handles` object while the batch does not change, and without
        completions that the replica does not hold.
        """
        batch = self._batches.get(replica)
        if batch is None or batch.version != self._version or batch.handles != message.handles:
            message = self._drop_unknown(message, replica)
            appends = [self._entries[handle].token_ids[handle].append for handle in message.handles]
            batch = self._batches[replica] = _Batch(message.handles, appends, self._version)
        if not message.counts:
            for append, token_id in zip(batch.appends, message.token_ids, strict=True):
                append(token_id)
        else:
            start = 0
            for handle, count in zip(message.handles, message.counts, strict=True):
                self._entries[handle].token_ids[handle] += message.token_ids[start : start + count]
                start += count
        details = message.details and self._keep_held(message.details, replica)
        return NewTokens(batch.handles, message.counts, message.token_ids, details, replica)

    def _drop_unknown(self, message: NewTokens, replica: int) -> NewTokens:
        kept = [self._is_held(handle, replica) for handle in message.handles]
        if all(kept):
            return message
        handles, token_ids, start = [], [], 0
        counts = message.counts or [1] * len(message.handles)
        for handle, count, keep in zip(message.handles, counts, kept, strict=True):
            if keep:
                handles.append(handle)
                token_ids += message.token_ids[start : start + count]
            start += count
        counts = [count for count, keep in zip(message.counts, kept, strict=False) if keep]
        return NewTokens(handles, counts, token_ids, message.details)

    def _keep_held(self, details: list[Detail], replica: int) -> list[Detail]:
        return [detail for detail in details if self._is_held(detail.handle, replica)]

    def _is_held(self, handle: int, replica: int) -> bool:
        entry = self._entries.get(handle)
        return entry is not None and entry.replica == replica
