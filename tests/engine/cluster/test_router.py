"""Router: where requests go, by prefix and by load."""

import random
from collections import Counter

import pytest

from engine import SamplingParams
from engine.cluster.router import Router, Ticket
from engine.config import RouterPolicy
from engine.core.block_hash import extend_block_hashes
from engine.messages import AddRequest, KVEvents, NewCompletion

BLOCK_SIZE = 16


def make_request(prompt: list[int], name: str = "r", salt: str | None = None) -> AddRequest:
    return AddRequest(name, prompt, SamplingParams(), [NewCompletion(1, 0)], cache_salt=salt)


def make_router(policy: RouterPolicy = "prefix_aware", num_replicas: int = 4) -> Router:
    router = Router(policy, BLOCK_SIZE)
    for index in range(num_replicas):
        router.reset(index)
    return router


def hash_blocks(prompt: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, prompt, len(prompt), BLOCK_SIZE, ())
    return hashes


def test_a_prompt_goes_where_its_prefix_is_cached_until_the_blocks_are_evicted() -> None:
    router, prompt = make_router(), list(range(100))
    router.note_events(2, KVEvents(stored=hash_blocks(prompt)))
    ticket = router.choose(make_request(prompt), range(4))
    assert (ticket.replica, ticket.num_uncached) == (2, 100 - 96)
    router.end(ticket)
    router.note_events(2, KVEvents(removed=hash_blocks(prompt)))
    assert router.choose(make_request(prompt), range(4)).num_uncached == 100


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    router, prompt = make_router(num_replicas=2), list(range(64))
    router.note_events(0, KVEvents(stored=hash_blocks(prompt)))
    for number in range(3):
        router.choose(make_request([1000 + number] * 400), [0])
    assert router.choose(make_request(prompt), range(2)).replica == 1


def test_a_restarted_replica_has_no_cache_and_no_load() -> None:
    router, prompt = make_router(num_replicas=2), list(range(64))
    router.note_events(0, KVEvents(stored=hash_blocks(prompt)))
    router.reset(0)
    assert router.choose(make_request(prompt), [0]).num_uncached == 64
    assert router.count_requests(0) == 1


def test_a_burst_of_one_prefix_is_computed_once_per_replica_before_any_event_arrives() -> None:
    router, prompt = make_router(), list(range(1500))
    tickets = [router.choose(make_request([*prompt, number]), range(4)) for number in range(40)]
    assert sorted(ticket.num_uncached for ticket in tickets) == [13] * 36 + [1501] * 4


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "round_robin", "consistent_hashing"])
def test_every_policy_spreads_equal_requests(policy: RouterPolicy) -> None:
    router = make_router(policy)
    prompts = [[number] * 40 for number in range(200)]
    counts = Counter(router.choose(make_request(each, str(each[0])), range(4)).replica for each in prompts)
    assert max(counts.values()) < 1.5 * min(counts.values())


def test_consistent_hashing_keeps_a_salt_on_its_replica_when_another_leaves() -> None:
    router = make_router("consistent_hashing")
    for salt in ("one", "two", "three"):
        ticket = router.choose(make_request([1] * 40, salt=salt), range(4))
        router.end(ticket)
        others = [index for index in range(4) if index != (ticket.replica + 1) % 4]
        again = router.choose(make_request([2] * 40, salt=salt), others)
        router.end(again)
        assert again.replica == ticket.replica


def test_64_shared_prefixes_are_found_again_and_the_load_is_even() -> None:
    """0.98 of what one unbounded cache would find; the fullest replica has at most 1.2 times the mean."""
    chance = random.Random(3)
    router = make_router()
    prefixes = [[chance.randrange(50000) for _ in range(1500)] for _ in range(64)]
    seen: set[int] = set()
    num_found = num_findable = 0
    running: list[Ticket] = []
    ratios = []
    for number in range(3000):
        which = chance.randrange(64)
        prompt = prefixes[which] + [chance.randrange(50000) for _ in range(100)]
        ticket = router.choose(make_request(prompt, str(number)), range(4))
        num_found += len(prompt) - ticket.num_uncached
        num_findable += 1488 if which in seen else 0  # 93 blocks of 16
        seen.add(which)
        router.note_events(ticket.replica, KVEvents(stored=hash_blocks(prompt)))
        router.note_first_token(ticket)
        running.append(ticket)
        if len(running) > 64:
            router.end(running.pop(chance.randrange(64)))
            loads = [router.count_requests(index) for index in range(4)]
            ratios.append(max(loads) / (sum(loads) / 4))
    assert num_found / num_findable >= 0.98
    assert sorted(ratios)[len(ratios) // 2] <= 1.2
