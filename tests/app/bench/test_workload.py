"""Workloads, footprints, spreads: what the figures are figures of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.bench.compare import measure
from app.bench.roofline import Roofline
from app.bench.shapes import SHAPES, Footprint, write_shape
from app.bench.spread import Spread, percentiles, ratio
from app.bench.workload import Job, add_random_flags, count_tokens, make_nano, make_random, read_work
from app.config import UsageError


def test_the_nano_work_is_the_one_that_others_publish() -> None:
    jobs = make_nano(1.0, 151936)
    assert (len(jobs), count_tokens(jobs)) == (256, (142_827, 133_966))


def test_a_scaled_work_keeps_its_requests_and_fits_a_small_vocabulary() -> None:
    jobs = make_nano(0.1, 1000)
    num_in, num_out = count_tokens(jobs)
    assert len(jobs) == 256 and abs(num_in - 14_283) < 200 and abs(num_out - 13_397) < 200
    assert max(max(job.prompt_token_ids) for job in jobs) < 1000


def test_random_work_keeps_to_its_lengths_and_its_seed() -> None:
    jobs = make_random(200, 100, 10, 0.5, 77, seed=1)
    lengths = {len(job.prompt_token_ids) for job in jobs}
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(lengths) > 30
    assert {job.max_tokens for job in jobs} <= set(range(5, 16))
    assert jobs == make_random(200, 100, 10, 0.5, 77, seed=1) != make_random(200, 100, 10, 0.5, 77, seed=2)


@pytest.mark.parametrize("flags", [["--input-len", "0"], ["--range-ratio", "1"], ["--scale", "2"]])
def test_a_flag_out_of_range_is_named(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_random_flags(parser, 4, 4, 4)
    with pytest.raises(UsageError, match=f"^{flags[0]}={float(flags[1]):g}"):
        read_work(parser.parse_args(flags), 100)


@pytest.mark.parametrize("name", SHAPES)
def test_a_footprint_counts_the_weights_that_a_token_passes(name: str, tmp_path: Path) -> None:
    folder = write_shape(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    matrices = [
        weight.numel() for key, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in key
    ]
    head = 0 if not config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    assert Footprint.from_config(config).num_weights == sum(matrices) + head


def test_a_step_is_bound_by_reading_or_by_arithmetic() -> None:
    footprint = Footprint.from_config(SHAPES["qwen3-0.6b"])
    roof = Roofline(one_thread=40e9, all_threads=80e9, flops=1e12)
    assert roof.step_time(footprint, 1, 128, 2) == pytest.approx(footprint.num_weights * 2 / 80e9, rel=0.02)
    assert roof.step_time(footprint, 512, 1, 2) == pytest.approx(footprint.step_flops(512, 1) / 1e12)
    assert (
        Footprint.from_config(SHAPES["qwen3-0.6b"]).kv_per_token * 2 * 1024 == 117_440_512
    )  # 117 MB at bf16


def test_a_noisy_spread_is_marked() -> None:
    assert "?" in str(Spread((1.0, 2.0, 1.5))) and "?" not in str(Spread((1.0, 1.05, 1.1)))
    assert ratio(Spread((2.0, 4.0)), Spread((1.0, 1.0))).values == (2.0, 4.0)
    assert percentiles([0, 1, 2, 3, 4], (50, 75)) == {"p50": 2.0, "p75": 3.0}


def test_a_repeat_that_a_neighbour_disturbed_is_done_again() -> None:
    """A prefill that took longer than prefill and decode together says nothing about decode."""

    class Scripted:
        name = "scripted"
        times = iter([5.0, 3.0, 1.0, 3.0])

        def run(self, jobs: Sequence[Job]) -> float:
            return next(self.times)

        def close(self) -> None:
            pass

    (cell,) = measure([Scripted()], [Job([1, 2, 3], 5)], repeats=1, warm_ups=0)
    assert (cell.decode_rate.values, cell.prefill_rate.values) == ((2.0,), (3.0,))
