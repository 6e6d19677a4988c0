"""Router: where requests go, by prefix and by load."""

from collections import Counter

import pytest

from engine import SamplingParams
from engine.config_fields import RouterPolicy
from engine.core.block_hash import extend_block_hashes
from engine.front.router import Router
from engine.messages import AddRequest, KVEvents, NewCompletion

BLOCK_SIZE = 16


def make_request(prompt: list[int], name: str = "r") -> AddRequest:
    return AddRequest(name, prompt, SamplingParams(), [NewCompletion(1, 0)])


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


@pytest.mark.parametrize("policy", ["prefix_aware", "round_robin"])
def test_every_policy_spreads_equal_requests(policy: RouterPolicy) -> None:
    router = make_router(policy)
    prompts = [[number] * 40 for number in range(200)]
    counts = Counter(router.choose(make_request(each, str(each[0])), range(4)).replica for each in prompts)
    assert max(counts.values()) < 1.5 * min(counts.values())
