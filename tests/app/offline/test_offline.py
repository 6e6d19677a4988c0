"""Offline jobs over parts: one record per row, whatever ends in between. Ray itself is played by a small one here."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet
from tqdm import tqdm

from app.cli.main import main
from app.config import ExecutorConfig, Failure, UsageError
from app.offline.jobs import BatchJob, ExtractJob, Row
from app.offline.ray_run import Pool
from app.offline.tables import PartFolder, find_format, split_rows
from engine import Engine, EngineConfig

RECORD = {"source": "row 1", "record": {"n": 1}, "valid": True, "finish_reason": "stop", "confidence": {}}
FAILED = RECORD | {"record": None, "valid": False, "error": "empty", "row": {"id": "7"}}


def make_folder(path: Path, file_format: str = "jsonl") -> PartFolder:
    return PartFolder(path.as_uri(), file_format)


class FakeRay:
    """Runs calls at once. `ends` selects the calls of `work` at which the actor ends instead."""

    exceptions = SimpleNamespace(RayActorError=type("E", (Exception,), {}), RayTaskError=type("T", (Exception,), {}))

    def __init__(self, folder: PartFolder, ends: Sequence[int]) -> None:
        self.folder = folder
        self.ends = ends
        self.num_calls = 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    def remote(self, actor_class: type) -> Any:
        ping = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=object))
        actor = SimpleNamespace(ping=ping, work=SimpleNamespace(remote=self._work))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: actor))

    def _work(self, number: int, rows: list[Row], first: int) -> Any:
        self.num_calls += 1
        if self.num_calls in self.ends:
            return FakeRay.exceptions.RayActorError("the node died")
        self.folder.write(number, [{"n": first + at, "row": row} for at, row in enumerate(rows)])
        return object()

    def wait(self, answers: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return answers[-1:], answers[:-1]

    def get(self, answer: Any) -> int:
        if isinstance(answer, Exception):
            raise answer
        return 0


def run(folder: PartFolder, rows: list[Row], done: frozenset[int] = frozenset(), ends: Sequence[int] = ()) -> FakeRay:
    ray = FakeRay(folder, ends)
    pool = Pool(ray, EngineConfig(device="cpu"), ExecutorConfig(part_rows=10), BatchJob(), folder)
    parts = (part for part in split_rows(iter(rows), 10) if part[0] not in done)
    with tqdm(file=io.StringIO()) as bar:
        pool.run(parts, bar)
    return ray


def read_numbers(path: Path) -> list[int]:
    lines = [line for part in sorted(path.glob("part-*.jsonl")) for line in part.read_text().splitlines()]
    return [json.loads(line)["n"] for line in lines]


def test_every_row_has_one_record_when_actors_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    folder.open({})
    ray = run(folder, [{"x": n} for n in range(95)], ends=(2, 5, 6))
    assert read_numbers(tmp_path / "out") == list(range(1, 96))
    assert ray.num_calls == 10 + 3


def test_a_stopped_run_continues_with_the_parts_that_are_missing(tmp_path: Path) -> None:
    rows = [{"x": n} for n in range(40)]
    folder = make_folder(tmp_path / "out")
    folder.open({"input": "a"})
    run(folder, rows)
    (tmp_path / "out" / "part-000002.jsonl").unlink()
    done = folder.open({"input": "a"})
    assert done == {0, 1, 3}
    assert run(folder, rows, done).num_calls == 1
    assert read_numbers(tmp_path / "out") == list(range(1, 41))
    with pytest.raises(UsageError, match="another job"):
        folder.open({"input": "b"})


def test_a_part_that_ends_three_actors_fails_the_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out")
    folder.open({})
    with pytest.raises(Failure, match="3 actors ended while they answered part 0"):
        run(folder, [{"x": 1}], ends=(1, 2, 3))


def test_parts_of_all_records_have_the_same_columns(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "out", "parquet")
    folder.open({})
    folder.write(0, [RECORD])
    folder.write(1, [FAILED])
    rows = parquet.read_table(
        tmp_path / "out", schema=parquet.read_schema(tmp_path / "out/part-000000.parquet")
    ).to_pylist()
    assert [json.loads(row["record"]) for row in rows] == [{"n": 1}, None]
    assert [(row["valid"], row["error"]) for row in rows] == [(True, ""), (False, "empty")]
    assert json.loads(rows[1]["row"]) == {"id": "7"}


def test_a_foreign_folder_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"is not empty and has no _job\.json"):
        make_folder(tmp_path).open({})


async def test_jobs_answer_each_row_in_order() -> None:
    async with Engine(EngineConfig(num_threads=1, enable_native_ops=False)) as engine:
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
        job = ExtractJob(schema, {}, None)
        found = await job.answer(engine, [{"id": 5, "Text": "7 chairs"}, {"id": 6, "note": "x"}], first=11)
        assert [each["source"] for each in found] == ["row 11", "row 12"]
        assert found[0]["valid"] and found[0]["row"] == {"id": "5"}
        assert "no column of texts among id, note" in found[1]["error"]
        body = {"model": "demo_model", "prompt": "Hi", "max_tokens": 2}
        rows = [{"custom_id": "a", "url": "/v1/completions", "body": json.dumps(body)}, {"url": "/v1/completions"}]
        answers = await BatchJob().answer(engine, rows, first=1)
        assert [(each["custom_id"], each["response"]["status_code"]) for each in answers] == [
            ("a", 200), ("row 2", 400)
        ]


def test_bad_flags_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert main(["extract", "--executor", "ray", "--schema", str(schema), "a.parquet"]) == 2
    assert "--executor ray takes one table, and --output FOLDER" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"IN a\.xml must end in \.parquet, "):
        find_format("IN", "a.xml")
    with pytest.raises(UsageError, match="part_rows=0 must be a number from 1"):
        ExecutorConfig(part_rows=0)
