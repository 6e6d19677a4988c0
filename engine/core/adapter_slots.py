"""AdapterSlots: which adapters may run, at most `max_loras` at a time.

    no slot ──free slot──▶ loading ──AdapterReady──▶ ready ◀─▶ in use
       ▲                                               │
       └──────────── unused, and another adapter waits ┘

Requests whose adapter has no slot are held; others overtake them. The oldest held request reserves a slot, whose
adapter then admits only requests that arrived before it. So every adapter gets its turn; the base model never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.request import Request, RequestStatus
from engine.messages import AdapterRef

Key = tuple[float, float, int]


class AdapterLoader(Protocol):
    """Reads adapters in the order of these calls, beside the steps."""

    def pin(self, ref: AdapterRef) -> None:
        """Read an adapter if it is not in memory, and keep it there; the answer is AdapterReady."""

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted from memory."""

    def drop(self, digest: str) -> None:
        """Free an adapter that no request uses any more."""


@dataclass(eq=False, slots=True)
class _Slot:
    ref: AdapterRef
    is_ready: bool = False
    num_users: int = 0  # running requests
    last_step: int = -1  # last planned step that may have used it
    successor: AdapterRef | None = None  # gets the slot when it is unused
    limit: Key | None = None  # queue key of the request that reserved it
    expected: list[Request] = field(default_factory=list)  # waited for the load, and may run now


class AdapterSlots:
    """The adapters that run, and the requests that wait for one."""

    loader: AdapterLoader  # set before the first request

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._slots: dict[str, _Slot] = {}  # by digest, the least recently used first
        self._held: dict[str, list[Request]] = {}  # by digest
        self._oldest_step = 0
        self._has_changed = False  # whether held requests may get or reserve a slot now
        self._dropped: set[str] = set()  # digests to free as soon as no step uses them

    def may_run(self, request: Request) -> bool:
        """Whether the request's adapter is ready. If not, it is held; `drain` or `note_ready` returns it later."""
        ref = request.adapter
        if ref is None:
            return True
        self._dropped.discard(ref.digest)
        slot = self._slots.get(ref.digest)
        if slot is None:
            self._find_slot(ref, request.queue_key)
        elif slot.is_ready and (slot.limit is None or request.queue_key < slot.limit):
            return True
        self._held.setdefault(ref.digest, []).append(request)
        return False

    def enter(self, request: Request) -> None:
        if request.adapter is not None:
            slot = self._slots.pop(request.adapter.digest)
            slot.num_users += 1
            self._slots[request.adapter.digest] = slot

    def leave(self, request: Request, last_step: int) -> None:
        """Count a request that no longer runs; steps up to `last_step` may still compute it."""
        if request.adapter is not None:
            slot = self._slots[request.adapter.digest]
            slot.num_users -= 1
            slot.last_step = last_step

    def drain(self, oldest_step: int) -> list[Request]:
        """Hand unused slots over to their successors. Returns held requests that must be looked at again."""
        self._oldest_step = oldest_step
        for digest in list(self._dropped):
            slot = self._slots.get(digest)
            if slot is None or self._is_unused(slot):
                self._dropped.discard(digest)
                if slot is not None:
                    self._free(slot)
                    if slot.successor is not None:
                        self._replace(None, slot.successor)
                self.loader.drop(digest)
        if not self._held:
            return []
        for slot in list(self._slots.values()):
            if slot.successor is None:
                continue
            if all(request.is_finished for request in self._held.get(slot.successor.digest, ())):
                self._held.pop(slot.successor.digest, None)
                slot.successor = slot.limit = None
                self._has_changed = True
            elif self._is_unused(slot):
                self._replace(slot, slot.successor)
        if not self._has_changed:
            return []
        self._has_changed = False
        return [each for digest in list(self._held) for each in self._unhold(digest)]

    def note_ready(self, digest: str, is_loaded: bool) -> list[Request]:
        """Take the result of a load. Returns the requests that were held for it."""
        slot, held = self._slots.get(digest), self._held.pop(digest, [])
        if slot is not None and is_loaded:
            slot.is_ready, slot.expected = True, held
        elif slot is not None:
            self._free(slot)
            if slot.successor is not None:
                self._replace(None, slot.successor)
        return held

    def drop(self, digest: str) -> None:
        """Free an adapter that has no name any more, once no step uses it."""
        self._dropped.add(digest)

    def _find_slot(self, ref: AdapterRef, key: Key) -> None:
        """Give the adapter a slot, or reserve one."""
        if any(
            slot.successor is not None and slot.successor.digest == ref.digest
            for slot in self._slots.values()
        ):
            return
        free = [slot for slot in self._slots.values() if slot.successor is None]
        unused = next((slot for slot in free if self._is_unused(slot)), None)
        if len(self._slots) < self._max_loras or unused is not None:
            self._replace(unused if len(self._slots) == self._max_loras else None, ref)
        elif free:
            slot = min(free, key=lambda each: each.num_users)
            slot.successor, slot.limit = ref, key

    def _is_unused(self, slot: _Slot) -> bool:
        """Return whether the slot is unused. It is not taken from requests that waited for its load and come first."""
        slot.expected = [
            request
            for request in slot.expected
            if request.status is RequestStatus.WAITING
            and (slot.limit is None or request.queue_key < slot.limit)
        ]
        is_idle = not slot.num_users and slot.last_step < self._oldest_step
        return slot.is_ready and is_idle and not slot.expected

    def _unhold(self, digest: str) -> Iterable[Request]:
        """Release held requests unless their adapter is being loaded or has reserved a slot."""
        slot = self._slots.get(digest)
        is_coming = slot is not None and not slot.is_ready
        is_coming |= any(
            each.successor is not None and each.successor.digest == digest for each in self._slots.values()
        )
        return [] if is_coming else self._held.pop(digest)

    def _replace(self, old: _Slot | None, ref: AdapterRef) -> None:
        if old is not None:
            self._free(old)
        self._has_changed = True
        self._slots[ref.digest] = _Slot(ref)
        self.loader.pin(ref)

    def _free(self, slot: _Slot) -> None:
        self._has_changed = True
        del self._slots[slot.ref.digest]
        self.loader.unpin(slot.ref.digest)
