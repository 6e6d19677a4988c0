"""The soak's server process: start, requests, and what the operating system and the server say about it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.soak.model import ROOT
from tests.soak.work import Request

READY = "Troupe is ready at "
ADMIN_KEY = "soak"
# Replies after which a client tries again: asleep, full, or an adapter that is being replaced.
AGAIN = {503, 404}
MAX_TRIES, PAUSE_S = 600, 0.2
REQUEST_S = 120.0
# The probe's processes answer within this time.
PROBE_S = 30.0
BUSY = ("num_requests_running", "num_requests_waiting", "num_requests_waiting_for_grammar")


@dataclass(frozen=True)
class Outcome:
    """How a request ended: what has to be the same on another server."""

    status: int
    finish: str
    text: str

    @property
    def is_odd(self) -> bool:
        """Return whether it ended as no request should: by an error of the server, or without a way on."""
        return self.status in (0, 500) or self.finish in ("error", "dead_end") or "dead_end" in self.text

    def __str__(self) -> str:
        return f"{self.status} {self.finish} {self.text[:120]!r}"


@dataclass
class State:
    """Figures of an idle server: memory, threads and descriptors of its processes, blocks, and objects."""

    rss_mib: float
    num_threads: int
    num_descriptors: int
    num_processes: int
    num_free_blocks: int
    num_blocks: int
    num_restarts: int
    objects: Counter[str] = field(default_factory=Counter)
    threads: list[str] = field(default_factory=list)


class Server:
    """One server with all adapters loaded. Use it as a context manager."""

    def __init__(self, base: Path, adapters: list[Path], folder: Path, flags: list[str]) -> None:
        self.adapters, self.folder = adapters, folder
        folder.mkdir(parents=True)
        self.command = [sys.executable, "-m", "app", "--no-ui", "--host", "127.0.0.1", "--port", "0"]
        self.command += ["--model", str(base), "--admin-key", ADMIN_KEY, "--lora-root", str(base.parent), *flags]

    async def __aenter__(self) -> Server:
        paths = [str(Path(__file__).parent / "probe"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"SOAK_PROBE": str(self.folder), "PYTHONPATH": ":".join(filter(None, paths))}
        self.log = (self.folder / "log.txt").open("w")
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        line = await asyncio.to_thread(lambda: next((line for line in lines if line.startswith(READY)), None))
        if line is None:
            raise RuntimeError(f"the server ended with {self.process.wait()}; see {self.log.name}")
        self.url = line.removeprefix(READY).split()[0]
        for number, path in enumerate(self.adapters):
            await self.admin("/v1/load_lora_adapter", {"lora_name": f"a{number}", "lora_path": str(path)})
        # Until the native ops are built, steps use torch's.
        deadline = time.monotonic() + 300
        while "preparing" in str((await self.admin("/server_info"))["runtime"]) and time.monotonic() < deadline:
            await asyncio.sleep(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            await asyncio.to_thread(self.process.wait, 60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()

    async def admin(self, path: str, body: Any = None, method: str = "POST") -> Any:
        method = "GET" if path == "/server_info" else method
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with aiohttp.request(method, self.url + path, json=body, headers=headers) as reply:
            text = await reply.text()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {text[:300]}")
        return json.loads(text)

    async def send(self, session: aiohttp.ClientSession, request: Request, leaves: bool = True) -> Outcome | None:
        """Return how a request ended; None if its client left."""
        for _ in range(MAX_TRIES):
            data: dict[str, Any] = {"json": request.body}
            if request.file is not None:
                form = aiohttp.FormData()
                for name, value in request.body.items():
                    form.add_field(name, value)
                form.add_field("file", request.file[1], filename=request.file[0])
                data = {"data": form}
            timeout = aiohttp.ClientTimeout(REQUEST_S)
            try:
                async with session.post(self.url + request.path, timeout=timeout, **data) as reply:
                    if reply.status in AGAIN:
                        await reply.read()
                        await asyncio.sleep(PAUSE_S)
                        continue
                    if reply.content_type == "text/event-stream":
                        return await _read_stream(reply, request.leaves_after if leaves else None)
                    return _read_whole(reply.status, await reply.text())
            except TimeoutError:
                return Outcome(0, f"no end within {REQUEST_S:.0f} s", "")
            except aiohttp.ClientError as error:
                return Outcome(0, f"connection: {type(error).__name__}", "")
        return Outcome(0, f"refused {MAX_TRIES} times with {reply.status}", "")

    async def metrics(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            text = await reply.text()
        found = re.findall(r"^troupe:(\w+)(?:\{[^}]*\})? ([\d.e+-]+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def rest(self) -> State | str:
        """Wait until the server is idle, and return its figures; or what it still does after a minute."""
        deadline = time.monotonic() + 60
        while True:
            metrics = await self.metrics()
            busy = {name: metrics[name] for name in BUSY if metrics[name]}
            if not busy:
                break
            if time.monotonic() > deadline:
                return f"the idle server still has {busy}"
            await asyncio.sleep(0.2)
        # What the C library keeps of freed memory is given back by a sleep, and the KV cache is new after it.
        await self.admin("/sleep?level=1")
        await self.admin("/wake_up")
        await asyncio.sleep(2)
        processes = [psutil.Process(self.process.pid)]
        processes += processes[0].children(recursive=True)
        objects, threads = await self._probe(processes)
        await asyncio.sleep(1)
        metrics = await self.metrics()
        return State(
            sum(each.memory_info().rss for each in processes) / 2**20,
            sum(each.num_threads() for each in processes) - sum(map(is_of_loop, threads)),
            sum(each.num_fds() for each in processes),
            len(processes),
            int(metrics["kv_cache_free_blocks"]),
            int(metrics["kv_cache_blocks"]),
            int(metrics["engine_restarts_total"]),
            objects,
            threads,
        )

    async def _probe(self, processes: list[psutil.Process]) -> tuple[Counter[str], list[str]]:
        objects: Counter[str] = Counter()
        threads: list[str] = []
        for process in processes:
            if not _has_probe(process.pid):
                continue
            path = self.folder / f"{process.pid}.json"
            path.unlink(missing_ok=True)
            process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + PROBE_S
            while not path.exists() and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            if path.exists():
                found = json.loads(path.read_text())
                objects.update(found["objects"])
                threads += found["threads"]
        return objects, threads


def is_of_loop(thread: str) -> bool:
    """Return whether a thread belongs to a pool of the event loop, which grows to its fixed size as it is needed."""
    return thread.startswith(("asyncio_", "AnyIO"))


def _has_probe(pid: int) -> bool:
    """Return whether a process handles the probe's signal, which ends others, such as the resource tracker."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR2 - 1) & 1)


async def _read_stream(reply: aiohttp.ClientResponse, leaves_after: int | None) -> Outcome | None:
    texts: list[str] = []
    finish, num_events = "", 0
    async for line in reply.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        num_events += 1
        if num_events == leaves_after:
            reply.close()
            return None
        event = json.loads(line[6:])
        if "error" in event:
            return _read_error(event["error"])
        for choice in event.get("choices", ()):
            texts.append(_read_text(choice.get("delta") or choice))
            finish = choice.get("finish_reason") or finish
    return Outcome(reply.status, finish, "".join(texts))


def _read_error(error: dict[str, Any]) -> Outcome:
    """Return a refusal: the same whether it came before the stream began, or as an event of it."""
    kind = str(error.get("type"))
    return Outcome(500 if "server" in kind else 400, "refused", json.dumps(error, ensure_ascii=False))


def _read_whole(status: int, text: str) -> Outcome:
    if status != 200:
        return _read_error(json.loads(text)["error"]) if status != 500 else Outcome(status, "error", text)
    try:
        replies = [json.loads(text)]
    except ValueError:
        replies = [json.loads(line) for line in text.splitlines()]
    if "choices" in replies[0]:
        (choice,) = replies[0]["choices"]
        return Outcome(status, choice["finish_reason"], _read_text(choice.get("message") or choice))
    kept = [{name: reply.get(name) for name in ("record", "valid", "error", "finish_reason")} for reply in replies]
    finish = ",".join(sorted({str(each["finish_reason"]) for each in kept}))
    return Outcome(status, finish, json.dumps(kept, ensure_ascii=False))


def _read_text(part: dict[str, Any]) -> str:
    calls = "".join(
        (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        for call in part.get("tool_calls") or ()
    )
    return (part.get("content") or part.get("text") or "") + (part.get("reasoning_content") or "") + calls
