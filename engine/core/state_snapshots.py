"""StateSnapshots: which states of requests are kept, so that later requests continue from them.

A prefix of a model with state layers is reused only up to a position where a snapshot exists. Snapshots are kept at
the last block border before

    the end of the prompt, the end of its first turn (the system message) and of its last ones
    the last token of an answer: the snapshot of a running request moves on with every block

so that the next turn of a chat finds one. Turns end with a stop token of the model. The worker owns the memory; a slot
is either free, held by a running request, or cached under a block hash. A cached slot is evicted together with its
block, or when it is the least recently used one; a StateTier then keeps the state in host memory.

Steps run in the order in which they are planned, so a slot may be reused in the next step. Rows of one step run at the
same time, so a slot that one of them writes is kept until the step is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.core.actor_messages import StateSave
from engine.core.block_hash import list_state_keys
from engine.core.block_pool import BlockPool
from engine.core.host_tier import HostTier
from engine.core.request import Request
from engine.spec.draft_record import Draft

_NUM_LAST_POINTS = 3


@dataclass(slots=True)
class RequestStates:
    """Snapshots of one running request."""

    # Positions in its known tokens that are still to be kept, sorted
    points: list[int] = field(default_factory=list)
    first_rolling: int = 0  # position from which its own snapshot moves on
    slot: int = -1  # of its own snapshot; -1: none yet
    position: int = 0  # of its own snapshot


class StateSnapshots:
    """Slots of snapshots, and an index of the cached ones by block hash."""

    def __init__(
        self, num_slots: int, block_size: int, end_ids: Iterable[int], tier: StateTier | None = None
    ) -> None:
        self.num_slots = num_slots
        self.tier = tier
        self._block_size = block_size
        self._end_ids = frozenset(end_ids)
        self._free = list(range(num_slots))
        self._cached: dict[bytes, int] = {}  # least recently used first
        self._open: dict[int, RequestStates] = {}  # by handle of the request
        self._num_held = 0
        self._written: set[int] = set()  # slots of the step that is being planned

    @property
    def num_used(self) -> int:
        """Slots that are cached or held; used by tests."""
        return self.num_slots - len(self._free)

    def find(self, hashes: Sequence[bytes]) -> int:
        """Return the length in blocks of the longest prefix with a snapshot."""
        return next((num for num in range(len(hashes), 0, -1) if self._has(hashes[num - 1])), 0)

    def list_outside(self, key: bytes) -> list[int]:
        """Return the slots of the tier that hold this state; none if it is a snapshot."""
        return [] if self.tier is None or key in self._cached else self.tier.list_slots(key)

    def is_expected(self, request: Request) -> bool:
        """Whether a running request will still keep states of its known tokens."""
        states = self._open.get(request.handle)
        return states is not None and bool(states.points)

    def open(self, request: Request, num_cached: int) -> int:
        """Choose the snapshots of a request that starts after `num_cached` cached tokens. Returns the slot to load."""
        self._open[request.handle] = RequestStates(self.list_points(request, num_cached), request.num_tokens)
        if not num_cached:
            return -1
        key = request.block_hashes[num_cached // self._block_size - 1]
        if key in self._cached:
            return self._touch(key)
        slot = self._take()
        assert slot is not None and self.tier is not None, "checked by find"
        self.tier.load(key, slot)
        self._cached[key] = slot
        return slot

    def list_points(self, request: Request, start: int) -> list[int]:
        """Return the positions after `start` in the request's known tokens where states are worth keeping, sorted."""
        last, size = request.num_tokens - 1, self._block_size
        ends = [at + 1 for at, token_id in enumerate(request.token_ids[:last]) if token_id in self._end_ids]
        borders = sorted({end // size * size for end in (*ends, last)})
        return sorted(point for point in {*borders[:1], *borders[-_NUM_LAST_POINTS:]} if point > start)

    def end_step(self) -> None:
        self._written.clear()

    def plan(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """Return (position, slot) of the snapshots to write while the request runs its tokens [start, end)."""
        states = self._open[request.handle]
        found = []
        while states.points and states.points[0] < end:
            position = states.points.pop(0)
            key = request.block_hashes[position // self._block_size - 1]
            if key in self._cached:
                self._touch(key)
            elif position >= start and (slot := self._take()) is not None:
                self._cached[key] = slot
                self._written.add(slot)
                found.append((position, slot))
        if start >= states.first_rolling and start % self._block_size == 0 and self._hold(states):
            states.position = start
            found.append((start, states.slot))
        return found

    def move_on(self, request: Request, position: int, slot: int) -> int:
        """Make a slot with the state at `position` the snapshot of a running request. Returns the slot it replaces."""
        states = self._open.get(request.handle)  # None: it was preempted or failed
        if states is None or not self._hold(states):
            return slot
        states.position, states.slot, slot = position, slot, states.slot
        return slot

    def close(self, request: Request, num_blocks: int) -> None:
        """Cache the snapshot of a request that ends or is preempted, if it lies in its first `num_blocks` blocks."""
        states = self._open.pop(request.handle, None)  # None: it failed
        if states is None or states.slot < 0:
            return
        self._num_held -= 1
        at = states.position // self._block_size
        key = request.block_hashes[at - 1] if at <= num_blocks else None
        if key is None or key in self._cached:
            self._free.append(states.slot)
        else:
            self._cached[key] = states.slot

    def evict(self, key: bytes) -> None:
        if key in self._cached:
            self._free.append(self._remove(key))

    def forget(self, hashes: Iterable[bytes]) -> None:
        hashes = list(hashes)
        self._free += [self._cached.pop(key) for key in hashes if key in self._cached]
        if self.tier is not None:
            self.tier.forget(hashes)

    def clear(self) -> None:
        self.forget(list(self._cached))

    def _has(self, key: bytes) -> bool:
        """Whether a state is a snapshot, or can become one again."""
        if key in self._cached:
            return True
        return self.tier is not None and bool(self._free or self._cached) and key in self.tier

    def _hold(self, states: RequestStates) -> bool:
        """Give a running request a slot of its own. All hold half of the slots at most, so that prompts stay cached."""
        if states.slot < 0 and 2 * self._num_held < self.num_slots and (slot := self._take()) is not None:
            states.slot = slot
            self._num_held += 1
        return states.slot >= 0

    def _touch(self, key: bytes) -> int:
        """Make a cached snapshot the most recently used one. Returns its slot."""
        slot = self._cached[key] = self._cached.pop(key)
        return slot

    def _take(self) -> int | None:
        """Return a free slot, or the least recently used cached one; None if all are held."""
        if self._free:
            return self._free.pop()
        oldest = next((key for key, slot in self._cached.items() if slot not in self._written), None)
        return None if oldest is None else self._remove(oldest)

    def _remove(self, key: bytes) -> int:
        """Move a cached snapshot to the tier, if there is one. Returns its slot."""
        slot = self._cached.pop(key)
        if self.tier is not None:
            self.tier.store(key, slot)
        return slot


class StateTier:
    """The states of one core."""

    def __init__(self, pool: BlockPool, tier: HostTier, num_parts: int) -> None:
        self._pool = pool
        self._tier = tier
        self._num_parts = num_parts

    def __contains__(self, key: bytes) -> bool:
        (first,) = list_state_keys(key, 1)
        return first in self._tier and len(self.list_slots(key)) == self._num_parts

    def list_slots(self, key: bytes) -> list[int]:
        found = (self._tier.find(name) for name in list_state_keys(key, self._num_parts))
        return [slot for slot in found if slot is not None]

    def name_parts(self, key: bytes, slot: int) -> list[tuple[bytes, int]]:
        """Return the key and the id of each part of the state in a snapshot's slot."""
        first = self._pool.num_blocks + slot * self._num_parts
        return [(name, first + part) for part, name in enumerate(list_state_keys(key, self._num_parts))]

    def store(self, key: bytes, slot: int) -> None:
        for name, part_id in self.name_parts(key, slot):
            self._pool.note_replaced(self._tier.store(name, part_id))

    def load(self, key: bytes, slot: int) -> None:
        """Copy a state from the tier to a snapshot's slot before the next step."""
        self._tier.load(self.name_parts(key, slot))

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._tier.forget(list_state_keys(key, self._num_parts))


class DraftStates:
    """Owns the slots."""

    def __init__(self, slots: Iterable[int], block_size: int, snapshots: StateSnapshots | None) -> None:
        self._free = list(slots)
        self._block_size = block_size
        self._snapshots = snapshots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, draft: Draft) -> Draft | None:
        """Give slots to a draft. Returns as much of it as got some, or None."""
        count = min(len(draft.token_ids), len(self._free))
        if not count:
            return None
        states = self._free[-count:]
        del self._free[-count:]
        return draft._replace(token_ids=draft.token_ids[:count], states=states)

    def list_saves(self, row: int, start: int, draft: Draft) -> Iterator[StateSave]:
        """Return the states to keep in a run that starts at `start` with the last known token."""
        return (StateSave(row, start + 1 + at, slot) for at, slot in enumerate(draft.states or ()))

    def settle(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Make the state at the last block border among the accepted drafts the request's snapshot.

        The request's known tokens are still those before the drafts.
        """
        states, first = draft.states, request.num_tokens
        assert states is not None, "the draft got slots"
        last = first + min(num_accepted, len(states) - 1)
        border = last // self._block_size * self._block_size
        if border >= first and self._snapshots is not None:
            states[border - first] = self._snapshots.move_on(request, border, states[border - first])

    def free(self, draft: Draft) -> None:
        """Take back the slots of a draft whose step has ended."""
        self._free += draft.states or ()
