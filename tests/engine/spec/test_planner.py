"""How many drafts a step gets: as many as raise the expected tokens per second, and none where they do not pay."""

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from engine.core.actor_messages import StepPlan
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.spec.draft_counts import DraftCounts
from engine.spec.draft_planner import DraftPlanner
from engine.spec.draft_record import (
    MAX_PAUSE,
    MIN_PAUSE,
    Draft,
    DraftRecord,
    SourceRecord,
)
from engine.spec.step_costs import StepCosts
from engine.speculative_config import SpeculativeConfig
from tests.engine.core.fake_worker import next_token, reference_output
from tests.engine.core.harness import MAX_MODEL_LEN, SchedulerHarness, make_planner, make_request

FLAT = [(1, 0.010), (64, 0.011)]  # memory-bound: more tokens cost almost nothing
STEEP = [(1, 0.001), (64, 0.064)]  # compute-bound: every token costs the same


def find_best(drafts: dict[int, Draft], num_samples: int, costs: StepCosts) -> float:
    """The highest expected tokens per second over all numbers of drafts."""
    options = [range(len(each.token_ids) + 1) for each in drafts.values()]
    rates = [each.rate for each in drafts.values()]
    best = 0.0
    for lengths in itertools.product(*options):
        gain = sum(sum(rate ** (at + 1) for at in range(n)) for rate, n in zip(rates, lengths, strict=True))
        best = max(best, (num_samples + gain) / costs.estimate(num_samples + sum(lengths)))
    return best


@pytest.mark.parametrize("times", [FLAT, STEEP, [(1, 0.01), (4, 0.011), (5, 0.02), (64, 0.05)]])
def test_no_other_choice_of_drafts_gives_more_tokens_per_second(times: list[tuple[int, float]]) -> None:
    chance, costs = random.Random(2), StepCosts(times)
    counts = DraftCounts(SpeculativeConfig(method=("ngram",)), costs)
    for _ in range(40):
        drafts = {
            slot: Draft("ngram", [1] * chance.randrange(1, 5), chance.choice([0.1, 0.5, 0.8, 0.97]))
            for slot in range(chance.randrange(1, 4))
        }
        num_samples = len(drafts) + chance.randrange(3)
        kept = counts.cut(drafts, num_samples, num_samples, budget=100)
        gain = sum(each.rate ** (at + 1) for each in kept.values() for at in range(len(each.token_ids)))
        speed = (num_samples + gain) / costs.estimate(
            num_samples + sum(len(each.token_ids) for each in kept.values())
        )
        assert speed == pytest.approx(find_best(drafts, num_samples, costs))


def choose(costs: StepCosts, rate: float, num_drafting: int, num_rows: int) -> int:
    """How many drafts the device should propose for rows of one acceptance."""
    config = SpeculativeConfig(method=("eagle",), model="x", num_speculative_tokens=4)
    counts = DraftCounts(config, costs).choose(np.full(num_drafting, rate), num_rows)
    assert len(set(counts.tolist())) == 1
    return int(counts[0])


def test_device_drafts_depend_on_acceptance_batch_and_their_own_cost() -> None:
    costs = StepCosts(FLAT)
    assert choose(costs, 0.9, 1, 1) == 4
    assert choose(StepCosts(STEEP), 0.9, 1, 1) == 0
    for _ in range(50):
        costs.note_draft(1, 0.004)
    assert 0 < choose(costs, 0.6, 1, 1) < 4
    assert choose(costs, 0.2, 1, 1) == 0
    costs = StepCosts([(1, 0.010), (64, 0.041)])
    assert choose(costs, 0.7, 8, 8) > 0
    assert choose(costs, 0.7, 1, 8) == 0, "one row that is faster saves no steps"


def test_rows_get_drafts_by_their_own_acceptance() -> None:
    config = SpeculativeConfig(method=("eagle",), model="x", num_speculative_tokens=4)
    costs = StepCosts([(1, 0.010), (64, 0.100)])
    counts = DraftCounts(config, costs).choose(np.array([0.9, 0.5, 0.05]), 3).tolist()
    assert counts[0] > counts[1] > counts[2] == 0


def test_step_times_follow_what_is_measured() -> None:
    costs = StepCosts(FLAT)
    for _ in range(200):
        costs.note(1, 0.020)
        costs.note(64, 0.080)
    assert costs.estimate(1) == pytest.approx(0.020, rel=0.1)
    assert costs.estimate(64) == pytest.approx(0.080, rel=0.1)
    assert costs.estimate(32) > costs.estimate(1)


class Wrong:
    """Proposes tokens that never come."""

    name = "wrong"

    def __init__(self) -> None:
        self.num_drafted = 0

    def propose(self, request: Request, limit: int) -> list[int]:
        self.num_drafted += limit
        return [(next_token(request.token_ids) + 1) % 97] * limit

    def forget(self, request: Request) -> None:
        pass


class Right(Wrong):
    """Proposes the tokens that come."""

    name = "right"

    def propose(self, request: Request, limit: int) -> list[int]:
        tokens = list(request.token_ids)
        for _ in range(limit):
            tokens.append(next_token(tokens))
        return tokens[request.num_tokens :]


class CountingHarness(SchedulerHarness):
    """Counts the drafts of all plans."""

    num_drafts = 0
    num_plans = 0

    def plan_drafts(self, make_planner: Callable[[RequestTable], DraftPlanner]) -> None:
        assert self.scheduler.drafts is not None
        self.scheduler.drafts.planner = make_planner(self.scheduler.table)

    def _send(self, plan: StepPlan) -> None:
        self.num_drafts += len(plan.draft_token_ids)
        self.num_plans += 1
        super()._send(plan)


def run(proposer: Wrong, **settings: object) -> CountingHarness:
    house = CountingHarness(num_blocks=200, proposer=proposer, max_num_batched_tokens=64)
    planner = make_planner([proposer], StepCosts(FLAT), **settings)
    house.plan_drafts(planner)
    prompt = [3, 1, 4]
    house.add(make_request("a", prompt, 80))
    house.run()
    assert house.outputs["a"] == reference_output(prompt, 80, MAX_MODEL_LEN)
    return house


def test_a_source_that_is_never_right_loses_little_over_many_requests() -> None:
    house = CountingHarness(num_blocks=200, proposer=Wrong(), max_num_batched_tokens=64)
    costs = StepCosts([(1, 0.010), (64, 0.100)])
    house.plan_drafts(make_planner([Wrong()], costs, adaptive=True, num_speculative_tokens=3))
    losses = []
    for number in range(20):
        before = house.num_drafts
        house.add(make_request(f"r{number}", [3, 1, number], 80))
        house.run()
        losses.append((house.num_drafts - before) * (costs.estimate(2) - costs.estimate(1)) / (80 * costs.estimate(1)))
    assert losses[0] < 0.06
    assert max(losses[1:]) < 0.02 and sum(losses[1:]) > 0, "it is probed again in later requests"
    assert sum(losses) / 20 < 0.01


def test_right_drafts_are_verified_in_few_steps() -> None:
    house = run(Right(), adaptive=True, num_speculative_tokens=4)
    assert house.num_plans < 0.4 * len(house.outputs["a"])
    (counts,) = house.scheduler.drafts.planner.count().values()  # type: ignore[union-attr]
    assert counts.num_draft_tokens == sum(counts.accepted_per_position)
    assert counts.accepted_per_position[0] == counts.num_drafts
    assert sum(counts.accepted_per_position) + house.num_plans >= len(house.outputs["a"])


def test_a_source_that_rests_is_tried_again_later() -> None:
    source = SourceRecord(0.3, MIN_PAUSE)
    record = DraftRecord({"ngram": source})
    source.rest(100)
    assert not record.is_active("ngram", 101)
    first = source.resume_at
    assert record.is_active("ngram", first) and record.find_wake(101) == first
    source.rest(first)
    assert source.resume_at - first > first - 100
    assert not record.is_active("eagle", 10**6)


def test_one_step_that_saves_time_ends_the_long_pauses() -> None:
    source = SourceRecord(0.3, MIN_PAUSE)
    for _ in range(10):
        source.rest(0)
    assert source.pause == MAX_PAUSE
    assert not source.note_gain(-1.0, 0.010), "a probe that costs more than it may bring is the last"
    assert source.note_gain(5.0, 0.010)
    assert source.pause == MIN_PAUSE
