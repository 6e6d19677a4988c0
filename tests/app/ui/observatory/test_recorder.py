"""The recorder makes lanes from samples, and samples only while a page polls."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from app.ui.observatory import recorder as module
from app.ui.observatory.recorder import CACHED, SHARED, Recorder
from app.ui.observatory.tab import Observatory
from engine import EngineSnapshot, EngineStats, Histogram, ReplicaStats, RequestView
from tests.fakes import FakeEngine


def make_view(name: str = "r", phase: str = "decode", **more: Any) -> RequestView:
    values: dict[str, Any] = {
        "handle": name, "request_id": name, "phase": phase, "age_s": 0.0, "priority": 0, "num_prompt_tokens": 8,
        "num_output_tokens": 2,
        "num_computed_tokens": 8, "num_cached_tokens": 0, "num_preemptions": 0, "has_grammar": False, "block_ids": (),
    }
    return RequestView(**(values | more))


def make_snapshot(*views: RequestView, cached: tuple[int, ...] = (), num_blocks: int = 100) -> EngineSnapshot:
    return EngineSnapshot(views, num_blocks, 16, cached, 4, 64)


def make_recorder(snapshot: EngineSnapshot | None = None) -> tuple[Recorder, Any]:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.05)
    stats = EngineStats(histograms={"time_to_first_token_seconds": histogram})

    async def take_snapshot(with_blocks: bool = True) -> EngineSnapshot | None:
        now: EngineSnapshot | None = engine.now
        return now

    replicas = [
        ReplicaStats(0, "ready", 3, 2, 0.5, num_queried_tokens=10, num_hit_tokens=4), ReplicaStats(1, "starting", 0)
    ]
    engine: Any = SimpleNamespace(
        snapshot=take_snapshot, now=snapshot, stats=lambda: stats, state="ready",
        resolved=FakeEngine().resolved, describe_model=FakeEngine().describe_model, describe_runtime=dict,
        describe_replicas=lambda: replicas,
    )
    house = SimpleNamespace(time=100.0, engine=engine)
    return Recorder(engine, clock=lambda: house.time), house


def test_looks_of_the_same_phase_are_one_segment() -> None:
    recorder, house = make_recorder()
    for phase in ("queued", "queued", "prefill", "decode", "decode"):
        recorder.sample(make_snapshot(make_view(phase=phase)))
        house.time += 1.0
    segments = recorder.lanes["r"].segments
    assert [segment[0] for segment in segments] == ["queued", "prefill", "decode"]
    assert all(before[2] == after[1] for before, after in pairwise(segments))


def test_decoding_under_a_grammar_and_preemption_have_phases_of_their_own() -> None:
    recorder, _ = make_recorder()
    recorder.sample(make_snapshot(make_view("g", has_grammar=True), make_view("p", "preempted", num_preemptions=2)))
    assert recorder.lanes["g"].segments[0][0] == "grammar" and "preempted 2×" in recorder.lanes["p"].tip


def test_a_lane_closes_when_its_request_ends_and_is_forgotten_later() -> None:
    recorder, house = make_recorder()
    recorder.sample(make_snapshot(make_view()))
    house.time += 1.0
    recorder.sample(None)
    assert recorder.lanes["r"].is_open is False
    house.time += module.WINDOW_S + 1
    recorder.sample(make_snapshot())
    assert recorder.lanes == {}


async def test_a_poll_is_small_json_with_all_that_is_drawn() -> None:
    views = [make_view(str(index), block_ids=tuple(range(1 + index * 4, 5 + index * 4))) for index in range(64)]
    recorder, _ = make_recorder(make_snapshot(*views, num_blocks=25_000))
    data = await recorder.poll()
    assert len(json.dumps(data)) < 12_000 and len(data["lanes"]) == module.MAX_LANES
    assert data["limits"] == {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    assert data["stats"]["histograms"]["ttft"]["counts"] == [1, 0, 0]
    assert [(each["state"], each["requests"], each["hit_share"]) for each in data["replicas"]] == [
        ("ready", 3, 0.4), ("starting", 0, 0.0)
    ]
    await recorder.close()


async def test_an_engine_that_is_down_has_no_blocks_and_no_error() -> None:
    recorder, _ = make_recorder(None)
    assert (await recorder.poll())["blocks"] is None
    await recorder.close()


async def test_recording_stops_without_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_INTERVAL_S", 0.0)
    recorder, house = make_recorder(make_snapshot())
    await recorder.poll()
    house.time += 2
    await recorder.poll()
    task = recorder._task
    assert task is not None and not task.done()
    house.time += module.PATIENCE_S
    await task
    await recorder.poll()
    assert recorder._task is not task
    await recorder.close()


def test_device_weights_and_kernels_that_failed_the_self_check_are_named() -> None:
    engine = FakeEngine()
    assert module.describe_device(engine) == ["cpu", "computes in float32"]
    engine.describe_runtime = lambda: {"replaced_kernels": "silu_mul"}  # type: ignore[method-assign]
    assert module.describe_device(engine)[1] == "computes in float32; replaced: silu_mul"
    assert module.describe_device(FakeEngine(state="starting")) == ["", ""]


def test_the_map_distinguishes_owned_shared_and_cached_blocks() -> None:
    recorder, _ = make_recorder()
    snapshot = make_snapshot(make_view("a", block_ids=(1, 2)), make_view("b", block_ids=(2, 5)), cached=(2, 6))
    recorder.sample(snapshot)
    blocks = recorder._map_blocks(snapshot)
    kinds = [kind for kind, count in blocks["runs"] for _ in range(count)]
    assert kinds[1] == SHARED and kinds[2:4] == [0, 0] and kinds[5] == CACHED and len(kinds) == 6
    assert kinds[0] >= 3 and kinds[4] >= 3 and kinds[0] != kinds[4]
    assert (blocks["num_owned"], blocks["num_cached"], blocks["num_blocks"]) == (3, 2, 99)


def test_a_large_cache_is_grouped_so_that_the_map_stays_small() -> None:
    recorder, _ = make_recorder()
    snapshot = make_snapshot(make_view("a", block_ids=(20_000,)), num_blocks=25_000)
    recorder.sample(snapshot)
    blocks = recorder._map_blocks(snapshot)
    assert blocks["group"] == 14 and sum(count for _, count in blocks["runs"]) <= module.MAX_CELLS


async def test_of_several_models_the_chosen_one_is_drawn_else_the_one_that_works_or_worked_last() -> None:
    engines = [make_recorder()[1].engine for _ in range(3)]
    for name, engine in zip("abc", engines, strict=True):
        engine.model_name, engine.work = name, EngineStats()
        engine.stats = lambda engine=engine: engine.work
    observatory = Observatory(lambda: engines)

    async def draw(chosen: str = "") -> str:
        polled = await observatory.poll(chosen)
        assert polled["models"] == [each.model_name for each in engines]
        return str(polled["model"])

    assert await draw() == "a"
    engines[1].work = EngineStats(num_running=1)
    assert await draw() == "b" and await draw("c") == "c"
    engines[0].work = EngineStats(num_running=1)
    assert await draw() == "b"
    engines[1].work = EngineStats()
    assert await draw() == "a"
    engines[0].work = EngineStats(generation_tokens=5)
    assert await draw() == "a"
    engines[2].work = EngineStats(generation_tokens=9)  # between two looks
    assert await draw() == "c" and await draw() == "c"
    del engines[0]  # unloaded
    assert await draw("a") == "c"
    for recorder in observatory._recorders.values():
        await recorder.close()
