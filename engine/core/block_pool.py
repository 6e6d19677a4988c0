"""BlockPool: reference counts of the KV blocks, free list and prefix cache.

Blocks are [0, num_blocks); block 0 is the null block, never allocated. Every other block is either owned
(ref_count > 0) or in the free list, an intrusive doubly linked list; blocks are allocated from its head:

    head [ unhashed, last freed first | hashed, least recently used first ] tail

A free block with a hash is an entry of the prefix cache; allocating the block evicts the entry. A HostTier keeps some
of the evicted blocks. In results of `find`, slots of the tier are negative numbers, see `name_slot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.core.host_tier import HostTier

NULL_BLOCK = 0


class Block:
    """State of one block; the worker owns the KV data."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None


class BlockPool:
    """Reference-counted blocks with an LRU free list and an index by hash."""

    def __init__(self, num_blocks: int, tier: HostTier | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block 0 is reserved")
        self.num_blocks = num_blocks
        self.num_usable = self.num_free = num_blocks - 1
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.by_hash: dict[bytes, Block] = {}  # the blocks in the prefix cache, owned or free
        self.tier = tier
        # Block hash -> whether it is in the prefix cache now, for hashes that entered or left it; None: not recorded.
        self.changes: dict[bytes, bool] | None = None
        self.on_evict: Callable[[bytes], None] | None = None  # gets the keys of blocks that leave
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        for block in self._blocks[1:]:
            self._insert_before(self._tail, block)

    def allocate(self, count: int) -> list[int] | None:
        """Return the ids of `count` blocks, or None if fewer are free."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self._head.next
            assert block is not None
            self._unlink(block)
            if block.block_hash is not None:
                del self.by_hash[block.block_hash]
                self._evict(block.block_hash, block.block_id)
                block.block_hash = None
            block.ref_count = 1
            taken.append(block.block_id)
        self.num_free -= count
        return taken

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the block ids of the longest cached prefix of `hashes`. Adds no owner."""
        found = []
        for block_hash in hashes:
            block_id = self._find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def find_run(self, hashes: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        """Find the longest prefix of `hashes` whose last `length` blocks (or all, if fewer) are cached. Adds no owner.

        Returns the number of blocks of the prefix, and the ids of its last blocks.
        """
        run: list[int] = []
        for index in range(len(hashes) - 1, -1, -1):
            block_id = self._find(hashes[index])
            if block_id is None:
                run = []
                continue
            run.append(block_id)
            if len(run) == length:
                return index + length, run[::-1]
        return len(run), run[::-1]

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        return sum(self._blocks[block_id].ref_count == 0 for block_id in block_ids)

    def find_freed(self, held: Mapping[int, int]) -> set[int]:
        """Return the blocks that would be free after removing `held[block_id]` owners of each."""
        return {block_id for block_id, count in held.items() if self._blocks[block_id].ref_count == count}

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block, and take free ones out of the free list."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._unlink(block)
                self.num_free -= 1
            block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one owner of each block, in reverse order, so that the end of a prefix is evicted before its start."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} freed without an owner"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.block_hash is None:
                assert self._head.next is not None
                self._insert_before(self._head.next, block)
            else:
                self._insert_before(self._tail, block)
            self.num_free += 1

    def commit(self, block_id: int, block_hash: bytes) -> None:
        """Add a full block to the prefix cache, unless another block has the same hash."""
        block = self._blocks[block_id]
        if block.block_hash is None and block_hash not in self.by_hash:
            block.block_hash = block_hash
            self.by_hash[block_hash] = block
            self.note_change(block_hash, True)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Remove these hashes from the prefix cache; the blocks keep their owners."""
        for block_hash in hashes:
            if (block := self.by_hash.pop(block_hash, None)) is not None:
                block.block_hash = None
                self.note_change(block_hash, False)
            if self.tier is not None and block_hash in self.tier:
                self.tier.forget([block_hash])
                self.note_change(block_hash, False)

    def reset_cache(self) -> bool:
        """Empty the prefix cache. Returns False, without a change, while any block is owned."""
        if self.num_free != self.num_usable:
            return False
        for block_hash, block in self.by_hash.items():
            block.block_hash = None
            self.note_change(block_hash, False)
        self.by_hash.clear()
        for key in () if self.tier is None else self.tier.clear():
            self.note_change(key, False)
        return True

    def owned_ids(self) -> dict[int, int]:
        """Return owned block ids with their number of owners; used by tests."""
        return {block.block_id: block.ref_count for block in self._blocks if block.ref_count}

    def cached_ids(self) -> list[int]:
        return [block.block_id for block in self.by_hash.values()]

    def _find(self, block_hash: bytes) -> int | None:
        """Return the id of a cached block, or a negative number for a slot of the tier."""
        block = self.by_hash.get(block_hash)
        if block is not None:
            return block.block_id
        slot = None if self.tier is None else self.tier.find(block_hash)
        return None if slot is None else name_slot(slot)

    def _evict(self, block_hash: bytes, block_id: int) -> None:
        """Move a block from the prefix cache to the tier, if there is one."""
        if self.on_evict is not None:
            self.on_evict(block_hash)
        if self.tier is None:
            self.note_change(block_hash, False)
            return
        self.note_replaced(self.tier.store(block_hash, block_id))
        self.note_change(block_hash, block_hash in self.tier)

    def note_change(self, block_hash: bytes, is_cached: bool) -> None:
        if self.changes is not None:
            self.changes[block_hash] = is_cached

    def note_replaced(self, key: bytes | None) -> None:
        """Record that a block has left the tier."""
        if key is not None and key not in self.by_hash:
            self.note_change(key, False)

    @staticmethod
    def _insert_before(place: Block, block: Block) -> None:
        before = place.prev
        assert before is not None
        before.next, block.prev = block, before
        block.next, place.prev = place, block

    @staticmethod
    def _unlink(block: Block) -> None:
        assert block.prev is not None and block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None


def name_slot(slot: int) -> int:
    """Return the negative number of a slot of the tier, or the slot of a negative number."""
    return -1 - slot
