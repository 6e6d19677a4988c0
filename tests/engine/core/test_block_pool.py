"""BlockPool: ownership, the order of the free list, and the hash index."""

from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.core.block_pool import BlockPool


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


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="must be at least 2"):
        BlockPool(num_blocks)
    assert BlockPool(2).num_usable == 1


def test_unhashed_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(5)
    cached, plain = take_hashed(pool, b"a", b"b"), take(pool, 2)
    pool.free(cached)
    pool.free(plain)
    assert set(take(pool, 2)) == set(plain)
    assert len(pool.by_hash) == 2


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    """A hit is a use."""
    pool = BlockPool(4)
    first, second, third = (take_hashed(pool, name) for name in (b"a", b"b", b"c"))
    for blocks in (second, first, third):
        pool.free(blocks)
    pool.share(first)
    pool.free(first)
    assert [take(pool, 1) for _ in range(3)] == [second, third, first]


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = BlockPool(4)
    blocks = take_hashed(pool, b"1", b"2", b"3")
    pool.free(blocks)
    take(pool, 1)
    assert pool.find([b"1", b"2", b"3"]) == blocks[:2]


def test_a_run_is_looked_for_from_the_end_and_needs_nothing_before_it() -> None:
    pool = BlockPool(9)
    a, b, _, d, e, f = take_hashed(pool, b"a", b"b", b"c", b"d", b"e", b"f")
    pool.forget([b"c"])
    names = [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    assert pool.find_run(names, 1) == (6, [f])
    assert pool.find_run(names, 3) == (6, [d, e, f])
    assert pool.find_run(names[:5], 3) == (2, [a, b])
    assert pool.find_run(names[2:], 4) == (0, [])
    assert pool.find_run([], 1) == (0, [])


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against a dictionary of owners and one of hashes."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.owners: dict[int, int] = {}
        self.cached: dict[bytes, int] = {}

    @rule(target=holdings, count=st.integers(0, 5))
    def allocate(self, count: int) -> list[int]:
        taken = self.pool.allocate(count)
        assert (taken is None) == (count > 8 - len(self.owners))
        assert not set(taken or []) & set(self.owners)
        self.owners |= dict.fromkeys(taken or [], 1)
        self.cached = {name: block for name, block in self.cached.items() if block not in (taken or [])}
        return taken or []

    @rule(blocks=holdings, start=st.integers(0, 5))
    def commit(self, blocks: list[int], start: int) -> None:
        """A block keeps its first hash, and a hash its first block."""
        for number, block_id in enumerate(blocks, start):
            if block_id in self.owners:
                self.pool.commit(block_id, b"%d" % number)
                if block_id not in self.cached.values():
                    self.cached.setdefault(b"%d" % number, block_id)

    @rule(target=holdings, start=st.integers(0, 5))
    def share(self, start: int) -> list[int]:
        names = [b"%d" % number for number in range(start, 10)]
        found = self.pool.find(names)
        assert found == [self.cached[name] for name in takewhile(self.cached.__contains__, names)]
        assert self.pool.num_free_among(found) == len(set(found) - set(self.owners))
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

    @rule(number=st.integers(0, 9))
    def forget(self, number: int) -> None:
        self.pool.forget([b"%d" % number])
        self.cached.pop(b"%d" % number, None)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == (not self.owners)
        self.cached = self.cached if self.owners else {}

    @invariant()
    def free_and_owned_make_the_total(self) -> None:
        assert self.pool.owned_ids() == self.owners
        assert self.pool.num_free + len(self.owners) == self.pool.num_usable
        assert sorted(self.pool.cached_ids()) == sorted(self.cached.values())
        assert len(self.pool.by_hash) == len(self.cached)
        assert 0 not in self.owners


TestAnyOrderOfCalls = PoolMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
