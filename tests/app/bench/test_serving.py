"""Benchmarks of servers: waiting for one, the client that drives it, and its figures."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from app.bench import own_server
from app.bench.client import Load, Record, Target, drive
from app.bench.own_server import run_server, wait_until_ready
from app.bench.serve import find_model, summarise
from app.bench.workload import Job
from app.cli.main import main
from app.config import UsageError
from engine import EngineDead, EngineOverloaded
from tests.app.api.harness import Start
from tests.fakes import FakeEngine
from tests.waiting import wait_until

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


async def test_arrivals_keep_to_the_rate_and_nothing_is_waited_for_behind_the_last(start: Start) -> None:
    target = Target((await start()).url, "fake")
    _, elapsed = await drive(target, JOBS, Load(rate=50, burstiness=1000))
    assert elapsed > 5 / 50 * 0.9
    _, elapsed = await drive(target, JOBS[:1], Load(rate=0.2, burstiness=1000))
    assert elapsed < 4


async def test_the_figures_are_written_where_they_are_asked_for(start: Start, tmp_path: Path) -> None:
    server, target = await start(), tmp_path / "figures.json"
    flags = ["--base-url", server.url, "--num-prompts", "2", "--output-len", "2"]
    argv = ["bench", "serve", *flags, "--result-filename", str(target)]
    assert await asyncio.to_thread(main, argv) == 0
    assert json.loads(target.read_text())["num_failed"] == 0


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (FakeEngine(reject=EngineOverloaded("full", retry_after_s=1)), "503"),
        (FakeEngine(fail_after=(3, EngineDead("gone"))), "engine stopped"),
    ],
)
async def test_a_failure_is_counted_and_reported(start: Start, engine: FakeEngine, said: str) -> None:
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--base-url", "127.0.0.1:7860"], "'127.0.0.1:7860' needs http:// or https://"),
        (["--base-url", "http://[nonsense"], "is not the address of a server"),
        (["--base-url", "http://127.0.0.1:1", "--api-key", "a\nb"], "--api-key must be printable ASCII"),
        (["--vocab-size", "0"], "--vocab-size=0 must be from 1"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--goodput", "latency:5"], "ttft, tpot, itl, e2el"),
    ],
)
def test_flags_that_cannot_work_are_usage_errors(flags: list[str], words: str, capsys: Any) -> None:
    assert main(["bench", "serve", "--num-prompts", "2", *flags]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


class Health:
    """A server whose /health answers what it is given."""

    def __init__(self) -> None:
        self.status, self.text, self.num_asked = 200, "", 0
        application = web.Application()
        application.router.add_get("/health", self.answer)
        self.server = TestServer(application)

    async def answer(self, _: web.Request) -> web.Response:
        self.num_asked += 1
        return web.Response(status=self.status, text=self.text)

    async def wait(self) -> None:
        await wait_until_ready(self.url)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")


@pytest.fixture
async def health(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Health]:
    monkeypatch.setattr(own_server, "ANSWER_TIMEOUT_S", 0.3)
    health = Health()
    async with health.server:
        yield health


def test_an_address_without_server_is_reported_at_once_and_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(own_server, "ANSWER_TIMEOUT_S", 0.3)
    url = "http://127.0.0.1:1"
    assert main(["bench", "serve", "--base-url", url, "--num-prompts", "2"]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"waiting for {url} ..."
    assert last.startswith(f"troupe: {url} did not become ready within ")
    assert "the last attempt: Cannot connect to host 127.0.0.1:1" in last


async def test_a_loading_server_is_recognised_and_waited_for_longer(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(own_server, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(own_server, "ANSWER_TIMEOUT_S", 60.0)

    async def wait_until_asked() -> None:
        num_asked = health.num_asked
        await wait_until(lambda: health.num_asked > num_asked + 1)

    health.status, health.text = 503, '{"state": "loading"}'
    waiting = asyncio.create_task(health.wait())
    await wait_until_asked()
    now += 100.0
    await wait_until_asked()
    health.status = 200
    await waiting
    health.status = 503
    waiting = asyncio.create_task(health.wait())
    await wait_until_asked()
    now += 1000.0
    with pytest.raises(UsageError, match=r"within 1000 s; the last attempt: /health answers 503 {"):
        await waiting


async def test_another_kind_of_server_is_given_up_soon(health: Health, capsys: Any) -> None:
    health.status, health.text = 404, "Not\nFound"
    with pytest.raises(UsageError, match=r"the last attempt: /health answers 404 Not Found$"):
        await health.wait()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UsageError, match="did not become ready within"):
            await wait_until_ready(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("seconds", "said"), [(60.0, "ended with exit code 2: troupe: max_num_seqs=0"), (0.0, "not ready within 0 s")]
)
async def test_a_server_of_ours_that_does_not_start_reports_the_reason(
    monkeypatch: pytest.MonkeyPatch, seconds: float, said: str
) -> None:
    monkeypatch.setattr(own_server, "START_TIMEOUT_S", seconds)
    with pytest.raises(UsageError, match=said):
        async with run_server(["--max-num-seqs", "0"]):
            pass
