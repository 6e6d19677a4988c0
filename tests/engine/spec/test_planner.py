"""How many drafts a step gets: as many as raise the expected tokens per second, and none where they do not pay."""

import itertools
import random
from collections.abc import Callable

import pytest

from engine.core.actor_messages import StepPlan
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.spec.draft_counts import DraftCounts
from engine.spec.draft_planner import DraftPlanner
from engine.spec.draft_record import Draft, DraftRecord, update_rate
from engine.spec.step_costs import MIN_CREDIT, DraftBudget, StepCosts
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


def test_device_drafts_depend_on_acceptance_batch_and_their_own_cost() -> None:
    config = SpeculativeConfig(method=("eagle",), model="x", num_speculative_tokens=4)
    costs = StepCosts(FLAT)
    assert DraftCounts(config, costs).choose(0.9, 1, 1, has_device_cost=True) == 4
    assert DraftCounts(config, StepCosts(STEEP)).choose(0.9, 1, 1, has_device_cost=True) == 0
    for _ in range(50):
        costs.note_draft(1, 0.004)
    assert 0 < DraftCounts(config, costs).choose(0.6, 1, 1, has_device_cost=True) < 4
    assert DraftCounts(config, costs).choose(0.2, 1, 1, has_device_cost=True) == 0
    costs = StepCosts([(1, 0.010), (64, 0.041)])
    assert DraftCounts(config, costs).choose(0.7, 8, 8) > 0
    assert DraftCounts(config, costs).choose(0.7, 1, 8) == 0, "one row that is faster saves no steps"


def test_step_times_follow_what_is_measured() -> None:
    costs = StepCosts(FLAT)
    for _ in range(200):
        costs.note(1, 0.020)
        costs.note(64, 0.080)
    assert costs.estimate(1) == pytest.approx(0.020, rel=0.1)
    assert costs.estimate(64) == pytest.approx(0.080, rel=0.1)
    assert costs.estimate(32) > costs.estimate(1)


def test_acceptance_is_a_moving_average() -> None:
    rate = 0.5
    for _ in range(100):
        rate = update_rate(rate, 4, 4)
    assert rate > 0.99
    for _ in range(100):
        rate = update_rate(rate, 4, 0)
    assert rate < 0.01


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


def test_a_source_that_is_never_right_is_used_ever_less() -> None:
    house = run(Wrong(), adaptive=True, num_speculative_tokens=3)
    assert 0 < house.num_drafts <= 30
    assert house.num_plans <= len(house.outputs["a"]) + 1


def test_what_a_source_loses_over_all_requests_is_bounded() -> None:
    house = CountingHarness(num_blocks=200, proposer=Wrong(), max_num_batched_tokens=64)
    costs = StepCosts([(1, 0.010), (64, 0.100)])
    planner = make_planner([Wrong()], costs, adaptive=True, num_speculative_tokens=3)
    house.plan_drafts(planner)
    for number in range(20):
        house.add(make_request(f"r{number}", [3, 1, number], 80))
        house.run()
    draft_s = costs.estimate(2) - costs.estimate(1)
    assert house.num_drafts * draft_s == pytest.approx(MIN_CREDIT * 0.010, abs=3 * draft_s)


def test_a_debt_is_paid_by_a_share_of_the_time_of_all_steps() -> None:
    budget = DraftBudget(0.010)
    budget.add("ngram", -1.16)  # 0.16 s are the credit
    assert not budget.allows("ngram") and budget.allows("eagle")
    for _ in range(99):
        budget.note_step(1.0)
    assert not budget.allows("ngram")
    budget.note_step(1.1)
    assert budget.allows("ngram")


def test_right_drafts_are_verified_in_few_steps() -> None:
    house = run(Right(), adaptive=True, num_speculative_tokens=4)
    assert house.num_plans < 0.4 * len(house.outputs["a"])
    (counts,) = house.scheduler.drafts.planner.count().values()  # type: ignore[union-attr]
    assert counts.num_draft_tokens == sum(counts.accepted_per_position)
    assert counts.accepted_per_position[0] == counts.num_drafts
    assert sum(counts.accepted_per_position) + house.num_plans >= len(house.outputs["a"])


def test_a_source_that_rests_is_tried_again_later() -> None:
    record = DraftRecord(("ngram",))
    source = record.find_source("ngram", 0.3)
    source.rest(100)
    assert not record.is_active("ngram", 101)
    first = source.resume_at
    assert record.is_active("ngram", first)
    source.rest(first)
    assert source.resume_at - first > first - 100
    assert not record.is_active("eagle", 10**6)
