"""Requests of every kind side by side: drafts and interruptions change none of their texts."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from engine import Engine, EngineConfig
from engine.spec.draft_planner import DraftPlanner
from tests.engine.mixed_requests import TIGHT, Completion, Oracle, make_mixed_requests, run_mixed

MakeConfig = Callable[..., EngineConfig]


async def test_drafts_change_no_text(
    make_config: MakeConfig, mixed_answers: list[list[Completion]], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(mixed_answers)
    monkeypatch.setattr("engine.engine_core.DraftPlanner", partial(DraftPlanner, proposers=[oracle]))
    config = make_config(**TIGHT, speculative_config={"method": "ngram", "adaptive": False})
    async with Engine(config) as engine:
        assert await run_mixed(engine, make_mixed_requests()) == mixed_answers
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_free_blocks == stats.num_blocks
    assert oracle.num_drafted > 150


async def test_a_request_goes_on_from_its_tokens_as_if_it_had_never_stopped(
    make_config: MakeConfig, mixed_answers: list[list[Completion]]
) -> None:
    expected, chance = mixed_answers, random.Random(6)
    cuts = [[chance.randrange(len(each.token_ids)) for each in completions] for completions in expected]
    generated = [
        [each.token_ids[:cut] for each, cut in zip(completions, at, strict=True)]
        for completions, at in zip(expected, cuts, strict=True)
    ]
    async with Engine(make_config(**TIGHT)) as engine:
        found = await run_mixed(engine, make_mixed_requests(), generated)
    for number, completions in enumerate(expected):
        for each, again, cut in zip(completions, found[number], cuts[number], strict=True):
            assert again.token_ids == each.token_ids[cut:], number
            assert each.text.endswith(again.text), number
            assert (again.finish_reason, again.stop_reason) == (each.finish_reason, each.stop_reason), number
            assert again.logprobs == (None if each.logprobs is None else each.logprobs[cut:]), number
