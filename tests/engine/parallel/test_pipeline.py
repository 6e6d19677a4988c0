"""Stages of a pipeline: the same texts as one rank, batches that run side by side, and a rank that ends."""

from collections.abc import Callable
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.mixed_requests import TIGHT, make_mixed_requests, run_mixed

MakeConfig = Callable[..., EngineConfig]


@pytest.mark.parametrize(
    ("changes", "of_one"),
    [
        ({"pipeline_parallel_size": 3}, {}),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, {"batch_invariant_tp": True}),
    ],
)
async def test_mixed_requests_have_the_tokens_and_logprobs_of_one_rank(
    changes: dict[str, Any], of_one: dict[str, Any], make_config: MakeConfig
) -> None:
    requests = make_mixed_requests(num_requests=104)
    settings = TIGHT | {"core": "local", "attention_backend": "native"}
    async with Engine(make_config(**settings, **of_one)) as engine:
        expected = await run_mixed(engine, requests)
    async with Engine(make_config(**settings, **changes)) as engine:
        assert await run_mixed(engine, requests) == expected
        stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
