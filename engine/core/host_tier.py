"""HostTier: decides which blocks that leave the KV cache are kept in slots of host memory.

    prefix cache ──evicted: store──▶ slot ──evicted: least recently used──▶ gone
         ▲                           │  ▲
         └───────── hit: load ───────┘  └──reserve, add or pin──▶ store of several cores

The worker copies in the order of `take_moves` before the step that the moves come with, and in that of `take_saves`
after it. So nothing is copied while it changes, and a block in the pool may be overwritten as soon as its move is
listed. The thread that exchanges blocks with other cores knows no order: it gets slots that no planned step uses
(`reserve`), and slots whose content it reads are pinned until it has ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.core.actor_messages import BlockMove


class HostTier:
    """The index of the slots."""

    def __init__(self, num_slots: int, stored: Iterable[tuple[int, bytes]] = ()) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by key, least recently used first
        self._slots.update((key, slot) for slot, key in stored)
        used = set(self._slots.values())
        self._free = [slot for slot in range(num_slots) if slot not in used]
        self._wanted: set[int] = set()  # by the request that is being admitted
        self._pinned: Counter[int] = Counter()  # being read by the other thread
        self._forgotten: set[int] = set()  # pinned slots without a key
        self._busy: Counter[int] = Counter()  # in moves of steps that have not ended
        self._by_step: dict[int, list[int]] = {}  # step -> slots of its moves
        self._moves: list[BlockMove] = []
        self._saves: list[BlockMove] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: bytes) -> int | None:
        return self._slots.get(key)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep these slots until `load`, although other blocks are stored meanwhile."""
        self._wanted = set(slots)

    def store(self, key: bytes, block_id: int) -> bytes | None:
        """Keep a block that leaves the KV cache. Returns the key of the block that it replaces, if any."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return None
        slot, replaced = self._take_slot()
        if slot is not None:
            self._add_move(self._moves, BlockMove(block_id, slot, key, is_load=False))
        return replaced

    def save(self, key: bytes, block_id: int) -> tuple[int | None, bytes | None]:
        """Keep a block that the next step computes, and pin its slot.

        Returns the slot, None if all are in use, and the key of the block that it replaces.
        """
        replaced = None
        slot = self._slots.get(key)
        if slot is None:
            slot, replaced = self._take_slot()
            if slot is None:
                return None, None
            self._add_move(self._saves, BlockMove(block_id, slot, key, is_load=False))
        self._pinned[slot] += 1
        return slot, replaced

    def load(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Copy blocks, (key, block id), into the KV cache; they also stay here. Ends `pin`."""
        for key, block_id in blocks:
            self._add_move(self._moves, BlockMove(block_id, self._slots[key], key, is_load=True))
        # The end of a prefix is evicted before its start.
        for key, _ in reversed(blocks):
            self._slots.move_to_end(key)
        self._wanted = set()

    def reserve(self) -> tuple[int | None, bytes | None]:
        """Take a slot that no planned step uses, until `add` or `give_back`.

        Returns the slot, None if all are in use, and the key of the block that it replaces.
        """
        return self._take_slot(self._busy)

    def add(self, key: bytes, slot: int) -> None:
        """Index a reserved slot, which now holds this block."""
        if key in self._slots:
            self._free.append(slot)
        else:
            self._slots[key] = slot

    def give_back(self, slot: int) -> None:
        """Return a reserved slot unused."""
        self._free.append(slot)

    def unpin(self, slot: int) -> None:
        """End one pin of `save`."""
        self._pinned[slot] -= 1
        if not self._pinned[slot]:
            del self._pinned[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                self._free.append(slot)

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (slot := self._slots.pop(key, None)) is not None:
                # The next core must not find it in the memory.
                self._busy[slot] += 1
                self._moves.append(BlockMove(0, slot, b"", is_load=False))
                if slot in self._pinned:
                    self._forgotten.add(slot)
                else:
                    self._free.append(slot)

    def clear(self) -> list[bytes]:
        """Drop all blocks. Returns their keys."""
        keys = list(self._slots)
        self.forget(keys)
        return keys

    def take_moves(self, step_id: int) -> tuple[list[BlockMove], list[BlockMove]]:
        """Return the copies since the last call, in order: those before this step, and those after it."""
        moves, self._moves = self._moves, []
        saves, self._saves = self._saves, []
        if moves or saves:
            self._by_step[step_id] = [move.slot for move in (*moves, *saves)]
        return moves, saves

    def end_step(self, step_id: int) -> None:
        """Note that the copies of a step have been made."""
        for slot in self._by_step.pop(step_id, ()):
            self._busy[slot] -= 1
            if not self._busy[slot]:
                del self._busy[slot]

    def _add_move(self, moves: list[BlockMove], move: BlockMove) -> None:
        self._slots[move.key] = move.slot
        self._busy[move.slot] += 1
        moves.append(move)

    def _take_slot(self, excluded: Counter[int] | None = None) -> tuple[int | None, bytes | None]:
        """Take a free slot, else that of the least recently used block. Returns it with the key of that block."""
        if self._free and (not excluded or self._free[-1] not in excluded):
            return self._free.pop(), None
        busy = excluded or Counter()
        for index, slot in enumerate(self._free):
            if slot not in busy:
                del self._free[index]
                return slot, None
        for key, slot in self._slots.items():
            if slot not in self._wanted and slot not in self._pinned and slot not in busy:
                del self._slots[key]
                return slot, key
        return None, None
