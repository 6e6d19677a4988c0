"""The measurements of a GPU without one: ceilings, isolation of parts, table, and the parts, tiny."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.bench.shapes import SHAPES
from app.bench.workload import Job, make_nano
from app.config import UsageError
from tests.measure.gpu_day import run as gpu
from tests.measure.gpu_day.parts import PARTS, Setup, compute_ceiling, find_gaps
from tests.measure.gpu_day.run import report

FAKE = "tests.measure.gpu_day.fake_part"


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.parametrize(("shape", "expected"), [("qwen3-0.6b", 36_040), ("qwen3-8b", 12_970), ("qwen3-14b", 8_310)])
def test_ceilings_are_those_that_the_goals_were_set_by(shape: str, expected: float) -> None:
    config = SHAPES[shape]
    ceiling = compute_ceiling(config, make_nano(1.0, config["vocab_size"]), 4.3e12, 790e12)
    assert ceiling == pytest.approx(expected, rel=1e-3)


def test_twice_the_bandwidth_is_not_twice_the_ceiling_of_a_work_that_computes() -> None:
    jobs = [Job([1] * 1000, 2)]
    slow, fast = (compute_ceiling(SHAPES["qwen3-8b"], jobs, rate, 1e12) for rate in (1e12, 2e12))
    assert slow < fast < 1.01 * slow


def test_a_part_that_fails_or_hangs_does_not_stop_the_rest() -> None:
    parts = [gpu.Part("fails", FAKE, 60.0), gpu.Part("hangs", FAKE, 1.0), gpu.Part("works", FAKE, 60.0)]
    results = dict(gpu.run_parts(parts, budget_s=60.0, is_smoke=False))
    assert [result["status"] for result in results.values()] == ["failed", "timeout", "ok"]
    assert results["fails"]["error"] == "the device fell off"
    assert results["hangs"]["error"] == "stopped after 1 s"
    assert results["works"]["figures"] == {"arguments": []}


def test_parts_behind_the_budget_are_recorded_as_skipped() -> None:
    results = dict(gpu.run_parts([gpu.Part("works", FAKE, 60.0)], budget_s=0.0, is_smoke=True))
    assert results["works"] == {"status": "skipped", "error": "the 0 s of the run were over"}


def test_parts_fit_into_the_run_in_their_own_order() -> None:
    assert sum(part.budget_s for part in gpu.PARTS) <= parse().budget_s == 1200
    assert [part.name for part in gpu.pick_parts("table, ceilings")] == ["ceilings", "table"]
    assert gpu.pick_parts("") == list(gpu.PARTS)
    with pytest.raises(UsageError, match="--parts 'speed' must be one of ceilings, checks"):
        gpu.pick_parts("speed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_one_clear_sentence() -> None:
    with pytest.raises(UsageError, match=r"needs a CUDA device, and torch .* sees none"):
        gpu.run(parse())


def test_the_report_has_every_figure_and_what_failed() -> None:
    parts: dict[str, Any] = {
        "checks": {"status": "ok", "figures": {"num_checks": 9, "wrong": ["silu_mul"], "checks": [{}] * 9}},
        "nano-14b": {"status": "failed", "error": "a\nout of memory"},
        "single": {"status": "ok", "figures": {"ms_per_token": {"qwen3-8b": 7.12345}}},
    }
    machine = {"machine": "GPU", "torch": "2", "date": "today"}
    lines = list(report({"machine": machine, "is_smoke": False, "parts": parts}))
    assert lines == [
        "GPU, torch 2, today", "checks      num_checks: 9", "checks      wrong: silu_mul", "checks      checks: 9",
        "nano-14b    FAILED: out of memory", "single      ms_per_token qwen3-8b: 7.123",
    ]


def test_gaps_are_where_nothing_runs() -> None:
    assert find_gaps([(5.0, 9.0), (0.0, 2.0), (1.0, 3.0), (10.0, 11.0)]) == [2.0, 1.0]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_works_on_a_cpu(name: str, tmp_path: Path) -> None:
    assert PARTS[name](Setup(tmp_path, is_smoke=True))


def test_a_run_on_a_cpu_says_that_its_figures_mean_no_speed(tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "gpu.json"
    assert gpu.run(parse("--smoke", "--parts", "ceilings", "--output-json", str(target))) == 0
    assert json.loads(target.read_text())["parts"]["ceilings"]["status"] == "ok"
    assert "the figures below are not speeds" in capsys.readouterr().out


def test_a_second_start_runs_what_has_not_ended_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ran = tmp_path / "gpu.json", []
    parts = [gpu.Part("first", FAKE, 60.0), gpu.Part("second", FAKE, 60.0)]

    def run_part(part: gpu.Part, *_: object) -> dict[str, Any]:
        ran.append(part.name)
        if ran == ["first", "second"]:
            raise KeyboardInterrupt  # the machine is taken away
        return {"status": "ok", "figures": {"run": len(ran)}}

    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "run_part", run_part)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(parse("--smoke", "--output-json", str(target)))
    assert gpu.run(parse("--smoke", "--output-json", str(target))) == 0
    assert ran == ["first", "second", "second"]
    figures = json.loads(target.read_text())["parts"]
    assert [figures[name]["figures"]["run"] for name in ("first", "second")] == [1, 3]
