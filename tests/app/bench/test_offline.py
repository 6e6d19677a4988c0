"""Offline benchmarks, run on the tiniest of models: works, spreads, and the lines that they print."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.bench import shapes
from app.bench.latency import measure
from app.bench.spread import Spread, percentiles, ratio
from app.bench.workload import Job, add_random_flags, count_tokens, make_nano, make_random, read_work
from app.cli.main import main
from app.config import UsageError
from engine.config_fields import DEMO_MODEL

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
    "vocab_size": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 0,
    "dtype": "float32",
}


def test_the_nano_work_is_the_one_that_others_publish_and_fits_a_small_vocabulary_when_scaled() -> None:
    jobs = make_nano(1.0, 151936)
    assert (len(jobs), count_tokens(jobs)) == (256, (142_827, 133_966))
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


def test_a_noisy_spread_is_marked() -> None:
    assert "?" in str(Spread((1.0, 2.0, 1.5))) and "?" not in str(Spread((1.0, 1.05, 1.1)))
    assert ratio(Spread((2.0, 4.0)), Spread((1.0, 1.0))).values == (2.0, 4.0)
    assert percentiles([0, 1, 2, 3, 4], (50, 75)) == {"p50": 2.0, "p75": 3.0}


def test_a_repeat_that_a_neighbour_disturbed_is_done_again() -> None:
    """A prefill that took longer than prefill and decode together says nothing about decode."""
    times = iter([5.0, 3.0, 1.0, 3.0])
    scripted: Any = SimpleNamespace(name="scripted", run=lambda jobs: next(times), close=lambda: None)
    (cell,) = measure([scripted], [Job([1, 2, 3], 5)], repeats=1, warm_ups=0)
    assert (cell.decode_rate.values, cell.prefill_rate.values) == ((2.0,), (3.0,))


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of an engine with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return [
        "--model", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-native-ops",
        "--output-json", str(tmp_path / "out.json"), "--input-len", "12", "--output-len", "6",
    ]


def test_latency_prints_ours_and_the_peer(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    code = main(
        ["bench", "latency", *flags, "--batch-size", "3", "--num-iters", "2", "--num-iters-warmup", "1",
         "--peer", "transformers"]
    )
    printed = capsys.readouterr().out
    assert code == 0 and "over transformers" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert [cell["name"] for cell in found["cells"]] == ["troupe", "transformers"]
    assert len(found["cells"][0]["decode_tokens_per_s"]) == 2
    assert found["machine"]["date"] and found["engine"]["enable_prefix_caching"] is False


def test_throughput_counts_what_was_made(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["bench", "throughput", *flags, "--num-prompts", "5"]) == 0
    assert "5 requests, 60 tokens in, 30 tokens out" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["elapsed_s"]["free"]) == 1


def test_a_shape_takes_a_tokenizer_for_its_grammars(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY | {"vocab_size": 4096})
    code = main(
        ["bench", "throughput", "--shape", "tiny", "--tokenizer", str(DEMO_MODEL), "--no-enable-native-ops",
         "--structured", "--num-prompts", "3", "--input-len", "5", "--output-len", "9"]
    )
    assert code == 0 and "structured over free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "unknown benchmark 'nothing'"),
        (["latency", "--batch-size", "0"], "--batch-size=0 must be from 1"),
        (["latency", "--enable-prefix-caching"], "would make the second round measure the cache"),
        (["latency", "--model", "no/such"], "needs a folder with a config.json"),
    ],
)
def test_what_cannot_be_measured_is_one_line(argv: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", *argv]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
