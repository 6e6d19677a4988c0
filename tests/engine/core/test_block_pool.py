"""BlockPool: ownership, the order of the free list, and the hash index."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from engine.core.block_pool import BlockPool


def make_pool(num_usable: int = 4) -> BlockPool:
    return BlockPool(num_usable + 1)


def take(pool: BlockPool, count: int) -> list[int]:
    taken = pool.allocate(count)
    assert taken is not None
    return taken


def take_hashed(pool: BlockPool, *hashes: bytes) -> list[int]:
    """Blocks of one request, each full and offered to the cache."""
    blocks = take(pool, len(hashes))
    for block_id, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block_id, block_hash)
    return blocks


def test_an_allocation_that_fails_evicts_nothing() -> None:
    pool = make_pool(2)
    pool.free(take_hashed(pool, b"a", b"b"))
    assert pool.allocate(3) is None
    assert pool.num_cached == 2


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="must be at least 2"):
        BlockPool(num_blocks)


def test_unhashed_blocks_are_taken_before_cached_ones() -> None:
    pool = make_pool(4)
    cached, plain = take_hashed(pool, b"a", b"b"), take(pool, 2)
    pool.free(cached)
    pool.free(plain)
    assert set(take(pool, 2)) == set(plain)
    assert pool.num_cached == 2


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    pool = make_pool(3)
    first, second, third = (take_hashed(pool, name) for name in (b"a", b"b", b"c"))
    for blocks in (second, first, third):
        pool.free(blocks)
    assert [take(pool, 1) for _ in range(3)] == [second, first, third]


def test_a_hit_makes_a_block_the_most_recently_used() -> None:
    pool = make_pool(2)
    old, new = take_hashed(pool, b"old"), take_hashed(pool, b"new")
    pool.free(old)
    pool.free(new)
    pool.share(old)
    pool.free(old)
    assert take(pool, 1) == new
    assert pool.find([b"old"]) == old


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = make_pool(3)
    blocks = take_hashed(pool, b"1", b"2", b"3")
    pool.free(blocks)
    take(pool, 1)
    assert pool.find([b"1", b"2", b"3"]) == blocks[:2]


def test_a_hit_revives_a_free_block() -> None:
    pool = make_pool(2)
    blocks = take_hashed(pool, b"a")
    pool.free(blocks)
    assert pool.num_free_among(blocks) == 1
    pool.share(blocks)
    assert pool.owned_ids() == {blocks[0]: 1}
    assert blocks[0] not in take(pool, 1)


def test_a_second_block_with_the_same_hash_is_not_indexed() -> None:
    pool = make_pool(3)
    first, second = take_hashed(pool, b"a"), take_hashed(pool, b"a")
    assert pool.find([b"a"]) == first
    pool.free(first)
    pool.free(second)
    assert take(pool, 2)[0] == second[0]
    assert pool.find([b"a"]) == first


def test_a_block_keeps_its_first_hash() -> None:
    pool = make_pool(2)
    blocks = take_hashed(pool, b"a")
    pool.commit(blocks[0], b"b")
    assert pool.find([b"a"]) == blocks
    assert pool.find([b"b"]) == []


def test_a_taken_block_is_no_longer_found() -> None:
    pool = make_pool(1)
    pool.free(take_hashed(pool, b"a"))
    take(pool, 1)
    assert pool.find([b"a"]) == []
    assert pool.num_cached == 0


def test_a_forgotten_hash_is_not_found_and_its_block_keeps_its_owner() -> None:
    pool = make_pool(2)
    first, second = take_hashed(pool, b"a", b"b")
    pool.forget([b"a", b"never seen"])
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([], [second])
    assert pool.owned_ids() == {first: 1, second: 1}


def test_find_stops_at_the_first_gap() -> None:
    pool = make_pool(3)
    blocks = take_hashed(pool, b"1", b"3")
    assert pool.find([b"1", b"2", b"3"]) == blocks[:1]


def test_a_reset_forgets_all_when_nothing_is_owned() -> None:
    pool = make_pool(3)
    pool.free(take_hashed(pool, b"a", b"b"))
    assert pool.reset_cache()
    assert (pool.num_cached, pool.find([b"a"]), len(take(pool, 3))) == (0, [], 3)


def test_a_reset_while_a_block_is_owned_changes_nothing() -> None:
    pool = make_pool(3)
    blocks = take_hashed(pool, b"a", b"b")
    pool.free(blocks[1:])
    assert not pool.reset_cache()
    assert pool.find([b"a", b"b"]) == blocks


def test_freeing_a_block_nobody_owns_is_a_bug_that_shows() -> None:
    pool = make_pool(2)
    blocks = take(pool, 1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed without an owner"):
        pool.free(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against a dictionary of owners."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owners: dict[int, int] = {}

    @rule(target=holdings, count=st.integers(0, 5))
    def allocate(self, count: int) -> list[int]:
        taken = self.pool.allocate(count)
        assert (taken is None) == (count > 8 - len(self.owners))
        assert not set(taken or []) & set(self.owners)
        self.owners |= dict.fromkeys(taken or [], 1)
        return taken or []

    @rule(blocks=holdings, start=st.integers(0, 5))
    def commit(self, blocks: list[int], start: int) -> None:
        for offset, block_id in enumerate(blocks):
            if block_id in self.owners:
                self.pool.commit(block_id, b"%d" % (start + offset))

    @rule(target=holdings, start=st.integers(0, 5))
    def share(self, start: int) -> list[int]:
        found = self.pool.find([b"%d" % number for number in range(start, 10)])
        self.pool.share(found)
        for block_id in found:
            self.owners[block_id] = self.owners.get(block_id, 0) + 1
        return found

    @rule(blocks=consumes(holdings))
    def free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        for block_id in blocks:
            self.owners[block_id] -= 1
        self.owners = {block_id: count for block_id, count in self.owners.items() if count}

    @precondition(lambda self: not self.owners)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache()

    @invariant()
    def free_and_owned_make_the_total(self) -> None:
        assert self.pool.owned_ids() == self.owners
        assert self.pool.num_free + len(self.owners) == self.pool.num_usable
        assert self.pool.num_cached <= self.pool.num_usable
        assert 0 not in self.owners


TestAnyOrderOfCalls = PoolMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
