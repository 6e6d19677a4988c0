"""Faults of the environment: a thread that dies, invalid numbers, a full disk, a signal under load.

Only the affected request or file fails, with a reason.
"""

import asyncio
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.core.grammar_manager import GrammarManager
from engine.worker.worker import Worker
from tests.app.api.harness import Server, events, needs_model, run_server
from tests.waiting import wait_until

pytestmark = needs_model

ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = ASKED | {"max_tokens": 1500, "stream": True}


@asynccontextmanager
async def serve() -> AsyncIterator[Server]:
    config = EngineConfig(num_blocks=512, enable_native_ops=False)
    async with Engine(config) as engine, run_server(engine, AppConfig()) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "owner", "method"),
    [
        pytest.param("troupe-executor", Worker, "execute", marks=pytest.mark.soak),
        ("troupe-grammar", GrammarManager, "open"),
    ],
)
async def test_a_thread_that_dies_changes_no_text(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: type, method: str
) -> None:
    original = getattr(owner, method)

    def leave(*arguments: Any) -> Any:
        if method == "execute" and not arguments[1].is_gated.any():
            return original(*arguments)  # a step before the request with the grammar was accepted
        monkeypatch.setattr(owner, method, original)
        raise SystemExit

    asked = ASKED | {"structured_outputs": {"regex": "[ab]{20}"}, "max_tokens": 30}
    async with serve() as server:
        _, before = await server.post("/v1/completions", ASKED | {"max_tokens": 200})
        _, word = await server.post("/v1/completions", asked)
        running = asyncio.create_task(server.post("/v1/completions", ASKED | {"max_tokens": 200}))
        await wait_until(lambda: server.engine.stats().num_running == 1)
        monkeypatch.setattr(owner, method, leave)
        _, again = await server.post("/v1/completions", asked)
        assert again["choices"] == word["choices"]
        assert (await running)[1]["choices"] == before["choices"]
        assert server.engine.error == f"RuntimeError: the thread {name} was ended by SystemExit"
        stats = server.engine.stats()
        assert stats.num_restarts == 1 and stats.num_free_blocks == stats.num_blocks


async def test_logits_that_are_no_numbers_are_an_error_of_their_request_alone(monkeypatch: Any) -> None:
    async with serve() as server:
        _, before = await server.post("/v1/completions", ASKED)
        worker = server.engine.replicas[0].connector.host.worker  # type: ignore[attr-defined]
        assert isinstance(worker, Worker)
        compute = worker.model.compute_logits

        def poison(hidden: torch.Tensor, adapters: object) -> torch.Tensor:
            logits = compute(hidden, adapters)
            if len(logits) > 1:
                logits[1:] = math.nan  # rows of the requests that joined the first
            return logits

        first = asyncio.create_task(server.post("/v1/completions", ASKED | {"max_tokens": 200}))
        await wait_until(lambda: server.engine.stats().num_running == 1)
        monkeypatch.setattr(worker.model, "compute_logits", poison)
        status, reply = await server.post("/v1/completions", ASKED)
        assert (status, reply["error"]["code"]) == (500, "generation_failed")
        assert "not numbers" in reply["error"]["message"]
        raw = await server.stream("/v1/completions", ASKED)
        assert json.loads(raw)["error"]["code"] == "generation_failed"
        status, whole = await first
        assert status == 200 and whole["choices"][0]["text"].startswith(before["choices"][0]["text"])
        assert server.engine.stats().num_restarts == 0


async def test_constraints_that_contradict_each_other_are_the_fault_of_their_request() -> None:
    asked = ASKED | {"structured_outputs": {"regex": "a+"}, "bad_words": ["a"]}
    async with serve() as server:
        status, reply = await server.post("/v1/completions", asked)
        error = reply["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "dead_end")
        assert "no token satisfies grammar and bad_words" in error["message"]
        assert json.loads(await server.stream("/v1/completions", asked))["error"]["code"] == "dead_end"
        later = {"structured_outputs": {"regex": "ba"}, "bad_words": ["a"]}
        *_, last = events(await server.stream("/v1/completions", ASKED | later))
        assert last["error"]["type"] == "invalid_request_error"
        assert server.engine.stats().finished["dead_end"] == 3


def start_program(*arguments: str, stderr: int = subprocess.PIPE, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app", *arguments, "--num-blocks", "512", "--no-enable-native-ops"]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=stderr, **options)


@pytest.mark.soak
def test_a_batch_reports_a_full_disk_and_keeps_the_written_rows(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    row = {"method": "POST", "url": "/v1/completions", "body": ASKED}
    source.write_text("".join(json.dumps(row | {"custom_id": str(i)}) + "\n" for i in range(30)))

    def allow_little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    # Python would cut the bytecode of our modules, too, and keep it.
    options = {"preexec_fn": allow_little, "env": os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}}
    process = start_program("run-batch", "-i", str(source), "-o", str(target), **options)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2 and "Traceback" not in errors
    assert errors.splitlines()[-1] == f"troupe: cannot use {target}: File too large"
    whole = target.read_text().split("\n")[:-1]
    assert whole and all(json.loads(line)["response"]["status_code"] == 200 for line in whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_signal_under_load_ends_every_stream_although_the_log_cannot_be_written() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = start_program("serve", "--no-ui", "--port", "0", "--shutdown-grace-s", "1", stderr=full)
    assert process.stdout is not None
    try:
        line = await asyncio.to_thread(process.stdout.readline)
        url = line.split()[4]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def ask(number: int) -> Any:
                body = LONG if number % 2 else LONG | {"max_tokens": 40}
                async with client.post(url + "/v1/completions", json=body) as response:
                    await response.content.readuntil(b"\n\n")
                    begun.release()
                    raw = await response.read()
                return events(b"data: {}\n\n" + raw)[-1]

            begun = asyncio.Semaphore(0)
            asked = [asyncio.create_task(ask(number)) for number in range(8)]
            for _ in asked:
                await begun.acquire()
            process.send_signal(signal.SIGTERM)
            ends = await asyncio.gather(*asked)
        await asyncio.to_thread(process.wait, timeout=60)
    finally:
        process.kill()
        process.stdout.close()
        os.close(full)
    assert len(ends) == 8
    finished = [end for end in ends if "error" not in end]
    assert all(end["choices"][0]["finish_reason"] == "length" for end in finished)
    assert {end["error"]["code"] for end in ends if "error" in end} <= {"server_closing"}
    assert process.returncode == 0
