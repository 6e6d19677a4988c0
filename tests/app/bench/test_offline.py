"""The offline benchmarks, run for real on the tiniest of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.bench import roofline, shapes
from app.cli.main import main
from engine.config import DEMO_MODEL

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
    "vocab_size": 64, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "eos_token_id": 0,
    "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of an engine with random weights."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return [
        "--model", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init", "--no-enable-native-ops",
        "--output-json", str(tmp_path / "out.json"), "--input-len", "12", "--output-len", "6",
    ]  # fmt: skip


def test_latency_prints_ours_the_peer_and_the_bound(
    flags: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(roofline, "GEMM_SIZE", 32)
    code = main(
        ["bench", "latency", *flags, "--batch-size", "3", "--num-iters", "2", "--num-iters-warmup", "1",
         "--peer", "transformers", "--roofline"]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0 and "over transformers" in printed and "GB/s" in printed and "share: troupe" in printed
    found = json.loads((tmp_path / "out.json").read_text())
    assert [cell["name"] for cell in found["cells"]] == ["troupe", "transformers"]
    assert len(found["cells"][0]["decode_tokens_per_s"]) == 2
    assert found["machine"]["date"] and found["engine"]["enable_prefix_caching"] is False


def test_throughput_counts_what_was_made(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["bench", "throughput", *flags, "--num-prompts", "5"]) == 0
    assert "5 requests, 60 tokens in, 30 tokens out" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["elapsed_s"]["free"]) == 1


def test_a_shape_takes_a_tokenizer_for_its_grammars(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY | {"vocab_size": 4096})
    code = main(
        ["bench", "throughput", "--shape", "tiny", "--tokenizer", str(DEMO_MODEL), "--no-enable-native-ops",
         "--structured", "--num-prompts", "3", "--input-len", "5", "--output-len", "9"]
    )  # fmt: skip
    assert code == 0 and "structured over free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing"], "unknown benchmark 'nothing'"),
        (["latency", "--batch-size", "0"], "--batch-size=0 must be from 1"),
        (["latency", "--enable-prefix-caching"], "would make the second round measure the cache"),
        (["latency", "--model", "no/such"], "needs a folder with a config.json"),
        (["sweep", "--concurrency", "x"], "--concurrency 'x' must be numbers"),
    ],
)
def test_what_cannot_be_measured_is_one_line(argv: list[str], message: str, capsys: Any) -> None:
    assert main(["bench", *argv]) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1
