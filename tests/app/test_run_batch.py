"""run-batch: the OpenAI batch format, row by row, and over a kill."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from engine import EngineDead, EngineOverloaded
from tests.app.api.harness import needs_model
from tests.fakes import FakeEngine

CHAT = "/v1/chat/completions"


def row(name: str, url: str = CHAT, method: str = "POST", **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": name}]} | fields
    return {"custom_id": name, "method": method, "url": url, "body": body}


@dataclass
class Files:
    """IN and OUT of a batch, and the command that runs it."""

    source: Path
    target: Path

    def write(self, *rows: Any) -> None:
        self.source.write_text("".join(json.dumps(one) + "\n" for one in rows))

    @property
    def results(self) -> dict[str, Any]:
        rows = [json.loads(line) for line in self.target.read_text().splitlines()]
        assert len({one["custom_id"] for one in rows}) == len(rows)
        return {one["custom_id"]: one for one in rows}

    @property
    def argv(self) -> list[str]:
        return ["run-batch", "-i", str(self.source), "-o", str(self.target)]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_every_row_gets_the_answer_of_its_route(files: Files, fake_local: FakeEngine, capsys: Any) -> None:
    text = {"custom_id": "t", "method": "POST", "url": "/v1/completions", "body": {"prompt": ["a", "b"]}}
    files.write(row("hello"), text)
    assert main(files.argv) == 0
    hello = files.results["hello"]
    assert (hello["error"], hello["response"]["status_code"]) == (None, 200)
    reply = hello["response"]["body"]
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"]["content"] == "You said <user>hello"
    choices = files.results["t"]["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == ["You said a", "You said b"]
    printed = capsys.readouterr()
    assert printed.out == "" and "2/2" in printed.err


def test_a_bad_row_has_its_own_error_and_the_others_go_on(files: Files, fake_local: FakeEngine) -> None:
    files.write(
        row("value", temperature=-9), row("type", temperature="hot"), row("stream", stream=True),
        row("url", url="/v1/embeddings"), row("method", method="GET"),
        row("schema", guided_json={"type": "nonsense"}),
        {"custom_id": "body", "method": "POST", "url": CHAT, "body": "text"},
        {"custom_id": "bare", "method": "POST", "url": CHAT}, row("torn", reasoning="\ud800"), row("good"),
    )
    assert main(files.argv) == 1
    results = files.results
    assert results.pop("good")["response"]["status_code"] == 200
    assert {one["response"]["status_code"] for one in results.values()} == {400}
    # in OpenAI's format `error` is for a request without a response
    assert all(one["error"] is None for one in results.values())
    errors = {name: one["response"]["body"]["error"] for name, one in results.items()}
    assert errors["type"]["param"] == "temperature"
    messages = {name: error["message"] for name, error in errors.items()}
    assert messages["url"].startswith("POST /v1/embeddings is not possible in a batch; POST to /v1/chat/compl")
    assert messages["body"] == messages["bare"] == "body is required: the request of this row, a JSON object"
    assert messages["torn"].startswith("reasoning contains an unpaired surrogate")


def test_rows_in_flight_are_bounded(files: Files, fake_local: FakeEngine) -> None:
    files.write(*(row(str(i)) for i in range(12)))
    most = 0
    play = fake_local._play
    fake_local.hold = hold = asyncio.Event()

    def count(request: Any) -> Any:
        nonlocal most
        most = max(most, fake_local.stats().num_running)
        # nobody ends before there was time for a fourth to come
        if most in (1, 3):
            asyncio.get_running_loop().call_later(0.1 if most == 3 else 10, hold.set)
        return play(request)

    fake_local._play = count  # type: ignore[method-assign]
    assert main([*files.argv, "--max-in-flight", "3"]) == 0
    assert (most, len(files.results)) == (3, 12)


def test_rows_that_are_done_are_not_done_again(files: Files, fake_local: FakeEngine) -> None:
    files.write(row("a"), row("b"))
    assert main(files.argv) == 0
    whole = files.target.read_text()
    files.write(row("a"), row("b"), row("c"))
    # as a kill in the middle of a write would leave it
    files.target.write_text(whole + '{"id": "batch_req_12')
    assert main(files.argv) == 0
    assert files.target.read_text().startswith(whole)
    assert [request.prompt for request in fake_local.requests][2:] == ["<user>c\n<assistant>"]
    assert set(files.results) == {"a", "b", "c"}


def test_a_full_queue_is_waited_for(files: Files, fake_local: FakeEngine, monkeypatch: Any) -> None:
    files.write(row("a"))
    fake_local.reject = EngineOverloaded("full", retry_after_s=7)

    async def wait(delay: float) -> None:
        assert delay in (7, 0)
        fake_local.reject = None

    monkeypatch.setattr(asyncio, "sleep", wait)
    assert main(files.argv) == 0
    assert files.results["a"]["response"]["status_code"] == 200


def test_a_dead_engine_ends_the_run_and_leaves_its_rows_to_the_next(
    files: Files, fake_local: FakeEngine, capsys: Any
) -> None:
    files.write(row("a"), row("b"))
    fake_local.fail_after = (3, EngineDead("the device is on fire"))
    assert main(files.argv) == 1
    assert files.results == {}
    assert "troupe: the device is on fire" in capsys.readouterr().err
    fake_local.fail_after = None
    assert main(files.argv) == 0
    assert set(files.results) == {"a", "b"}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (None, None, "cannot use"), ("not json\n", None, "in.jsonl:1 is not a JSON object with a custom_id"),
        ('{"custom_id": "1", "custom_id": "2"}\n', None, "in.jsonl:1 has the duplicate key 'custom_id'"),
        ("", "my diary\n", "out.jsonl:1 is not a row"), ("", "my diary", "out.jsonl ends with something"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    files: Files, source: str | None, target: str | None, message: str, capsys: Any
) -> None:
    for path, text in ((files.source, source), (files.target, target)):
        if text is not None:
            path.write_text(text)
    assert main(files.argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert target is None or files.target.read_text() == target


def test_all_bad_lines_are_told_at_once_or_the_first_of_very_many(files: Files, capsys: Any) -> None:
    files.source.write_text('{"custom_id": "a"}\n\nno json\n{"url": "x"}\n{"custom_id": "a"}\n')
    assert main(files.argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("in.jsonl:")[2][:6] for line in lines[:-1]] == ["3 is n", "4 is n", "5 has "]
    assert "has the custom_id 'a' of an earlier" in lines[2]
    assert lines[-1] == f"troupe: {files.source} has 3 bad lines; nothing was answered"
    assert not files.target.exists()
    files.source.write_text("no json\n" * 1000)
    assert main(files.argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 22
    assert lines[20:] == ["and 980 more", f"troupe: {files.source} has 1000 bad lines; nothing was answered"]


def test_in_and_out_are_two_files_in_is_no_pipe_and_some_row_is_in_flight(files: Files, capsys: Any) -> None:
    files.write(row("a"))
    assert main([*files.argv, "--max-in-flight", "0"]) == 2
    assert "max-in-flight" in capsys.readouterr().err
    assert main([*files.argv, "-o", str(files.source)]) == 2
    files.source.unlink()
    os.mkfifo(files.source)
    assert main(files.argv) == 2
    assert "is not a file: the rows are read more than once" in capsys.readouterr().err
    assert not files.target.exists()


@needs_model
@pytest.mark.soak
def test_a_killed_run_is_resumed_with_the_real_engine(files: Files) -> None:
    files.write(*(row(str(i), model="demo_model", max_tokens=100, ignore_eos=True) for i in range(12)))
    flags = ["--num-blocks", "256", "--max-in-flight", "2", "--no-enable-native-ops"]
    command = [sys.executable, "-m", "app", *files.argv, *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not files.target.exists() or files.target.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    before = files.target.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < 12
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "12/12" in done.stderr and done.stdout == ""
    assert files.target.read_bytes().startswith(kept)
    results = files.results
    assert set(results) == {str(i) for i in range(12)}
    assert {one["response"]["body"]["usage"]["completion_tokens"] for one in results.values()} == {100}
