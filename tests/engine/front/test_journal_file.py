"""The journal on disk: bounded, private, complete after a full disk and after a crash; and its replay."""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.cli.replay import compare, compute_again
from app.config import Failure
from engine import ConfigError, Engine, EngineConfig, SamplingParams, read_journal
from engine.front import journal_file
from engine.front.journal_file import JournalFile
from engine.messages import AddRequest, NewCompletion
from tests.engine.mixed_requests import make_mixed_requests, run_mixed
from tests.waiting import wait_until

MakeConfig = Callable[..., EngineConfig]


def make_request(number: int, num_tokens: int = 3) -> AddRequest:
    return AddRequest(f"r{number}", [5] * num_tokens, SamplingParams(), [NewCompletion(number, 0)])


async def test_answers_are_computed_again_bit_for_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    requests = make_mixed_requests()[:26]  # one of each kind
    path = str(tmp_path / "journal")
    async with Engine(make_config(max_model_len=400, journal=path)) as engine:
        answers = await run_mixed(engine, requests)
    recorded = {request.message.request_id: request for request in read_journal(path)}
    assert len(recorded) == 26 and all(each.ends for each in recorded.values())
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    for number in (0, 4, 5, 9, 15, 23):
        output = await compute_again(recorded[str(number)], recorded[str(number)].config.model)
        assert [each.text for each in output.outputs] == [each.text for each in answers[number]]
        compare(recorded[str(number)], output)
    with pytest.raises(Failure, match="completion 0 differs"):
        compare(recorded["4"], output)


async def test_replay_finds_requests_by_the_beginning_of_their_id(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def replay(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["replay", path, *arguments])

    path, params = str(tmp_path / "journal"), SamplingParams(max_tokens=200, ignore_eos=True)
    async with Engine(make_config(journal=path)) as engine:
        whole = [output async for output in engine.generate("hello", params, "whole")][-1]
        stream = engine.generate("hello", params, "left")
        await anext(stream)
        await stream.aclose()
        await wait_until(lambda: engine.stats().num_running == 0)
    assert [each.ends.popitem()[1].finish_reason for each in read_journal(path)] == ["length", "abort"]
    for name in ("who", "left"):  # the second one's seed is another one
        assert await replay("--request", name) == 0
        assert (capsys.readouterr().out == whole.outputs[0].text) is (name == "who")
    assert await replay() == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["whole", "left"]
    assert await replay("--request", "nobody") == 2
    assert "the journal has no such request among its 2" in capsys.readouterr().err


def test_a_full_journal_starts_anew_and_keeps_unfinished_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "MAX_BYTES", 2**20)
    path = tmp_path / "journal"
    file = JournalFile(EngineConfig(journal=str(path)))
    file.begin("print")
    file.add(make_request(0))
    for number in range(1, 400):
        file.add(make_request(number, 5000))
        file.end(number, [1, 2], "stop")
    file.end(0, [7], "length")
    file.close()
    assert path.stat().st_size + Path(f"{path}.1").stat().st_size <= 2**20
    found = {each.message.request_id: each for each in read_journal(str(path))}
    assert found["r0"].ends[0].token_ids == [7] and found["r0"].fingerprint == "print"
    assert "r1" not in found and found["r399"].ends[399].finish_reason == "stop"


async def test_a_full_disk_is_logged_and_nothing_is_lost(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill_disk(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, params = str(tmp_path / "journal"), SamplingParams(max_tokens=5)
    monkeypatch.setattr(journal_file, "RETRY_S", 0.0)
    async with Engine(make_config(journal=path)) as engine:
        await wait_until(lambda: os.path.getsize(path) > 0)
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(os, "pwrite", fill_disk)
            for number in range(3):
                assert [output async for output in engine.generate("hello", params, f"r{number}")]
            await wait_until(lambda: bool(caplog.records))
        assert caplog.messages == [f"cannot write the journal {path}: No space left on device; requests go on"]
        assert [output async for output in engine.generate("hello", params, "r3")]
    found = [(each.message.request_id, len(each.ends)) for each in read_journal(path)]
    assert found == [(f"r{number}", 1) for number in range(4)]


def test_a_torn_record_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for number in range(2):
        file = JournalFile(EngineConfig(journal=str(path)))
        file.begin("print")
        file.add(make_request(number))
        file.close()
        with path.open("ab") as torn:
            torn.write(b"\xff\x00\x00\x00 torn")
    assert [each.message.request_id for each in read_journal(str(path))] == ["r0", "r1"]
    path.write_bytes(path.read_bytes().replace(b"print", b"paint"))
    with pytest.raises(ConfigError, match="is damaged in line 1"):
        read_journal(str(path))


def test_a_journal_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"journal='.*' cannot be opened: Is a directory"):
        JournalFile(EngineConfig(journal=str(tmp_path)))
