"""StateSnapshots and its place in the KV cache manager: where states are kept, found, moved and dropped."""

import random

import numpy as np
import pytest

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.kv_cache_spec import KVCacheGroup
from engine.messages import AddRequest, NewCompletion
from engine.resolved_config import CacheConfig
from engine.sampling_params import SamplingParams

BLOCK, END = 4, 0


def make_manager(num_snapshots: int, num_blocks: int = 200) -> KVCacheManager:
    config = CacheConfig(
        num_blocks, BLOCK, True, (KVCacheGroup(None, (0,)),), 64, has_states=True, num_snapshots=num_snapshots
    )
    return KVCacheManager(config, end_ids=[END])


class Rows:
    """Requests whose tokens are planned as the scheduler does it."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.table = RequestTable(8)
        self.num_requests = 0

    def admit(self, tokens: list[int]) -> tuple[Request, int]:
        self.num_requests += 1
        message = AddRequest(str(self.num_requests), tokens, SamplingParams(), [NewCompletion(self.num_requests, 0)])
        request = Request(message, message.completions[0], self.table, 10_000, frozenset(), 0.0)
        num_cached = self.manager.admit(request)
        assert num_cached is not None
        return request, num_cached

    def run(self, request: Request, start: int, end: int) -> list[int]:
        """Run tokens [start, end), and return the positions where states are kept."""
        assert self.manager.grow(request, end) is not None
        saves = self.manager.plan_saves([request], np.array([start]), np.array([end]))
        self.manager.commit(request, min(end, request.num_tokens))
        return [save.position for save in saves]

    def decode(self, request: Request, start: int, count: int) -> None:
        for position in range(start, start + count):
            self.run(request, position, position + 1)
            request.token_ids.append(position % 7 + 1)

    def end(self, request: Request) -> None:
        self.manager.commit(request, request.num_tokens - 1)
        self.manager.free(request)


def make_tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 999 + place).randrange(1, 50) for place in range(count)]


@pytest.fixture
def rows() -> Rows:
    return Rows(make_manager(8))


def test_states_are_kept_at_the_ends_of_turns_and_of_the_prompt(rows: Rows) -> None:
    prompt = [END if place % 10 == 9 else token for place, token in enumerate(make_tokens(63))]
    request, num_cached = rows.admit(prompt)
    assert num_cached == 0
    # Turns end at 10, 20, ... 60. Only the first of these borders and the last three count.
    assert rows.run(request, 0, 30) == [8]
    assert rows.run(request, 30, 63) == [40, 48, 60]


def test_a_prefix_without_a_state_is_not_used_and_counted(rows: Rows) -> None:
    tokens = make_tokens(41)
    request, _ = rows.admit(tokens)
    rows.run(request, 0, 41)
    rows.end(request)
    other, num_cached = rows.admit([*tokens[:30], *make_tokens(10, 9)])
    assert num_cached == 0 and other.snapshot == -1
    assert rows.manager.num_stateless_tokens == 28
    again, num_cached = rows.admit(tokens)
    assert num_cached == 40 and again.snapshot >= 0


def test_the_state_of_an_answer_moves_on_and_stays_when_it_ends(rows: Rows) -> None:
    request, _ = rows.admit(make_tokens(10))
    rows.run(request, 0, 10)
    rows.decode(request, 10, 20)
    assert rows.manager.states is not None and rows.manager.states.num_used == 2
    rows.end(request)
    _, num_cached = rows.admit([*request.token_ids, *make_tokens(5, 3)])
    assert num_cached == 28


def test_a_failed_request_leaves_no_state(rows: Rows) -> None:
    request, _ = rows.admit(make_tokens(10))
    rows.run(request, 0, 10)
    rows.decode(request, 10, 6)
    rows.manager.forget(request)
    rows.manager.free(request)
    assert rows.manager.states is not None and rows.manager.states.num_used == 0


def test_reset_drops_all_states(rows: Rows) -> None:
    request, _ = rows.admit(make_tokens(10))
    rows.run(request, 0, 10)
    assert not rows.manager.reset_cache()
    rows.end(request)
    assert rows.manager.reset_cache()
    assert rows.manager.states is not None and rows.manager.states.num_used == 0


def test_slots_are_never_shared_or_lost_in_random_runs() -> None:
    rows, drawn = Rows(make_manager(5)), random.Random(3)
    states = rows.manager.states
    assert states is not None
    running: list[tuple[Request, int]] = []
    for _ in range(400):
        if len(running) < 4 and drawn.random() < 0.5:
            prompt = [
                *make_tokens(drawn.choice([7, 12, 20]), drawn.randrange(3)), END, *make_tokens(6, drawn.randrange(4)),
            ]
            request, num_cached = rows.admit(prompt)
            rows.run(request, num_cached, len(prompt))
            running.append((request, len(prompt)))
        elif running and drawn.random() < 0.7:
            place = drawn.randrange(len(running))
            request, length = running[place]
            rows.decode(request, length, 3)
            running[place] = request, length + 3
        elif running:
            rows.end(running.pop(drawn.randrange(len(running)))[0])
        held = [each.slot for each in states._open.values() if each.slot >= 0]
        used = [*states._free, *states._cached.values(), *held]
        assert sorted(used) == list(range(5))
        assert 2 * len(held) <= 5 + 1
