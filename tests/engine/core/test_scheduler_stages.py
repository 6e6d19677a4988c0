"""The scheduler of a pipeline: steps in flight have different rows, and chunks of a prompt take equal times."""

import pytest

from tests.engine.core.harness import SchedulerHarness, make_request
from tests.engine.core.test_scheduler import LASTING, pending_plans, turn


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steps_in_flight_share_the_rows_among_them(num_stages: int) -> None:
    house = SchedulerHarness(
        caching=False, num_stages=num_stages, max_steps_in_flight=num_stages, max_num_seqs=6,
        max_num_batched_tokens=6 * len(LASTING),
    )  # fmt: skip
    house.add_together(*(make_request(f"r{number}", LASTING, 20) for number in range(6)))
    turn(house)
    for _ in range(3 * num_stages):
        rows = [plan.rows.tolist() for plan in pending_plans(house)]
        assert [len(each) for each in rows] == [6 // num_stages] * num_stages
        assert len({row for each in rows for row in each}) == 6
        turn(house)


def test_chunks_of_a_prompt_do_not_wait_for_each_other_and_shrink() -> None:
    house = SchedulerHarness(num_stages=2, max_steps_in_flight=2, max_num_batched_tokens=32, context_cost=0.1)
    house.add(make_request("r", list(range(80)), 1))
    chunks = []
    while plans := pending_plans(house):
        chunks.append((int(plans[0].starts[0]), plans[0].num_tokens, len(plans)))
        turn(house)
    times = [count + 0.1 * (start * count + count**2 / 2) for start, count, _ in chunks[:-1]]
    assert len(times) == 4
    assert max(times) / min(times) < 1.15
    assert [in_flight for _, _, in_flight in chunks] == [2, 2, 2, 2, 1]
