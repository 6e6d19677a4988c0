"""KVCacheManager: room for tokens, and the prefix cache."""

from collections.abc import Sequence

import pytest

from engine.core.block_hash import extend_block_hashes, list_keys
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.resolved_config import CacheConfig
from tests.engine.core import harness
from tests.engine.core.harness import SchedulerHarness

BLOCK = 4


def make_manager(
    num_usable: int = 20,
    caching: bool = True,
    window: int | None = None,
    narrower: Sequence[int] = (),
    max_chunk_len: int = 64,
) -> KVCacheManager:
    groups = tuple(harness.make_group(each) for each in (window, *narrower))
    return KVCacheManager(CacheConfig(num_usable + 1, BLOCK, caching, groups, max_chunk_len))


def make_request(prompt: list[int], salt: str | None = None, **params: object) -> Request:
    message = harness.make_request("r", prompt, salt=salt, **params)
    return harness.make_record(message)


def make_hashes(tokens: range) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, len(tokens), BLOCK, ())
    return hashes


def compute(manager: KVCacheManager, request: Request) -> None:
    """Admit, compute and end a request, so that its full blocks stay in the cache."""
    assert manager.admit(request) is not None
    manager.commit(request, request.num_tokens)
    manager.free(request)


def count_cached(manager: KVCacheManager, request: Request) -> int:
    num_cached = manager.admit(request)
    assert num_cached is not None
    return num_cached


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
@pytest.mark.parametrize("caching", [True, False])
def test_the_cached_prefix_is_whole_blocks_below_the_prompt(length: int, cached: int, caching: bool) -> None:
    manager = make_manager(caching=caching)
    compute(manager, make_request(list(range(length))))
    assert caching or len(manager.pool.by_hash) == 0
    assert count_cached(manager, make_request(list(range(length)))) == cached * caching
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (2 * length, cached * caching)


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("a", None), (None, "a"), ("", None)])
def test_salts_isolate(one: str | None, other: str | None) -> None:
    manager = make_manager()
    compute(manager, make_request(list(range(10)), salt=one))
    assert count_cached(manager, make_request(list(range(10)), salt=other)) == 0
    assert count_cached(manager, make_request(list(range(10)), salt=one)) == 8


def test_a_request_for_prompt_logprobs_fills_the_cache_and_does_not_read_it() -> None:
    manager = make_manager()
    for _ in range(2):
        request = make_request(list(range(10)), prompt_logprobs=0)
        assert count_cached(manager, request) == 0
        manager.commit(request, 10)
    assert count_cached(manager, make_request(list(range(10)))) == 8


def test_admission_without_room_changes_nothing_and_blocks_revived_by_a_hit_need_room() -> None:
    """Two free blocks hold the prefix; sharing them leaves none for the rest."""
    manager = make_manager(num_usable=4)
    compute(manager, make_request(list(range(9))))
    assert manager.admit(make_request([50] * 8)) is not None
    late = make_request(list(range(9)))
    assert manager.admit(late) is None
    assert (late.block_ids, manager.pool.num_free) == ([], 2)


def test_growing_takes_blocks_only_at_a_border() -> None:
    manager = make_manager(num_usable=4)
    request = make_request(list(range(7)))
    assert manager.admit(request) is not None and manager.pool.num_free == 2
    assert manager.grow(request, 8) == []
    assert manager.grow(request, 9) == request.block_ids[2:]
    assert manager.grow(request, 17) is None
    assert (len(request.block_ids), manager.pool.num_free) == (3, 1)


def test_two_equal_prompts_admitted_in_one_step_share_blocks() -> None:
    house = SchedulerHarness(max_num_batched_tokens=64)
    house.add_together(*(harness.make_request(name, list(range(10)), max_tokens=3) for name in ("a", "b")))
    first, second = house.scheduler.state.running
    assert first.block_ids[:2] == second.block_ids[:2]
    assert second.num_cached_tokens == 8
    house.run()
    assert house.outputs["a"] == house.outputs["b"]


def test_completions_of_one_prompt_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, prompt, hashed = make_manager(200), list(range(40)), []

    def count(hashes: list[bytes], token_ids: list[int], num_tokens: int, *more: object) -> None:
        hashed.append(max(num_tokens // BLOCK - len(hashes), 0))
        extend_block_hashes(hashes, token_ids, num_tokens, *more)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.core.kv_cache_manager.extend_block_hashes", count)
    *requests, salted = [make_request(prompt) for _ in range(4)] + [make_request(prompt, salt="s")]
    for request in requests:
        compute(manager, request)
    assert sum(hashed) == 10
    alone: list[bytes] = []
    extend_block_hashes(alone, prompt, 40, BLOCK, ())
    assert all(request.block_hashes == alone for request in requests)
    compute(manager, salted)
    assert salted.block_hashes[0] != alone[0]


def advance(manager: KVCacheManager, request: Request, num_computed: int) -> None:
    """Tokens up to there are computed, and the one behind them is known."""
    request.token_ids += range(request.num_tokens, num_computed + 1)
    assert manager.grow(request, num_computed) is not None
    manager.commit(request, num_computed)
    request.table.num_computed[request.slot] = num_computed


def test_blocks_behind_the_window_are_given_back_and_stay_in_the_prefix_cache() -> None:
    manager = make_manager(num_usable=8, window=9)
    request = make_request(list(range(10)))
    assert manager.admit(request) == 0
    for num_computed in range(10, 96):
        advance(manager, request, num_computed)
        kept = [block_id for block_id in request.block_ids if block_id]
        assert manager.pool.num_usable - manager.pool.num_free == len(kept) <= 4
        # The blocks were last looked at for the query before.
        first_seen = max(0, num_computed - 9)
        assert [block_id > 0 for block_id in request.block_ids[first_seen // BLOCK :]] == [True] * len(kept)
    assert len(manager.pool.by_hash) == 7, "all but the block that is not full"
    manager.free(request)
    assert manager.pool.num_free == 8


def test_a_step_in_flight_may_be_taken_back_and_still_finds_its_window() -> None:
    """Two tokens are in flight: the query at the last known token may be planned again."""
    manager = make_manager(window=4)
    request = make_request(list(range(9)))
    assert manager.admit(request) == 0
    request.table.num_computed[request.slot] = 11
    assert manager.grow(request, 11) == []
    assert [block_id > 0 for block_id in request.block_ids] == [False, True, True]


def test_a_prefix_needs_only_the_blocks_within_the_window() -> None:
    manager = make_manager(num_usable=6, window=9)
    compute(manager, make_request(list(range(24))))
    manager.pool.forget(make_hashes(range(8)))
    request = make_request(list(range(24)))
    assert count_cached(manager, request) == 20
    assert [block_id > 0 for block_id in request.block_ids] == [False] * 3 + [True] * 3
    manager.pool.forget(make_hashes(range(16))[3:])
    manager.free(request)
    assert count_cached(manager, make_request(list(range(24)))) == 0


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_prompt", [20, 40, 44, 48, 60, 80])
def test_would_fit_says_what_admit_does_once_the_victims_are_gone(num_prompt: int, window: int | None) -> None:
    manager = make_manager(20, window=window)
    victims = [make_request(list(range(start, start + 20))) for start in (0, 100)]
    keeper = make_request([*range(12), 900, 901, 902, 903])
    for request in (*victims, keeper):
        assert manager.admit(request) is not None
        request.table.num_computed[request.slot] = request.num_tokens
        manager.commit(request, request.num_tokens)
    newcomer = make_request([*range(20), *range(500, 480 + num_prompt)])
    promised = manager.would_fit(newcomer, victims)
    for victim in victims:
        manager.free(victim)
    assert (manager.admit(newcomer) is not None) == promised


def list_used(request: Request, num_groups: int) -> list[list[bool]]:
    """For each group, whether each block of the request is there, rather than freed."""
    return [[block_id > 0 for block_id in request.block_ids[group::num_groups]] for group in range(num_groups)]


def test_groups_free_what_leaves_their_own_window() -> None:
    manager = make_manager(40, narrower=[9, 4])
    request = make_request(list(range(10)))
    assert manager.admit(request) == 0
    for num_computed in range(10, 41):
        advance(manager, request, num_computed)
    assert list_used(request, 3) == [[True] * 10, [False] * 7 + [True] * 3, [False] * 9 + [True]]
    assert manager.pool.num_usable - manager.pool.num_free == 14
    manager.free(request)
    assert manager.pool.num_free == 40


def test_a_hit_is_the_longest_prefix_that_every_group_has() -> None:
    manager, hashes = make_manager(40, narrower=[9]), make_hashes(range(24))
    compute(manager, make_request(list(range(25))))
    manager.pool.forget(list_keys(hashes[:3], 1))
    request = make_request(list(range(25)))
    assert count_cached(manager, request) == 24, "the window sees the last two blocks only"
    assert list_used(request, 2) == [[True] * 7, [False] * 4 + [True] * 3]
    manager.free(request)
    manager.pool.forget(list_keys(hashes[5:], 0))
    assert count_cached(manager, make_request(list(range(25)))) == 20
    assert manager.num_windowless_tokens == 0
    manager.pool.forget(list_keys(hashes[4:5], 1))
    assert count_cached(manager, make_request(list(range(25)))) == 0
    assert manager.num_windowless_tokens == 20, "the full group had these"


def test_a_prompt_gets_its_window_chunk_by_chunk_and_the_full_group_in_reserve() -> None:
    manager = make_manager(14, narrower=[4], max_chunk_len=8)
    request, other = make_request(list(range(40))), make_request([90])
    assert manager.admit(request) == 0
    assert (len(request.block_ids), len(request.reserved_ids), manager.pool.num_free) == (4, 8, 2)
    assert manager.admit(other) == 0 and manager.pool.num_free == 0
    manager.free(other)
    for num_computed in range(8, 41, 8):
        manager.commit(request, num_computed)
        request.table.num_computed[request.slot] = num_computed
        assert manager.grow(request, min(num_computed + 8, 40)) is not None
    assert (manager.count_slots(request), request.reserved_ids) == (40, [])
    assert list_used(request, 2) == [[True] * 10, [False] * 9 + [True]]
