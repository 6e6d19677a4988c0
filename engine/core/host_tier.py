"""HostTier: decides which blocks that leave the KV cache are kept in slots of host memory.

    prefix cache ──evicted: store──▶ slot ──evicted: least recently used──▶ gone
         ▲                             │
         └────────── hit: load ────────┘

The worker copies in the order of `take_moves`, before the step that the moves come with. So nothing is copied while it
changes, and a block in the pool may be overwritten as soon as its move is listed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.messages import BlockMove


class HostTier:
    """The index of the slots.

    Args:
        num_slots: number of blocks that fit.
        stored: (slot, key) of blocks that the memory holds already.
    """

    def __init__(self, num_slots: int, stored: Iterable[tuple[int, bytes]] = ()) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, least recently used first
        self._slots.update((key, slot) for slot, key in stored)
        used = set(self._slots.values())
        self._free = [slot for slot in range(num_slots) if slot not in used]
        self._pinned: set[int] = set()
        self._moves: list[BlockMove] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: bytes) -> int | None:
        """Return the slot of a block."""
        return self._slots.get(key)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep these slots until `load`, although other blocks are stored meanwhile."""
        self._pinned = set(slots)

    def store(self, key: bytes, block_id: int) -> bytes | None:
        """Keep a block that leaves the KV cache. Returns the key of the block that it replaces, if any."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        replaced = None
        if not self._free:
            replaced = next((each for each, slot in self._slots.items() if slot not in self._pinned), None)
            if replaced is None:
                return None
            self._free.append(self._slots.pop(replaced))
        slot = self._slots[key] = self._free.pop()
        self._moves.append(BlockMove(block_id, slot, key, is_load=False))
        return replaced

    def load(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Copy blocks, (key, block id), into the KV cache; they also stay here. Unpins all slots."""
        self._moves += [BlockMove(block_id, self._slots[key], key, is_load=True) for key, block_id in blocks]
        # The end of a prefix is evicted before its start.
        for key, _ in reversed(blocks):
            self._slots.move_to_end(key)
        self._pinned = set()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop blocks."""
        for key in keys:
            if (slot := self._slots.pop(key, None)) is not None:
                self._free.append(slot)

    def clear(self) -> list[bytes]:
        """Drop all blocks. Returns their keys."""
        keys = list(self._slots)
        self.forget(keys)
        return keys

    def take_moves(self) -> list[BlockMove]:
        """Return the moves since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves
