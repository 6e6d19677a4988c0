"""Admission under max_loras: adapters take turns, no request starves, the base model never waits."""

import random

import pytest

from tests.engine.core.harness import SchedulerHarness, make_request


def make_prompt(number: int) -> list[int]:
    return [10 + (number * 7 + place) % 50 for place in range(5)]


def list_running(harness: SchedulerHarness) -> set[str]:
    return {request.request_id for request in harness.scheduler.state.running}


def test_a_request_waits_for_its_adapter_and_the_base_model_does_not() -> None:
    harness = SchedulerHarness(max_loras=1)
    harness.add(make_request("a", make_prompt(1), adapter="x"))
    harness.add(make_request("base", make_prompt(2)))
    assert list_running(harness) == {"base"}
    harness.load_adapter()
    harness.work()
    harness.answer()
    assert list_running(harness) == {"base", "a"}
    harness.run()
    assert harness.ended.keys() == {"a", "base"}


def test_an_older_request_gets_the_slot_before_younger_ones_of_the_adapter_that_has_it() -> None:
    harness = SchedulerHarness(max_loras=1)
    harness.add(make_request("x1", make_prompt(1), adapter="x", max_tokens=3))
    harness.load_adapter()
    harness.add(make_request("y", make_prompt(2), adapter="y", max_tokens=3, arrival=1))
    for number in range(3):
        name = f"x{number + 2}"
        harness.add(make_request(name, make_prompt(number), adapter="x", arrival=2 + number))
    assert list_running(harness) == {"x1"}, "younger ones wait behind y"
    order: list[str] = []
    while harness.load_adapter() or harness.work() or harness.answer():
        order += [name for name in sorted(list_running(harness)) if name not in order]
    assert order == ["x1", "y", "x2", "x3", "x4"]


def test_a_broken_adapter_ends_its_requests_alone() -> None:
    harness = SchedulerHarness(max_loras=1)
    harness.broken = {"bad"}
    for number, adapter in enumerate(["bad", "good", "bad", ""]):
        harness.add(make_request(f"{number}", make_prompt(number), adapter=adapter, arrival=number))
    harness.run()
    reasons = {name: details[0].finish_reason for name, details in harness.ended.items()}
    assert reasons["0"] == reasons["2"] == "error"
    assert "error" not in (reasons["1"], reasons["3"])
    assert harness.ended["0"][0].error == "it is broken"


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_of_many_adapters_all_end(seed: int) -> None:
    chance = random.Random(seed)
    harness = SchedulerHarness(max_loras=chance.choice([1, 2, 3]), num_blocks=chance.choice([16, 64]))
    harness.broken = {"3"}
    policy = ["", "", "0", "1", "2", "3", "4"]
    for number in range(120):
        harness.now = number / 10
        request = make_request(
            f"{number}", make_prompt(number % 4), max_tokens=chance.randint(1, 6), adapter=chance.choice(policy),
            gated=chance.random() < 0.2, arrival=harness.now,
        )  # fmt: skip
        harness.add(request)
        for move in chance.choices([harness.work, harness.fill, harness.load_adapter, harness.answer], k=4):
            move()
        if chance.random() < 0.1:
            harness.abort(f"{chance.randrange(number + 1)}")
        if chance.random() < 0.05:
            harness.scheduler.state.adapters.drop(chance.choice("012"))
        harness.check()
        assert len(harness.scheduler.state.adapters._slots) <= harness.scheduler.config.max_loras
    harness.run(chance)
    assert len(harness.ended) == 120
    assert not harness.scheduler.state.adapters._held
