"""Blocks that leave the KV cache and come back: with simulated memory, whatever is admitted and ended."""

import random
from dataclasses import dataclass, field

import pytest

from engine.core.block_hash import list_keys
from engine.core.block_pool import NULL_BLOCK
from engine.core.host_tier import HostTier
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.resolved_config import CacheConfig
from tests.engine.core import harness

BLOCK = 4


@dataclass
class Memory:
    """A worker's blocks and slots, with keys instead of their contents."""

    manager: KVCacheManager
    blocks: dict[int, bytes] = field(default_factory=dict)
    slots: dict[int, bytes] = field(default_factory=dict)

    def step(self) -> None:
        assert self.manager.tier is not None
        moves, saves = self.manager.tier.take_moves(0)
        assert not saves
        self.manager.tier.end_step(0)
        for move in moves:
            if not move.key:
                self.slots.pop(move.slot, None)
            elif move.is_load:
                self.blocks[move.block_id] = self.slots[move.slot]
            else:
                self.slots[move.slot] = self.blocks[move.block_id]

    def check_prefix(self, request: Request, num_cached: int) -> None:
        """Every block of the cached prefix has the content that its place asks for."""
        size = self.manager.num_groups
        for group in range(size):
            keys = list_keys(request.block_hashes, group)
            for place in range(num_cached // BLOCK):
                block_id = request.block_ids[place * size + group]
                assert block_id == NULL_BLOCK or self.blocks[block_id] == keys[place]

    def compute(self, request: Request) -> None:
        size = self.manager.num_groups
        for group in range(size):
            keys = list_keys(request.block_hashes, group)
            for block_id, key in zip(request.block_ids[group::size], keys, strict=False):
                if block_id != NULL_BLOCK:
                    self.blocks[block_id] = key


def make_manager(num_usable: int, num_slots: int, windows: tuple[int | None, ...] = (None,)) -> KVCacheManager:
    groups = tuple(harness.make_group(each) for each in windows)
    config = CacheConfig(num_usable + 1, BLOCK, True, groups, 64, num_host_blocks=num_slots)
    return KVCacheManager(config, HostTier(num_slots))


def make_request(prompt: list[int]) -> Request:
    return harness.make_record(harness.make_request("r", prompt))


@pytest.mark.parametrize("windows", [(None,), (None, 8)], ids=["one group", "with a window"])
@pytest.mark.parametrize("num_slots", [1, 5, 40])
def test_a_cached_prefix_always_has_its_own_content(num_slots: int, windows: tuple[int | None, ...]) -> None:
    chance = random.Random(num_slots)
    manager = make_manager(24, num_slots, windows)
    memory = Memory(manager)
    prompts = [[chance.randrange(9) for _ in range(8)] for _ in range(4)]
    running: list[Request] = []
    for _ in range(600):
        prompt = chance.choice(prompts) + [chance.randrange(2) for _ in range(chance.randrange(24))]
        request = make_request(prompt)
        while (num_cached := manager.admit(request)) is None:
            manager.free(running.pop(chance.randrange(len(running))))
        memory.step()
        memory.check_prefix(request, num_cached)
        manager.commit(request, request.num_tokens)
        memory.compute(request)
        running.append(request)
        if chance.random() < 0.1:
            manager.forget(failed := running.pop())
            manager.free(failed)
    assert num_slots == 1 or manager.num_loaded_tokens > 0
    while running:
        manager.free(running.pop())
    assert manager.pool.num_free == manager.pool.num_usable
    assert manager.pool.reset_cache() and not len(manager.tier or ())


def test_events_name_a_block_as_cached_until_the_tier_drops_it() -> None:
    manager = make_manager(2, 2)
    manager.pool.changes = {}
    memory = Memory(manager)
    known: set[bytes] = set()
    for first in range(0, 60, 10):
        request = make_request(list(range(first, first + 8)))
        manager.admit(request)
        memory.step()
        manager.commit(request, 8)
        memory.compute(request)
        manager.free(request)
        for key, is_cached in manager.pool.changes.items():
            (known.add if is_cached else known.discard)(key)
        manager.pool.changes.clear()
        cached = {key for key in known if manager.pool.find([key])}
        assert cached == known and len(known) <= 4
