"""StateTier: keeps states that leave the snapshots in the HostTier, in parts of the size of a block.

A state without one of its parts is missing. Ids from `num_blocks` on name the parts of snapshots in a BlockMove:

    num_blocks + slot of the snapshot * number of parts + part
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.block_hash import list_state_keys
from engine.core.block_pool import BlockPool
from engine.transfer.host_tier import HostTier


class StateTier:
    """The states of one core.

    Args:
        pool: records which keys leave the tier.
        num_parts: of a state; the tier has room for one state at least.
    """

    def __init__(self, pool: BlockPool, tier: HostTier, num_parts: int) -> None:
        self._pool = pool
        self._tier = tier
        self._num_parts = num_parts

    def __contains__(self, key: bytes) -> bool:
        (first,) = list_state_keys(key, 1)
        return first in self._tier and len(self.list_slots(key)) == self._num_parts

    def list_slots(self, key: bytes) -> list[int]:
        """Return the slots of a state in the tier."""
        found = (self._tier.find(name) for name in list_state_keys(key, self._num_parts))
        return [slot for slot in found if slot is not None]

    def name_parts(self, key: bytes, slot: int) -> list[tuple[bytes, int]]:
        """Return the key and the id of each part of the state in a snapshot's slot."""
        first = self._pool.num_blocks + slot * self._num_parts
        return [(name, first + part) for part, name in enumerate(list_state_keys(key, self._num_parts))]

    def store(self, key: bytes, slot: int) -> None:
        """Keep a snapshot that is evicted."""
        for name, part_id in self.name_parts(key, slot):
            self._pool.note_replaced(self._tier.store(name, part_id))

    def load(self, key: bytes, slot: int) -> None:
        """Copy a state from the tier to a snapshot's slot before the next step."""
        self._tier.load(self.name_parts(key, slot))

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop states."""
        for key in keys:
            self._tier.forget(list_state_keys(key, self._num_parts))
