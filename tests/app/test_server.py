"""Lifecycle of the server: loading page, ready line, draining, signals, and steps that must not hang."""

import asyncio
import gc
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import pytest

import app.server
from app.cli.serve import set_up_logging
from app.config import AppConfig, UsageError
from app.server import bind, serve
from app.startup_app import Loading
from app.timeline import Timeline
from engine import ConfigError, EngineConfig, EngineStats
from tests.app.api.harness import CHAT, Server, events, needs_model
from tests.fakes import FakeEngine
from tests.measure.host_overhead import read_cpu_seconds
from tests.waiting import wait_until

LONG = "x" * 200


class SlowEngine(FakeEngine):
    """Starts when `may_start` is set."""

    def __init__(self) -> None:
        super().__init__(state="new")
        self.may_start = asyncio.Event()
        self.was_cancelled = False

    async def start(self) -> None:
        self.state = "starting"
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        self.state = "ready"


@dataclass
class House(Server):
    """A server in a task, and a client for it."""

    task: asyncio.Task[None]
    is_stopped: bool = False

    def stop(self, number: int) -> None:
        """Send a signal, unless one was sent: the second would end the process, which is ours, at once."""
        if not self.is_stopped and not self.task.done():
            os.kill(os.getpid(), number)
        self.is_stopped = True

    async def health(self, path: str = "/health") -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def wait_ready(self) -> None:
        async with asyncio.timeout(60):
            while (await self.health())[0] != 200:
                await asyncio.sleep(0.01)


@pytest.fixture
def open_house(monkeypatch: pytest.MonkeyPatch) -> Any:
    @asynccontextmanager
    async def open_one(engine: FakeEngine, **settings: Any) -> AsyncIterator[House]:
        monkeypatch.setattr(app.server, "Engine", lambda config: engine)
        ports: list[int] = []

        @contextmanager
        def bind_and_note(config: AppConfig) -> Iterator[socket.socket]:
            with bind(config) as listener:
                ports.append(listener.getsockname()[1])
                yield listener

        monkeypatch.setattr(app.server, "bind", bind_and_note)
        config = AppConfig(port=0, ui=False, **{"data_dir": "none", "chat_model": "none", **settings})
        task = asyncio.create_task(serve(engine.config, config, Timeline(time.perf_counter())))
        async with aiohttp.ClientSession() as client:
            await wait_until(lambda: task.done() or (ports and is_listening(ports[0])))
            url = f"http://127.0.0.1:{ports[0]}"
            house = House(engine, url, client, task)
            if not isinstance(engine, SlowEngine):
                await house.wait_ready()
            yield house
            house.stop(signal.SIGTERM)
            await asyncio.wait_for(task, 60)

    return open_one


def read_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "troupe.server"]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_it_answers_starting_until_the_engine_is_ready(open_house: Any) -> None:
    engine = SlowEngine()
    async with open_house(engine) as house:
        assert await house.health() == (503, {"status": "starting", "state": "starting"})
        assert await house.health("/livez") == (200, {"status": "ok", "state": "starting"})
        async with house.client.post(house.url + "/v1/chat/completions", json=CHAT) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "2")
            assert (await response.json())["error"]["code"] == "engine_not_ready"
        async with house.client.get(house.url + "/") as response:
            assert response.status == 503 and "Loading fake" in await response.text()
        engine.may_start.set()
        await house.wait_ready()


async def test_the_api_answers_while_the_page_is_imported(open_house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    may_mount = threading.Event()
    monkeypatch.setattr(app.server, "mount_page", lambda *_: may_mount.wait(60))
    async with open_house(FakeEngine()) as house:
        assert (await house.chat())[0] == 200
        async with house.client.get(house.url + "/") as response:
            assert response.status == 503 and "Loading fake" in await response.text()
        may_mount.set()
        async with asyncio.timeout(60):
            status = 503
            while status == 503:
                async with house.client.get(house.url + "/") as response:
                    status = response.status
        assert status == 200


async def test_with_keys_the_loading_page_does_not_name_the_model(open_house: Any) -> None:
    engine = SlowEngine()
    async with open_house(engine, api_key=("key",)) as house:
        async with house.client.get(house.url + "/") as response:
            text = await response.text()
            assert (response.status, response.headers["retry-after"]) == (503, "2")
            assert "The server is starting." in text and "fake" not in text
        async with house.client.get(house.url + "/loading") as response:
            assert response.status == 503 and "step" not in await response.text()
        engine.may_start.set()
        await house.wait_ready()


async def test_it_says_where_it_is_and_where_the_time_went_and_logs_its_end(
    open_house: Any, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    caplog.set_level(logging.INFO, "troupe.server")
    async with open_house(FakeEngine()) as house:
        pass
    printed = capsys.readouterr()
    assert printed.out == f"Troupe is ready at {house.url} (model fake, device cpu, float32)\n"
    assert "weights" in printed.err and "start-up" in printed.err
    assert read_log(caplog) == ["closing: no request is running", "closed"]


async def test_a_signal_lets_running_streams_finish_and_new_requests_are_refused(open_house: Any) -> None:
    engine = FakeEngine(reply=lambda prompt: LONG, step_s=0.01)
    async with open_house(engine, shutdown_grace_s=60) as house:
        path = house.url + "/v1/chat/completions"
        async with house.client.post(path, json=CHAT | {"stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            house.stop(signal.SIGINT)
            async with asyncio.timeout(60):
                while await house.health() != (503, {"status": "closing", "state": "closing"}):
                    await asyncio.sleep(0.01)
            status, refusal = await house.chat()
            assert (status, refusal["error"]["code"]) == (503, "engine_not_ready")
            raw = await response.read()
        await house.task
    assert events(raw)[-1]["choices"][0]["finish_reason"] == "stop"
    assert engine.state == "closed"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
async def test_after_the_grace_streams_end_with_an_error_and_a_log_line(
    open_house: Any, caplog: pytest.LogCaptureFixture, sign: signal.Signals
) -> None:
    caplog.set_level(logging.INFO, "troupe.server")
    engine = FakeEngine(reply=lambda prompt: LONG, step_s=0.05)
    async with (
        open_house(engine, shutdown_grace_s=0.1) as house,
        house.client.post(house.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response,
    ):
        await response.content.readuntil(b"\n\n")
        house.stop(sign)
        raw = await response.read()
    assert events(raw)[-1]["error"]["code"] == "server_closing"
    assert read_log(caplog) == ["closing: 1 request gets up to 0.1 s", "closed: 1 request was cut off"]


async def test_a_signal_during_the_start_cancels_it(open_house: Any) -> None:
    engine = SlowEngine()
    async with open_house(engine) as house:
        await house.health()
        house.stop(signal.SIGINT)
        await asyncio.wait_for(house.task, 60)
    assert engine.was_cancelled


async def test_a_taken_port_is_a_usage_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = AppConfig(port=taken.getsockname()[1], ui=False, data_dir="none")
        with pytest.raises(UsageError, match=r"cannot listen on .* in use"):
            await serve(EngineConfig(), config, Timeline(0.0))


async def test_it_listens_on_a_path_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bind(AppConfig(uds=str(path))):
        assert path.is_socket()
        with pytest.raises(UsageError, match="cannot listen on --uds"), bind(AppConfig(uds=str(path))):
            pass
    assert not path.exists()
    with pytest.raises(UsageError, match="go together"):
        AppConfig(ssl_certfile="a.pem")


async def test_nothing_waits_for_an_acknowledgement(open_house: Any) -> None:
    async with open_house(FakeEngine()) as house:
        port = int(house.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        times = []
        for _ in range(21):
            start = time.perf_counter()
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'"ready"}')
            times.append(time.perf_counter() - start)
        writer.close()
    # with Nagle's algorithm each but the first takes 40 ms; the machine may be busy in some of them
    assert min(times[1:]) < 0.02


async def test_a_config_error_of_the_engine_reaches_the_caller_as_itself(monkeypatch: Any) -> None:
    class Broken(FakeEngine):
        async def start(self) -> None:
            raise ConfigError("no such model")

    monkeypatch.setattr(app.server, "Engine", lambda config: Broken())
    with pytest.raises(ConfigError, match="no such model"):
        await serve(EngineConfig(), AppConfig(port=0, ui=False, data_dir="none"), Timeline(0.0))


def test_every_line_of_the_log_begins_with_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    caplog.set_level(logging.INFO, "troupe")  # and back to what it was
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        set_up_logging("info")
        logging.getLogger("troupe.requests").info("POST /v1/x")
        logging.getLogger("asyncio").warning("odd")
    first, second = capsys.readouterr().err.splitlines()
    time_pattern = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
    assert re.fullmatch(f"{time_pattern} INFO troupe.requests: POST /v1/x", first)
    assert re.fullmatch(f"{time_pattern} WARNING asyncio: odd", second)


def make_loading(cache: Path, *done: str, state: str = "starting") -> Loading:
    """The text of the loading page 2.5 s after the start, when these steps are done."""
    config = EngineConfig(model="some/model", served_model_name="<b>model")
    engine = FakeEngine(state=state, config=config, timeline=[(name, 1.0) for name in done])
    clock = iter((10.0, 12.5))
    return Loading(engine, cache, clock=lambda: next(clock))  # type: ignore[arg-type]


def test_the_steps_of_the_start_come_one_after_the_other(tmp_path: Path) -> None:
    steps = [make_loading(tmp_path, *done).describe()["step"] for done in ((), ("tokenizer",))]
    assert steps == ["tokenizer", "weights"]
    assert make_loading(tmp_path, "tokenizer", state="ready").describe()["step"] == "page"


def test_a_download_is_counted_with_its_unfinished_files(tmp_path: Path) -> None:
    folder = tmp_path / "models--some--model"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "a").write_bytes(b"x" * 100)
    (folder / "blobs" / "b.incomplete").write_bytes(b"x" * 50)
    expected = {"step": "weights", "seconds": 2.5, "downloaded_bytes": 150, "total_bytes": None}
    assert make_loading(tmp_path, "tokenizer").describe() == expected
    (folder / "snapshots" / "1").mkdir(parents=True)
    for name, text, total in (
        # file of a second copy of the weights, which is not downloaded
        ("consolidated", '{"metadata": {"total_size": 999}}', None),
        ("model", '{"metadata": {"total_size": 400}}', 400),
        ("model", '{"metadata"', None),
    ):
        (folder / "snapshots" / "1" / f"{name}.safetensors.index.json").write_text(text)
        assert make_loading(tmp_path, "tokenizer").describe()["total_bytes"] == total


def test_a_local_folder_has_no_download(tmp_path: Path) -> None:
    engine: Any = FakeEngine(config=EngineConfig(model=str(tmp_path)))
    assert set(Loading(engine, tmp_path).describe()) == {"step", "seconds"}


def test_the_loading_page_names_the_model_and_lets_no_markup_in(tmp_path: Path) -> None:
    drawn = make_loading(tmp_path).draw()
    assert "Loading &lt;b&gt;model" in drawn and '"step": "tokenizer"' in drawn
    assert "{{model}}" not in drawn and "{{progress}}" not in drawn


@pytest.fixture
def own_garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(app.server, "LOOK_S", 0.001)
    before = gc.get_threshold()
    gc.freeze()  # ignore the objects of other tests
    gc.enable()  # a server whose start failed in this process has left it off
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


async def watch(num_running: int, is_over: Callable[[], bool] | None = None) -> None:
    """Let the collector look until something has happened, or for a while if nothing should."""
    engine: Any = SimpleNamespace(stats=lambda: EngineStats(num_running=num_running))
    task = asyncio.create_task(app.server.collect_when_idle(engine))
    await (asyncio.sleep(0.1) if is_over is None else wait_until(is_over))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def make_old_garbage(num_collections: int) -> Any:
    """A reference to a cycle that has reached the oldest generation, after so many collections of the one before."""
    gc.collect()

    def cycle() -> None:
        """Refers to itself, so that only a collection frees it."""

    cycle.itself = cycle  # type: ignore[attr-defined]
    reference = weakref.ref(cycle)
    gc.collect(1)
    del cycle
    for _ in range(num_collections):
        gc.collect(1)
    return reference


@pytest.mark.parametrize(
    ("num_running", "num_collections", "is_collected"),
    [(0, app.server.DUE + 1, True), (1, app.server.DUE + 1, False), (0, 2, False)],
    ids=["idle", "busy", "nothing to do"],
)
@pytest.mark.usefixtures("own_garbage")
async def test_old_garbage_goes_when_the_engine_is_idle(
    num_running: int, num_collections: int, is_collected: bool
) -> None:
    reference = make_old_garbage(num_collections)
    assert reference() is not None
    await watch(num_running, (lambda: reference() is None) if is_collected else None)
    assert (reference() is None) == is_collected


@pytest.mark.usefixtures("own_garbage")
async def test_under_endless_load_python_collects_by_itself_later() -> None:
    await watch(1)
    assert gc.isenabled()
    assert gc.get_threshold()[2] == app.server.OVERDUE


def wait_for_rest(pid: int) -> None:
    """Return once a process whose start has left nothing to be done uses hardly any of a core."""
    deadline, used_s = time.monotonic() + 60, math.inf
    while used_s > 0.03 and Path("/proc/self/task").exists():
        assert time.monotonic() < deadline
        before = read_cpu_seconds(pid)
        time.sleep(1)
        used_s = read_cpu_seconds(pid) - before


def steal(place: str, path: Path) -> list[str]:
    """The replies of all file handlers of the page to a local file that was not uploaded."""
    with urlopen(f"{place}/config", timeout=20) as response:
        config = json.load(response)
    kinds = {component["id"]: component["type"] for component in config["components"]}
    foreign = {"path": str(path), "meta": {"_type": "gradio.FileData"}}
    message = {"text": "What does it say?", "files": [foreign]}
    values: dict[str, Any] = {"file": [foreign], "uploadbutton": None, "multimodaltextbox": message}
    answers = []
    for handler in config["dependencies"]:
        inputs = [kinds[number] for number in handler["inputs"]]
        if not values.keys() & set(inputs):
            continue
        for upload in (foreign, [foreign]):
            data = [(values | {"uploadbutton": upload}).get(kind) for kind in inputs]
            body = json.dumps({"data": data, "fn_index": handler["id"], "session_hash": "s"}).encode()
            request = Request(f"{place}/gradio_api/run/predict", body, {"Content-Type": "application/json"})
            try:
                with urlopen(request, timeout=20) as response:
                    answers.append(response.read().decode())
            except HTTPError as error:
                answers.append(error.read().decode())
    return answers


@needs_model
def test_the_whole_program_serves_page_and_api_and_leaves_quietly(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the words of nobody but me")
    command = [sys.executable, "-m", "app", "--port", "0", "--num-blocks", "256", "--no-enable-native-ops"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # the line comes when the page answers; readline returns at once if the process ends
            ready = re.match(r"Troupe is ready at (http://127.0.0.1:\d+) ", process.stdout.readline())
            assert ready is not None
            url = ready[1]
            with urlopen(f"{url}/", timeout=20) as page:
                assert b"gradio_config" in page.read()
            with urlopen(f"{url}/v1/models", timeout=20) as models:
                assert json.load(models)["data"][0]["id"] == "demo_model"
            wait_for_rest(process.pid)
            with pytest.raises(HTTPError) as caught:
                urlopen(Request(f"{url}/chat/completions", b"{}"), timeout=20)
            error = json.load(caught.value)["error"]
            assert caught.value.code == 404 and "use /v1/chat/completions" in error["message"]
            answers = steal(url, secret)
            assert len(answers) >= 6
            assert not any("nobody but me" in answer for answer in answers)
            # an open page holds a stream that never ends
            with urlopen(f"{url}/gradio_api/heartbeat/test", timeout=20):
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    # Gradio logs each of its refusals, and nothing else may be there
    assert all("not uploaded by a user" in error for error in errors.split("Traceback")[1:])
