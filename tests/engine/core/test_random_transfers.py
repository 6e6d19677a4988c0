"""Two schedulers that exchange blocks through a store, with aborts, preemptions, evictions and losses at any moment."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import pytest

from engine.core.actor_messages import BlockCopy, StepDone, StepPlan
from engine.core.block_transfers import BlockTransfers, States, TakeAnswer
from engine.core.host_tier import HostTier
from engine.core.request import Request
from tests.engine.core.fake_worker import FakeWorker, reference_output
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, make_request

BLOCK, NUM_PARTS = 4, 2  # tokens of a block, parts of a state
Content = list[Any]
Store = dict[bytes, Content]
POISON: Content = [None] * BLOCK


class CopyingWorker(FakeWorker):
    """Makes the copies of a plan: `host` has the blocks of the slots."""

    host: dict[int, Content]
    num_blocks: int

    def execute(self, plan: StepPlan) -> StepDone | None:
        for move in plan.block_moves:
            if move.is_load:
                self._write_block(move.block_id, self.host[move.slot])
            elif move.key:  # without a key the slot is emptied, and keeps its content
                self.host[move.slot] = self._read_block(move.block_id)
        done = super().execute(plan)
        for move in plan.block_saves:
            self.host[move.slot] = self._read_block(move.block_id)
        return done

    def _write_block(self, block_id: int, content: Content) -> None:
        if block_id < self.num_blocks:
            self.kv |= {block_id * BLOCK + offset: value for offset, value in enumerate(content)}
            return
        slot, part = divmod(block_id - self.num_blocks, NUM_PARTS)
        assert content[0] == part and (part == 0 or self.kept[slot] == content[1]), "a part of another state"
        self.kept[slot] = content[1]

    def _read_block(self, block_id: int) -> Content:
        if block_id >= self.num_blocks:
            slot, part = divmod(block_id - self.num_blocks, NUM_PARTS)
            return [part, self.kept[slot]]
        return [self.kv[block_id * BLOCK + offset] for offset in range(BLOCK)]


class ExchangingHouse(SchedulerHarness):
    """A scheduler with a host tier, and a store that answers when `exchange` is called."""

    def __init__(
        self, store: Store, chance: random.Random, num_slots: int, narrower: tuple[int, ...], num_states: int
    ) -> None:
        self.tier = HostTier(num_slots)
        super().__init__(
            26, BLOCK, narrower=narrower, max_num_batched_tokens=chance.choice([16, 64]),
            policy=chance.choice(["fcfs", "priority"]), num_states=num_states, tier=self.tier,
        )  # fmt: skip
        self.transfers = self.scheduler.state.transfers = BlockTransfers(self.kv_cache, self.tier, self, saves=True)
        self.worker = CopyingWorker(BLOCK, [None, *narrower], num_states > 0)
        self.worker.host, self.worker.num_blocks = {}, self.kv_cache.pool.num_blocks
        self.num_slots = num_slots
        self.store = store
        self.to_store: deque[Callable[[], list[Request]]] = deque()
        self.chance = chance

    @property
    def host(self) -> dict[int, Content]:
        assert isinstance(self.worker, CopyingWorker)
        return self.worker.host

    @host.setter
    def host(self, content: dict[int, Content]) -> None:
        assert isinstance(self.worker, CopyingWorker)
        self.worker.host = content

    def match(self, unit_keys: Sequence[bytes], states: States | None, take: TakeAnswer[int]) -> None:
        def answer() -> list[Request]:
            length = next((at for at, key in enumerate(unit_keys) if key not in self.store), len(unit_keys)) * BLOCK
            if states is not None:
                found = (at for at, names in states if at <= length and self.store.keys() >= set(names))
                length = next(found, 0)
            return take(length)

        self.to_store.append(answer)

    def load(self, blocks: Sequence[BlockCopy], take: TakeAnswer[list[bool]]) -> None:
        self.host |= {block.slot: POISON for block in blocks}  # the other thread may write from now on

        def answer() -> list[Request]:
            is_loaded = [block.key in self.store and self.chance.random() < 0.9 for block in blocks]
            for block in compress(blocks, is_loaded):
                self.host[block.slot] = self.store[block.key]
            return take(is_loaded)

        self.to_store.append(answer)

    def save(self, blocks: Sequence[BlockCopy], take: TakeAnswer[int]) -> None:
        def answer() -> list[Request]:
            for block in blocks:
                content = self.host[block.slot]
                assert self.store.get(block.key, content) == content, "another block under this key"
                self.store[block.key] = content
            return take(0)

        self.to_store.append(answer)

    def discard(self, unit_keys: Sequence[bytes]) -> None:
        def answer() -> list[Request]:
            for key in unit_keys:
                self.store.pop(key, None)
            return []

        self.to_store.append(answer)

    def follow(self, act: Callable[[], object]) -> None:
        raise AssertionError("no request reports its end late")

    def exchange(self) -> bool:
        """Let the store do what it was asked first."""
        if not self.to_store:
            return False
        self.scheduler.state.waiting.restore(self.to_store.popleft()())
        self.plan()
        return True

    def check_end(self) -> None:
        assert self.kv_cache.pool.num_free == self.kv_cache.pool.num_usable
        assert not self.tier._pinned and len(self.tier._free) + len(self.tier) == self.num_slots


@pytest.mark.parametrize(
    ("num_slots", "narrower", "num_states"),
    [(200, (), 0), (5, (9,), 0), (12, (9,), 0), (5, (), 5), (200, (), 5)],
    ids=["one group", "few slots with a window", "with a window", "few slots with states", "with states"],
)
def test_any_order_of_transfers_keeps_blocks_and_tokens_right(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, narrower: tuple[int, ...], num_states: int
) -> None:
    monkeypatch.setattr("engine.core.block_transfers.UNIT_TOKENS", BLOCK)
    chance = random.Random(num_slots)
    store: Store = {}
    houses = [ExchangingHouse(store, chance, num_slots, narrower, num_states) for _ in range(2)]
    stems = [chance.choices(range(90), k=70) for _ in range(10)]
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    num_preemptions = num_received = 0
    for number in range(300):
        house, name = chance.choice(houses), f"r{number}"
        prompt = chance.choice(stems)[: chance.randrange(71)] + chance.choices(range(90), k=3)
        length = chance.randrange(1, 12)
        expected[name] = reference_output(prompt, length, MAX_MODEL_LEN)
        house.add(make_request(name, prompt, length, gated=chance.random() < 0.2, priority=number % 3))
        for _ in range(chance.randrange(30)):
            chance.choice([house.work, house.fill, house.answer, house.exchange, house.exchange])()
            house.check()
        if chance.random() < 0.4 and house.names:
            aborted.add(victim := chance.choice(list(house.names.values())))
            if chance.random() < 0.3:  # it fails: its blocks leave the cache, the tier and the store
                house.scheduler.state.forget(house.scheduler.state.requests[house.handles[victim]])
            house.abort(victim)
        if chance.random() < 0.3 and store:
            del store[chance.choice(list(store))]
    for house in houses:
        moves = [house.work, house.fill, house.answer, house.exchange]
        while any(move() for move in chance.sample(moves, 4)):
            house.check()
        assert not house.scheduler.state.requests
        house.check_end()
        for name, tokens in house.outputs.items():
            assert tokens == expected[name] or name in aborted, name
        num_preemptions += house.scheduler.state.num_preemptions
        num_received += house.transfers.num_received_tokens
    assert num_preemptions > 3 and num_received > 15 and len(aborted) > 70
