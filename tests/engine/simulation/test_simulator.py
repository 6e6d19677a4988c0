"""Simulator: the times of requests under a virtual clock, and what routing and crashes do to them."""

from random import Random

import numpy as np
import pytest

from engine import (
    Crashes,
    EngineConfig,
    InvalidRequest,
    PrefillReplicas,
    SimulatedRequest,
    SimulatedRun,
    Simulator,
    StepTable,
    measure_steps,
)
from engine.simulation.simulator import SimulatedPolicy
from engine.simulation.step_table import StepSize

TABLE = StepTable((1, 64, 1024), (0.008, 0.010, 0.040), key_s=1e-8, pair_s=1e-9, front_s=0.001)


def make_trace(num: int, rate: float, num_prefixes: int = 64, prefix_len: int = 1500) -> list[SimulatedRequest]:
    rng, requests, now = Random(0), [], 0.0
    for number in range(num):
        now += rng.expovariate(rate)
        start = rng.randrange(num_prefixes) * 10_000
        own = range(10**9 + number * 1000, 10**9 + number * 1000 + 100)
        requests.append(SimulatedRequest(now, [*range(start, start + prefix_len), *own], rng.randint(8, 24)))
    return requests


def simulate(
    trace: list[SimulatedRequest], policy: SimulatedPolicy = "prefix_aware", crashes: Crashes | None = None
) -> SimulatedRun:
    config = EngineConfig(max_num_seqs=64, num_blocks=4096, max_num_batched_tokens=1024)
    return Simulator(config, TABLE, 4, policy, crashes).run(trace)


def test_requests_one_after_another_take_the_sum_of_their_steps() -> None:
    """Against a loop that knows no scheduler: one request at a time, its prompt in one step, then token by token."""
    trace = make_trace(30, rate=8, num_prefixes=10**4, prefix_len=50)
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False, num_blocks=64)
    result = Simulator(config, TABLE, 1).run(trace)
    now = 0.0
    for number, request in enumerate(trace):
        length = len(request.prompt_token_ids)
        now = max(now, request.arrival_s) + TABLE.estimate(StepSize(length, length, length * (length + 1) / 2))
        assert result.ttfts[number] == pytest.approx(now - request.arrival_s + TABLE.front_s)
        for end in range(length + 1, length + request.max_tokens):
            now += TABLE.estimate(StepSize(1, end, end))
        assert result.ends[number] == pytest.approx(now)


def test_64_shared_prefixes_are_found_again_and_raise_the_throughput() -> None:
    """Four caches hold all prefixes together, and none of them alone."""
    calm = simulate(make_trace(1500, rate=140))
    assert calm.num_hit_tokens / calm.num_oracle_tokens >= 0.95
    assert calm.load_ratio <= 1.3
    burst = make_trace(500, rate=10**6)
    rates = {policy: 1 / simulate(burst, policy).seconds for policy in ("prefix_aware", "round_robin", "random")}
    assert rates["prefix_aware"] >= 1.5 * max(rates["round_robin"], rates["random"])


def test_requests_of_crashed_replicas_are_finished_elsewhere_and_a_seed_repeats_the_run() -> None:
    trace = make_trace(200, rate=40)
    first, second = (simulate(trace, crashes=Crashes(rate=0.3, restart_s=2.0)) for _ in range(2))
    assert first.num_crashes and first.num_resumed
    assert first.num_output_tokens == sum(request.max_tokens for request in trace)
    assert len(first.itls) == first.num_output_tokens - len(trace)
    assert np.array_equal(first.ends, second.ends)
    assert first.seconds > simulate(trace).seconds


def test_prefill_replicas_shorten_the_longest_gaps_and_end_every_request() -> None:
    config = EngineConfig(max_num_seqs=64, num_blocks=4096, max_num_batched_tokens=1024)
    trace = make_trace(200, rate=20, num_prefixes=10**4)
    mixed = Simulator(config, TABLE, 4).run(trace)
    apart = Simulator(config, TABLE, 4, prefills=PrefillReplicas(2, transfer_s=1e-5)).run(trace)
    assert mixed.num_prefills == 0 and apart.num_prefills > 190
    assert apart.num_output_tokens == mixed.num_output_tokens
    assert np.percentile(apart.itls, 99) < 0.6 * np.percentile(mixed.itls, 99)
    # One request at a time: a prompt on the other replica, the last chunk's blocks on their way, then the answer.
    (alone,) = Simulator(config, TABLE, 2, prefills=PrefillReplicas(1, transfer_s=1e-5)).run(trace[:1]).ttfts
    (before,) = Simulator(config, TABLE, 1).run(trace[:1]).ttfts
    num_left = len(trace[0].prompt_token_ids) - 1600 // 16 * 16 + 16
    assert (before + 1024e-5 < alone < before + 1024e-5 + TABLE.estimate(StepSize(num_left, 1600, 1600 * 16)) + 0.01)


def test_requests_outlive_crashes_of_prefill_replicas() -> None:
    config = EngineConfig(max_num_seqs=64, num_blocks=4096, max_num_batched_tokens=1024)
    trace = make_trace(200, rate=6, num_prefixes=10**4)
    crashes, prefills = Crashes(rate=0.2, restart_s=2.0), PrefillReplicas(2)
    result = Simulator(config, TABLE, 4, "prefix_aware", crashes, prefills=prefills).run(trace)
    assert result.num_crashes > 5 and result.num_output_tokens == sum(each.max_tokens for each in trace)


def test_a_request_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"request 1 has 1600 \+ \d+ tokens, and max_model_len=48"):
        Simulator(EngineConfig(num_blocks=4), TABLE, 1).run(make_trace(1, rate=1))


def test_a_fitted_table_predicts_steps_that_it_has_not_seen() -> None:
    rng = Random(1)

    def draw() -> StepSize:
        num_tokens, context = 2 ** rng.randint(0, 10), rng.randint(1, 2000)
        return StepSize(num_tokens, num_tokens * context, num_tokens * context / 2)

    sizes = [draw() for _ in range(300)]
    seconds = [TABLE.estimate(size) * rng.uniform(0.95, 1.05) for size in sizes]
    seconds[7] *= 50  # another process had the core
    fitted = StepTable.fit(sizes, seconds)
    for size in [draw() for _ in range(50)]:
        assert fitted.estimate(size) == pytest.approx(TABLE.estimate(size), rel=0.06)


async def test_steps_of_a_model_are_measured_from_one_token_to_the_largest_step() -> None:
    config = EngineConfig(
        num_threads=1, enable_native_ops=False, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64,
        num_blocks=40, skip_tokenizer_init=True,
    )  # fmt: skip
    table, resolved = await measure_steps(config)
    assert (table.num_tokens[0], table.num_tokens[-1]) == (1, 32)
    assert resolved.cache.num_blocks == 40
