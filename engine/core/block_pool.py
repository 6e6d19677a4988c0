"""BlockPool: who owns which KV block, and which unowned block is taken next.

Blocks are [0, num_blocks); block 0 is the null block, never handed out. Every other block is either owned
(ref_count > 0) or in the free list, an intrusive doubly linked list taken from the head:

    head [ unhashed, last freed first | hashed, least recently used first ] tail

A free block that still carries a hash is a prefix cache entry; taking it evicts the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

NULL_BLOCK = 0


class Block:
    """One block's bookkeeping; the KV data itself lives with the worker."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None


class BlockPool:
    """Reference-counted blocks with an LRU free list and a hash index."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block 0 is reserved")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._by_hash: dict[bytes, Block] = {}
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        for block in self._blocks[1:]:
            self._insert_before(self._tail, block)

    @property
    def num_usable(self) -> int:
        """Blocks that requests can own; the null block is not one of them."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, owned or free."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all (None) when fewer are free."""
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            block = self._head.next
            assert block is not None
            self._unlink(block)
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                block.block_hash = None
            block.ref_count = 1
            taken.append(block.block_id)
        self.num_free -= count
        return taken

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Ids of the cached blocks for the longest prefix of `hashes`. Takes nothing."""
        found = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block.block_id)
        return found

    def find_run(self, hashes: Sequence[bytes], length: int) -> tuple[int, list[int]]:
        """The longest prefix of `hashes` whose last `length` blocks (or all of fewer) are cached. Takes nothing.

        Args:
            length: at least 1.

        Returns the number of blocks of that prefix, and the ids of those last ones.
        """
        run: list[int] = []
        for index in range(len(hashes) - 1, -1, -1):
            block = self._by_hash.get(hashes[index])
            if block is None:
                run = []
                continue
            run.append(block.block_id)
            if len(run) == length:
                return index + length, run[::-1]
        return len(run), run[::-1]

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks would leave the free list if they were shared."""
        return sum(self._blocks[block_id].ref_count == 0 for block_id in block_ids)

    def find_freed(self, held: Mapping[int, int]) -> set[int]:
        """Which blocks would be free if so many owners of each of these were gone."""
        return {block_id for block_id, count in held.items() if self._blocks[block_id].ref_count == count}

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one owner to each block, reviving those in the free list."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._unlink(block)
                self.num_free -= 1
            block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one owner of each; freed in reverse, so that the end of a prefix is evicted before its start."""
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
        """Offer a full block to the prefix cache. A hash that is already there keeps its first block."""
        block = self._blocks[block_id]
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Drop these hashes from the prefix cache; who owns the blocks keeps them."""
        for block_hash in hashes:
            if (block := self._by_hash.pop(block_hash, None)) is not None:
                block.block_hash = None

    def reset_cache(self) -> bool:
        """Forget every hash; False and unchanged while any block is owned."""
        if self.num_free != self.num_usable:
            return False
        for block in self._by_hash.values():
            block.block_hash = None
        self._by_hash.clear()
        return True

    def owned_ids(self) -> dict[int, int]:
        """Owned block ids with their number of owners; for tests and the observatory."""
        return {block.block_id: block.ref_count for block in self._blocks if block.ref_count}

    def cached_ids(self) -> list[int]:
        """Ids of the blocks that carry a hash, owned or free; for the observatory."""
        return [block.block_id for block in self._by_hash.values()]

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
