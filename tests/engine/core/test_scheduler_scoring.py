"""Prompts whose log-probabilities are asked for: few tokens a step, told in order, also after a preemption."""

import random

import msgspec
import pytest

from engine.core.actor_messages import StepPlan
from engine.core.step import MAX_SCORED_TOKENS
from engine.messages import NewCompletion, NewTokens
from tests.engine.core.fake_worker import reference_output
from tests.engine.core.harness import SchedulerHarness, make_record, make_request

MAX_LEN = 1000


class ScoringHarness(SchedulerHarness):
    """Keeps what is told of prompts, and every plan."""

    def __init__(self, num_blocks: int = 600, **config: object) -> None:
        self.parts: dict[str, list[list[tuple[int, float] | None]]] = {}
        self.plans: list[StepPlan] = []
        super().__init__(num_blocks, max_model_len=MAX_LEN, **config)

    def count_scored(self) -> list[int]:
        """How many prompt tokens each step scored so far; `work` has run them all."""
        return [sum(map(len, done.prompt_logprobs.values())) for done in self.to_scheduler]

    def read_prompt(self, name: str) -> list[tuple[int, float] | None]:
        """What a reader makes of the parts: one that begins with None begins anew."""
        told: list[tuple[int, float] | None] = []
        for part in self.parts[name]:
            told = part if part[0] is None else told + part
        return told

    def _send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super()._send(plan)

    def _collect(self, told: NewTokens) -> None:
        for detail in told.details:
            name = self.names[detail.handle]
            if detail.prompt_logprobs is not None:
                part = [p and (p.token.token_id, p.token.logprob) for p in detail.prompt_logprobs]
                self.parts.setdefault(name, []).append(part)
        super()._collect(told)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=length)


def expect_told(prompt: list[int]) -> list[tuple[int, float] | None]:
    return [None, *((token, -float(at)) for at, token in enumerate(prompt[1:], 1))]


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_step_scores_few_prompt_tokens_however_many_ask(num_requests: int, chunked: bool) -> None:
    house = ScoringHarness(max_num_batched_tokens=MAX_LEN, enable_chunked_prefill=chunked)
    prompts = {f"r{number}": make_prompt(300, number) for number in range(num_requests)}
    for name, prompt in prompts.items():
        house.add(make_request(name, prompt, 3, prompt_logprobs=1))
    most = 0
    while house.scheduler.state.requests:
        house.work()
        most = max(most, *house.count_scored(), 0)
        house.answer()
    assert most == MAX_SCORED_TOKENS
    for name, prompt in prompts.items():
        assert house.read_prompt(name) == expect_told(prompt)
        assert max(map(len, house.parts[name])) <= MAX_SCORED_TOKENS + 1
        assert house.outputs[name] == reference_output(prompt, 3, MAX_LEN)


def test_plain_prompts_and_decodes_go_on_beside_one_that_is_scored() -> None:
    house = ScoringHarness(max_num_batched_tokens=MAX_LEN, max_steps_in_flight=1)
    house.add(make_request("decode", [1, 2], 40, ignore_eos=True))
    for _ in range(2):
        house.work()
        house.answer()
    house.add(make_request("scored", make_prompt(900), 1, prompt_logprobs=0))
    house.add(make_request("plain", make_prompt(500, 1), 1))
    num_before = len(house.outputs["decode"])
    for _ in range(6):
        house.work()
        house.answer()
    assert len(house.outputs["decode"]) >= num_before + 6
    assert "plain" in house.ended and "scored" not in house.ended
    house.run()
    assert house.read_prompt("scored") == expect_told(make_prompt(900))


def test_a_prompt_told_before_a_preemption_is_not_scored_again() -> None:
    house = ScoringHarness(24, max_num_batched_tokens=64, max_num_seqs=2)
    prompts = [make_prompt(24, seed) for seed in (1, 2)]
    for number, prompt in enumerate(prompts):
        house.add(make_request(f"r{number}", prompt, 40, prompt_logprobs=1, ignore_eos=True))
    house.run()
    assert house.scheduler.state.num_preemptions > 0
    asked = [new.params.prompt_logprobs for plan in house.plans for new in plan.new_rows]
    assert len(asked) > 2 and asked == [1, 1] + [None] * (len(asked) - 2)
    for number, prompt in enumerate(prompts):
        assert sum(map(len, house.parts[f"r{number}"])) == len(prompt)
        assert house.read_prompt(f"r{number}") == expect_told(prompt)


def test_the_first_of_several_completions_tells_the_prompt_for_all() -> None:
    completions = [NewCompletion(handle, seed=handle) for handle in (1, 2, 3)]
    message = make_request("a", make_prompt(9), n=3, prompt_logprobs=2)
    message = msgspec.structs.replace(message, completions=completions)
    requests = [make_record(message, completion) for completion in completions]
    assert [request.wants_prompt_logprobs for request in requests] == [True, False, False]
    details = [request.make_detail() for request in requests]
    assert [detail.prompt_logprobs for detail in details] == [[None], None, None]


@pytest.mark.parametrize("seed", range(40))
def test_any_history_tells_each_prompt_token_in_order(seed: int) -> None:
    chance = random.Random(seed)
    house = ScoringHarness(
        chance.choice([70, 90, 300]),
        max_num_seqs=chance.choice([2, 4]),
        max_num_batched_tokens=chance.choice([16, 100, 256]),
        max_steps_in_flight=chance.choice([1, 2]),
        policy=chance.choice(["fcfs", "priority"]),
    )
    prompts = {}
    for number in range(8):
        name, prompt = f"r{number}", make_prompt(chance.randrange(1, chance.choice([3, 200])), number)
        house.now += 1.0
        wants = {"prompt_logprobs": 1} if chance.random() < 0.7 else {}
        if wants:
            prompts[name] = prompt
        gated, priority = chance.random() < 0.3, chance.randrange(3) - number
        house.add(make_request(name, prompt, 30, gated=gated, priority=priority, arrival=house.now, **wants))
        for _ in range(chance.randrange(12)):
            chance.choice([house.work, house.fill, house.answer])()
    aborted = f"r{chance.randrange(8)}"
    house.abort(aborted)
    house.run(chance)
    house.check()
    for name, prompt in prompts.items():
        told = house.read_prompt(name)
        assert told == expect_told(prompt)[: len(told)]
        assert len(told) == len(prompt) or name == aborted
        assert len(house.ended[name]) == 1
