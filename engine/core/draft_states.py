"""DraftStates: slots for the states after each draft of a step, so that rejected drafts can be taken back.

    run of a row     last token   draft 1   draft 2   draft 3
    its state in        slot       slot      slot    the row

The worker copies the state after the last accepted draft to the row. A draft gets as many tokens as slots are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.core.actor_messages import StateSave
from engine.core.request import Request
from engine.core.state_snapshots import StateSnapshots
from engine.spec.draft_record import Draft


class DraftStates:
    """Owns the slots.

    Args:
        snapshots: those of the prefix cache, which take over states at block borders; None: prefixes are not cached.
    """

    def __init__(self, slots: Iterable[int], block_size: int, snapshots: StateSnapshots | None) -> None:
        self._free = list(slots)
        self._block_size = block_size
        self._snapshots = snapshots

    @property
    def num_free(self) -> int:
        """Slots that no step uses."""
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
