"""`bench simulate`: how many replicas a load needs."""

import json
from pathlib import Path

import pytest

from app.bench.simulate import read_trace
from app.cli.main import main
from app.config import UsageError

STEPS = {"num_tokens": [1, 1024], "seconds": [0.01, 0.05], "num_blocks": 4096}


def run(folder: Path, *flags: str) -> int:
    table = folder / "steps.json"
    table.write_text(json.dumps(STEPS), encoding="utf-8")
    return main(["bench", "simulate", "--step-table", str(table), *flags])


def test_the_smallest_number_of_replicas_that_keeps_the_limits_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    flags = "--num-prompts 150 --request-rate 60 --replicas 1,4 --input-len 600 --output-len 16 --ttft-ms 400"
    code = run(tmp_path, *flags.split(), "--output-json", str(figures))
    points = json.loads(figures.read_text(encoding="utf-8"))["points"]
    enough = [point["num_replicas"] for point in points if point["ttft"][2] <= 400 and point["itl"][2] <= 200]
    assert code == 0 and min(enough) > 1
    assert f"prefix_aware: {min(enough)} replicas keep" in capsys.readouterr().out


def test_prefill_replicas_are_compared_with_as_many_mixed_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--num-prompts 100 --request-rate 12 --input-len 900 --prefill-replicas 1 --decode-replicas 2"
    assert run(tmp_path, *flags.split(), "--itl-ms", "30") == 0
    printed = capsys.readouterr().out
    assert "1+2*" in printed and "1+2 replicas keep" in printed


def test_a_trace_of_a_file_shares_prefixes_by_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8]},
        {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [7, 9]},
        {"timestamp": 20, "input_length": 600, "output_length": 2},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    early, plain, late = read_trace(path)
    assert (early.arrival_s, plain.arrival_s, late.arrival_s) == (0, 0.02, 1.5)
    assert early.prompt_token_ids[:512] == late.prompt_token_ids[:512]
    assert [len(each.prompt_token_ids) for each in (early, plain, late)] == [600, 600, 1100]
    assert not set(late.prompt_token_ids[512:]) & set(early.prompt_token_ids[512:] + plain.prompt_token_ids)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: Expecting"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length=0 must be an integer from 1"),
        ('{"timestamp": "now", "input_length": 1, "output_length": 1}', "timestamp='now' must be a number"),
        ("", "has no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_trace(path)


def test_bad_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--policy", "prefix_aware,cleverest") == 2
    assert "--policy 'cleverest' is not one of prefix_aware" in capsys.readouterr().err
    assert main(["bench", "simulate", "--step-table", str(tmp_path / "none.json")]) == 2
    assert "--step-table" in capsys.readouterr().err
