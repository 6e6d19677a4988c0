"""The client that drives servers, the figures made of its records, and the knee of a sweep."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from app.bench import serve
from app.bench.client import Load, Record, Target, drive
from app.bench.plot import draw_frontier
from app.bench.serve import find_model, read_goodput, read_points, summarise
from app.bench.sweep import Point, choose_batched_tokens, find_knee, read_counts
from app.bench.workload import Job
from app.config import UsageError
from engine import EngineDead, EngineOverloaded
from tests.app.api.harness import Start
from tests.fakes import FakeEngine

JOBS = [Job([ord(char) for char in f"word {number}"], 8) for number in range(6)]


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_every_token_of_every_request_is_timed(start: Start, endpoint: str) -> None:
    server = await start(FakeEngine(step_s=0.002))
    target = Target(server.url, await find_model(server.url, None), endpoint)
    records, elapsed = await drive(target, JOBS, Load())
    assert [record.error for record in records] == [""] * 6
    for record in records:
        assert (record.num_output, len(record.itls)) == (8, 7)
        assert 0 < record.ttft < record.e2e <= elapsed
        assert record.ttft + sum(record.itls) <= record.e2e
        assert record.tpot == pytest.approx((record.e2e - record.ttft) / 7)


async def test_no_more_are_open_than_allowed(start: Start) -> None:
    engine = FakeEngine(step_s=0.001)
    server = await start(engine)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, engine.stats().num_running)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await drive(Target(server.url, "fake"), JOBS, Load(max_concurrency=2))
    watcher.cancel()
    assert most == 2


async def test_arrivals_keep_to_the_rate(start: Start) -> None:
    server = await start()
    _, elapsed = await drive(Target(server.url, "fake"), JOBS, Load(rate=50, burstiness=1000))
    assert elapsed > 5 / 50 * 0.9


async def test_nothing_is_waited_for_behind_the_last_arrival(start: Start) -> None:
    server = await start()
    _, elapsed = await drive(Target(server.url, "fake"), JOBS[:1], Load(rate=0.2, burstiness=1000))
    assert elapsed < 2


async def test_the_figures_are_written_where_they_are_asked_for(start: Start, tmp_path: Path) -> None:
    server, target = await start(), tmp_path / "figures.json"
    flags = [
        "--base-url",
        server.url,
        "--num-prompts",
        "2",
        "--output-len",
        "2",
        "--result-filename",
        str(target),
    ]
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    assert await asyncio.to_thread(serve.run, parser.parse_args(flags), 0.0) == 0
    assert json.loads(target.read_text())["num_failed"] == 0


def test_no_prompt_is_made_of_no_token_at_all() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(UsageError, match="--vocab-size=0 must be from 1"):
        serve.run(parser.parse_args(["--vocab-size", "0"]), 0.0)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (FakeEngine(reject=EngineOverloaded("full", retry_after_s=1)), "503"),
        (FakeEngine(fail_after=(3, EngineDead("gone"))), "engine stopped"),
    ],
)
async def test_a_failure_is_counted_and_told(start: Start, engine: FakeEngine, said: str) -> None:
    server = await start(engine)
    records, elapsed = await drive(Target(server.url, "fake"), JOBS[:2], Load())
    figures = summarise(records, elapsed, (50,), {})
    assert figures["num_failed"] == 2 and said in figures["errors"][0]


def test_figures_follow_vllms_definitions() -> None:
    records = [
        Record(10, ttft=0.1, e2e=1.1, itls=[0.5, 0.5], num_output=3),
        Record(10, ttft=0.3, e2e=0.3, num_output=1),
        Record(10, error="503"),
    ]
    figures = summarise(records, 2.0, (50,), {"ttft": 0.2, "tpot": 0.6})
    assert figures["ttft"] == {"mean": pytest.approx(200), "p50": pytest.approx(200)}
    assert figures["tpot"]["mean"] == pytest.approx(500)  # one token has no time per token
    assert (figures["requests_per_s"], figures["output_tokens_per_s"]) == (1.0, 2.0)
    assert figures["total_tokens_per_s"] == 12.0
    assert figures["goodput_requests_per_s"] == 0.5


def test_wrong_flags_are_explained() -> None:
    for read, text in ((read_points, "50,x"), (read_points, "101")):
        with pytest.raises(UsageError, match="--metric-percentiles"):
            read(text)
    with pytest.raises(UsageError, match="ttft, tpot, itl, e2el"):
        read_goodput(["latency:5"])
    with pytest.raises(UsageError, match="--concurrency"):
        read_counts("--concurrency", "1,-2")
    with pytest.raises(UsageError, match="--concurrency"):
        read_counts("--concurrency", "²")


def make_point(concurrency: int, rate: float, tpot: float, tokens: int = 1024, ttft: float = 10.0) -> Point:
    return Point(concurrency, tokens, rate, tpot, ttft)


def test_the_knee_is_where_more_requests_only_cost_time() -> None:
    points = [
        make_point(1, 100, 10),
        make_point(4, 380, 10.5),
        make_point(16, 900, 18),
        make_point(64, 950, 68),
    ]
    assert find_knee(points).concurrency == 16
    assert find_knee([make_point(1, 100, 10), make_point(2, 90, 9)]).concurrency == 1


def test_of_equal_budgets_the_one_with_the_shorter_wait_is_proposed() -> None:
    points = [make_point(8, 100, 5, 256, 50), make_point(8, 99, 5, 512, 20), make_point(8, 80, 5, 2048, 5)]
    assert choose_batched_tokens(points).batched_tokens == 512


def test_the_frontier_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "frontier.png"
    draw_frontier([(10.0, 100.0, 1), (18.0, 900.0, 16)], 16, picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
