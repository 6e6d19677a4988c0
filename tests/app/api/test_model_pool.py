"""Several models behind one port: loaded on demand, ended for others, asleep when idle, alone in their failures."""

import asyncio
import io
import json
import random
import re
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from huggingface_hub import constants
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from app.api import model_pool, model_switch
from app.api.job_kinds import make_answer
from app.api.model_pool import choose_roles
from app.config import AppConfig, UsageError
from app.extraction.sources import Source, dump_source
from app.store import Store
from app.ui.chat.conversation import read_answers, to_model_messages
from app.ui.chat.settings import Settings
from app.ui.chat.tab import MODELS, ChatTab
from app.ui.chat.writing import conclude
from app.ui.models import ModelPanel
from engine import Catalogue, ConfigError, Engine, EngineConfig, EngineDead, EngineSleeping
from engine.packaged_models import Progress
from tests.app.api.harness import Server, events, needs_model, run_server
from tests.engine.cluster.fault_run import send_signal
from tests.fakes import FakeEngine
from tests.waiting import wait_until

ADMIN = {"authorization": "Bearer boss"}


class NamedEngine(FakeEngine):
    """Answers with the name of its model; loads when `gate` is set, and fails as its name says."""

    gate: asyncio.Event

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(reply=lambda prompt: config.model_name, config=config, state="new")
        self.sleeps = 0

    async def start(self) -> None:
        await self.gate.wait()
        if self.model_name == "bad":
            raise EngineDead("the weights of /secret/path are torn")
        self.state = "ready"

    async def sleep(self, level: int = 1) -> bool:
        self.state, self.sleeps = "sleeping", self.sleeps + 1
        return True

    async def wake_up(self) -> None:
        self.state = "ready"


@pytest.fixture
def models_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that look like models a, b, c and bad; torn.gguf is none."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    for name in ("a", "b", "c", "bad"):
        (folder / name).mkdir(parents=True)
        config = {"architectures": ["FakeForCausalLM"], "max_position_embeddings": 77, "vision_config": {}}
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({"x": torch.zeros(4)}, folder / name / "model.safetensors")
    (folder / "torn.gguf").write_bytes(b"GGUF")
    return folder


@pytest.fixture
async def several(models_dir: Path) -> AsyncIterator[Server]:
    config = AppConfig(
        models_dir=str(models_dir), model_alias=("best=b", "main=fake"), max_loaded_models=3, admin_key="boss",
        model_idle_s=1000.0,
    )
    async with run_server(FakeEngine(), config) as server:
        NamedEngine.gate = asyncio.Event()
        NamedEngine.gate.set()
        server.pool.make_engine = NamedEngine
        yield server


def loaded(server: Server) -> list[str]:
    return [slot.context.engine.model_name for slot in server.pool.slots.values()]


async def ask(server: Server, model: str) -> str:
    status, body = await server.complete(model=model)
    assert (status, body["model"]) == (200, model)
    return str(body["choices"][0]["text"])


async def test_a_request_is_answered_by_the_model_that_it_names(several: Server) -> None:
    assert [await ask(several, name) for name in ("a", "best", "b", "fake")] == ["a", "b", "b", "You said hello"]
    assert loaded(several) == ["a", "b"]
    assert (await several.complete(model=None))[1]["model"] == "fake"
    for path, body in (
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}),
        ("/api/generate", {"prompt": "x", "stream": False}), ("/v1/responses", {"input": "x"}),
    ):
        status, reply = await several.post(path, {"model": "a", **body})
        assert status == 200 and reply["model"] == "a"
    form = aiohttp.FormData({"model": "a", "schema": "event", "text": "x"}, default_to_multipart=True)
    assert (await several.post_form("/v1/extract", form))[1]["model"] == "a"
    assert await ask(several, "main") == "You said hello"


async def test_a_body_is_refused_as_it_is_with_one_model(several: Server) -> None:
    for body, status in (("{", 400), ('{"model": 5}', 400), ("[" * 200_000, 400), ("[" + "1," * 2_000_000 + "1]", 413)):
        found, reply = await several.post_text("/v1/completions", io.BytesIO(body.encode()))
        assert (found, list(reply)) == (status, ["error"])


async def test_the_model_that_was_used_longest_ago_makes_room_when_its_requests_have_ended(several: Server) -> None:
    for name in ("a", "b", "a"):
        await ask(several, name)
    await ask(several, "c")
    assert loaded(several) == ["a", "c"]
    engines = [slot.context.engine for slot in several.pool.slots.values()]
    for engine in engines:
        engine.hold = asyncio.Event()
    running = [asyncio.create_task(ask(several, name)) for name in ("c", "a")]
    await wait_until(lambda: all(engine.stats().num_running for engine in engines))
    waiting = [asyncio.create_task(ask(several, name)) for name in ("b", "c", "a")]
    await wait_until(lambda: any(slot.is_leaving for slot in several.pool.slots.values()))
    for engine in engines:
        engine.hold.set()
    assert await asyncio.gather(*running, *waiting) == ["c", "a", "b", "c", "a"]
    assert len(loaded(several)) == 2


async def test_a_server_that_closes_ends_every_model_also_one_that_is_leaving(several: Server) -> None:
    await ask(several, "a")
    await ask(several, "b")
    engines = [slot.context.engine for slot in several.pool.slots.values()]
    for engine in engines:
        engine.hold = asyncio.Event()
    running = [asyncio.create_task(several.complete(model=name)) for name in ("a", "b")]
    await wait_until(lambda: all(engine.stats().num_running for engine in engines))
    waiting = asyncio.create_task(several.complete(model="c"))
    await wait_until(lambda: any(slot.is_leaving for slot in several.pool.slots.values()))
    again = asyncio.create_task(several.complete(model="a"))
    await wait_until(lambda: not several.pool.slots[engines[0].config.model].is_leaving)
    await several.pool.close()
    assert [engine.state for engine in engines] == ["closed", "closed"]
    assert [(await task)[0] for task in (waiting, again)] == [503, 503]
    for engine in engines:
        engine.hold.set()
    await asyncio.gather(*running)


async def test_a_model_that_cannot_be_loaded_says_why_and_leaves_the_others_alone(
    several: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(several, "a")
    for name, wanted in (("bad", "the weights of ... are torn"), ("torn.gguf", "truncated")):
        status, body = await several.complete(model=name)
        assert (status, body["error"]["code"]) == (500, "model_load_failed") and wanted in body["error"]["message"]
    status, body = await several.complete(model="d")
    assert (status, body["error"]["code"]) == (404, "model_not_found") and "'best'" in body["error"]["message"]
    monkeypatch.setattr(model_pool, "measure_host_memory", lambda: (2**30, 2**20))
    status, body = await several.complete(model="b")
    assert (status, body["error"]["code"]) == (503, "model_does_not_fit") and "1048576 are free" in str(body)
    monkeypatch.undo()
    assert await ask(several, "a") == "a"


@pytest.mark.parametrize("model", ["a", "bad"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_stream_shows_that_it_lives_while_its_model_loads(
    several: Server, monkeypatch: pytest.MonkeyPatch, model: str, path: str
) -> None:
    monkeypatch.setattr(model_switch, "KEEP_ALIVE_S", 0.01)
    NamedEngine.gate.clear()
    body = {"model": model, "prompt": "x", "input": "x", "stream": True}
    del body["input" if path == "/v1/completions" else "prompt"]
    async with several.client.post(several.url + path, json=body) as response:
        assert (response.status, await response.content.readline()) == (200, b": keep-alive\n")
        NamedEngine.gate.set()
        rest = await response.read()
    if path == "/v1/completions":
        frames = events(rest[rest.index(b"data:") :])
        assert ("error" in frames[0]) == (model == "bad")
    else:
        assert (b"event: error\n" in rest) == (model == "bad") and rest.endswith(b"\n\n")


async def test_a_client_that_goes_while_its_model_loads_holds_nothing(several: Server) -> None:
    NamedEngine.gate.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await ask(several, "a")
    NamedEngine.gate.set()
    (slot,) = several.pool.slots.values()
    await wait_until(lambda: slot.context is not None and not slot.is_busy)


async def test_an_idle_model_sleeps_wakes_for_a_request_and_ends(
    several: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(model_pool, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(model_pool, "LOOK_S", 0.01)
    await ask(several, "a")
    (slot,) = several.pool.slots.values()
    engine = slot.context.engine
    task = asyncio.create_task(several.pool.tend())
    now = 1500.0
    await wait_until(lambda: engine.state == "sleeping")
    assert await ask(several, "a") == "a" and (engine.sleeps, engine.state) == (1, "ready")
    now = 20_000.0
    await wait_until(lambda: not several.pool.slots)
    assert engine.state == "closed"
    task.cancel()


async def test_the_lists_name_every_model_with_its_state(several: Server) -> None:
    await ask(several, "a")
    _, body = await several.get("/v1/models")
    found = {each["id"]: (each["state"], each["max_model_len"], each["modalities"]) for each in body["data"]}
    assert found["fake"] == ("ready", 2048, ["text"]) and found["a"][0] == "ready"
    assert found["b"] == found["best"] == ("unloaded", 77, ["text", "image"]) and found["torn.gguf"][0] == "broken"
    assert (await several.get("/v1/models/best"))[1]["id"] == "best"
    assert (await several.get("/v1/models/none"))[0] == 404
    tags, running = [(await several.get(path))[1]["models"] for path in ("/api/tags", "/api/ps")]
    assert {"fake:latest", "a:latest", "best:latest"} <= {each["name"] for each in tags} and len(running) == 3
    _, shown = await several.post("/api/show", {"model": "b:latest"})
    assert shown["model_info"]["FakeForCausalLM.context_length"] == 77 and "vision" in shown["capabilities"]
    families = list(text_string_to_metric_families((await several.get("/metrics"))[1]))
    names = [each.name for each in families]
    (state,) = [each for each in families if each.name == "troupe:engine_state"]
    assert len(names) == len(set(names))
    assert {each.labels["model_name"] for each in state.samples} == {"fake", "a"}


async def test_the_operator_loads_unloads_and_fetches(several: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await several.post("/models/load", {"model": "a"}))[0] == 401
    assert (await several.post("/models/load", {"model": "a"}, headers=ADMIN))[1]["state"] == "ready"
    assert (await several.post("/models/unload", {"model": "a"}, headers=ADMIN))[1]["unloaded"] is True
    assert (await several.post("/models/unload", {"model": "a"}, headers=ADMIN))[1]["unloaded"] is False
    assert (await several.post("/models/unload", {"model": "fake"}, headers=ADMIN))[0] == 400
    assert (await several.post("/models/fetch", {"model": "nothing"}, headers=ADMIN))[1]["error"]["code"] == (
        "model_fetch_failed"
    )
    assert await several.post("/api/pull", {"model": "a", "stream": False}) == (200, {"status": "success"})
    assert (await several.post("/api/pull", {"model": "owner/other"}))[0] == 401
    lines = (await several.post("/api/pull", {"model": "nothing"}, headers=ADMIN))[1].splitlines()
    assert "cannot be fetched" in json.loads(lines[-1])["error"]


async def test_rows_of_a_job_are_answered_by_the_models_that_they_name(several: Server) -> None:
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, "prompt": "x"}}
        for name in ("a", "b", "fake", "bad")
    ]
    job = SimpleNamespace(id="job", body={"kind": "batch"})
    answer = make_answer(several.pool, job)  # type: ignore[arg-type]
    assert answer is not None
    done = [await answer(json.dumps(row)) for row in rows]
    assert [each.is_failed for each in done] == [False, False, False, True]
    assert json.loads(done[1].text)["response"]["body"]["model"] == "b"


async def test_a_job_waits_while_the_model_that_a_person_loaded_is_not_loaded(models_dir: Path) -> None:
    NamedEngine.gate = asyncio.Event()
    NamedEngine.gate.set()
    async with run_server(FakeEngine(), AppConfig()) as server:
        server.pool.make_engine, entry = NamedEngine, Catalogue(models_dir).find("a")
        request = {"schema": "event", "text": "x", "model": "a"}
        job: Any = SimpleNamespace(id="job", body={"kind": "extract", "model": "a", "request": request})
        row = dump_source(Source("x.txt", "Ada"))
        assert entry is not None and make_answer(server.pool, job) is None
        async with server.pool.hold(entry):
            answer = make_answer(server.pool, job)
        assert answer is not None and '"record": {"name"' in (await answer(row)).text
        await server.pool.unload(entry)
        with pytest.raises(EngineSleeping, match="'a' is not loaded any more"):
            await answer(row)


async def test_a_role_gives_requests_without_a_model_to_its_own(
    models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AppConfig(extract_model="c", models_dir=str(models_dir))
    roles = choose_roles(FakeEngine().config, config)
    monkeypatch.setattr(model_pool.ModelPool.__init__, "__defaults__", (NamedEngine,))
    NamedEngine.gate = asyncio.Event()
    NamedEngine.gate.set()
    async with run_server(FakeEngine(), config, roles=roles) as server:
        await server.pool.kept[roles["extract"].model].engine.start()
        asked = {"schema": "event", "text": "x"}
        assert (await server.post("/v1/extract", asked))[1]["model"] == "c"
        assert (await server.post("/v1/extract", {**asked, "model": "fake"}))[1]["model"] == "fake"
        assert (await server.complete(model=None))[1]["model"] == "fake"
        assert await ask(server, "c") == "c" and not server.pool.slots
        row = next(row for row in (await ModelPanel(server.pool).draw()).split("<tr>") if ">c</th>" in row)
        assert "stays: the default model to extract" in row and "data-act" not in row


def test_the_embedded_model_extracts_and_smollm2_chats_where_both_are_here(models_dir: Path) -> None:
    first = EngineConfig()
    smollm2 = EngineConfig("smollm2")
    assert not choose_roles(first, AppConfig())
    Path(smollm2.model).parent.mkdir(parents=True)
    Path(smollm2.model).touch()
    assert {role: each.name for role, each in choose_roles(first, AppConfig()).items()} == {"chat": "smollm2"}
    assert {role: each.name for role, each in choose_roles(smollm2, AppConfig()).items()} == {"extract": "demo_model"}
    assert not choose_roles(first, AppConfig(chat_model="none"))
    with pytest.raises(UsageError, match="chat_model='x' is not here"):
        choose_roles(first, AppConfig(chat_model="x"))


def test_settings_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    for settings in (
        {"model_alias": ("x",)}, {"model_alias": ("x=a", "x=b")}, {"models_dir": str(tmp_path / "none")},
        {"max_loaded_models": 1, "models_dir": str(tmp_path)},
    ):
        with pytest.raises(UsageError, match=next(iter(settings))):
            AppConfig(**settings)  # type: ignore[arg-type]


@needs_model
async def test_requests_to_three_models_in_random_order_get_the_texts_of_each_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two, one of them has a core process, and that is killed meanwhile."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "models"
    for seed, name in enumerate(("one", "two"), 1):
        shutil.copytree(EngineConfig().model, folder / name, ignore=shutil.ignore_patterns("recipe", "lora", "draft"))
        tensors = load_file(folder / name / "model.safetensors")
        noise = torch.Generator().manual_seed(seed)
        moved = {key: each + 0.03 * torch.randn(each.shape, generator=noise) for key, each in tensors.items()}
        save_file(moved, folder / name / "model.safetensors", {"format": "pt"})
    first = EngineConfig(num_blocks=256, num_threads=1, enable_native_ops=False, max_num_seqs=16)
    names = ["demo_model", "one", "two"]
    config = AppConfig(models_dir=str(folder), max_loaded_models=2)

    async def answer(server: Server, name: str) -> tuple[str, str]:
        sampling = {"max_tokens": 60, "temperature": 2, "seed": 7, "ignore_eos": True}
        status, body = await server.complete(model=name, prompt="Dear Ms Weber,", **sampling)
        assert status == 200, body
        return name, body["choices"][0]["text"]

    async with Engine(first) as engine, run_server(engine, config) as server:
        alone = dict([await answer(server, name) for name in names])
        assert len(set(alone.values())) == 3
        asked = random.Random(1).choices(names, k=24)
        tasks = [asyncio.create_task(answer(server, name)) for name in asked]
        await wait_until(lambda: any(each.engine.stats().num_unfinished for each in server.pool.contexts[1:]))
        further = [each.engine for each in server.pool.contexts[1:]]
        send_signal(further[0], 0, signal.SIGKILL)
        assert [(await task)[1] for task in tasks] == [alone[name] for name in asked]
        assert further[0].stats().num_restarts == 1


async def test_the_chat_is_answered_by_the_models_that_a_person_chose(several: Server) -> None:
    tab = ChatTab(several.pool.first.engine, Store(), interval_s=0, pool=several.pool)
    assert {"fake", "a", "best", "bad"} <= set(await tab.models.list_here())
    greetings = [(await tab.welcome(names))["placeholder"] for names in ([], ["fake"], ["a"], ["fake", "a"])]
    assert greetings[0] == greetings[1] and "**fake** and **a**" in greetings[3]
    assert "fake" not in greetings[2] and "is loaded when you ask" in greetings[2]
    request = SimpleNamespace(session_hash="abc", request=None)
    for models, note in ((["a"], ""), (["gone", "a"], "Not here any more: gone. Answering from now on: a.")):
        opened = await tab.restore({"models": models}, None, request)  # type: ignore[arg-type]
        assert opened[4].get("problem", "").endswith(note) and opened[8]["updates"][MODELS]["value"] == ["a"]
        assert ("Not here any more" in opened[4].get("problem", "")) is bool(note)
    for models, words in ((["a"], ["a"]), (["b", "a"], ["b", "a"]), ([], ["You said"]), (["bad"], [])):
        settings = asdict(Settings(models=models, max_tokens=64)).values()
        turn = (await tab.send({"text": "hello", "files": []}, request, None, None, *settings))[4]  # type: ignore[arg-type]
        await wait_until(lambda turn=turn: turn.answer.is_over)
        if words:
            answer = turn.answer
            assert all(map(str.startswith, map(answer.read, answer.names), words))
            if len(models) == 2:  # each has its figures, and reads its own answer again
                titles = [message["metadata"]["title"] for message in conclude(answer) if "metadata" in message]
                assert titles[::2] == ["*b*", "*a*"] and all("complete" in title for title in titles[1::2])
                read = [to_model_messages(conclude(answer), "", name)[0]["content"][0] for name in ("a", "b", "c")]
                assert read == ["a", "b", "b"]
                assert [each[1][0] for each in read_answers(conclude(answer)).values()] == ["b", "a"]
        else:
            assert "'bad' could not be loaded: the weights of" in turn.answer.problem.why


async def test_the_page_fetches_loads_and_ends_models(several: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = ModelPanel(several.pool)

    async def read_row(name: str) -> str:
        return next(row for row in (await panel.draw()).split("<tr>") if f">{name}</th>" in row)

    async def press(verb: str, name: str) -> str:
        await panel.act(verb, name)
        await wait_until(lambda: all(work.task.done() for work in panel._work.values()))
        return await read_row(name)

    assert ">ready<" in (row := await read_row("fake")) and "data-act" not in row and "was started with it" in row
    assert "77 tokens" in (row := await read_row("a")) and 'data-act="load a"' in row
    async with several.pool._lock:
        await panel.act("load", "a")
        await wait_until(lambda: "a" in {slot.entry.name for slot in several.pool.slots.values()})
        slot = next(iter(several.pool.slots.values()))
        slot.began -= 7
        assert "waiting until another model is loaded, 7 s" in (row := await read_row("a")) and "data-act" not in row
    phases = {slot.phase}
    await wait_until(lambda: bool(phases.add(slot.phase)) or slot.loading.done())
    assert any(re.fullmatch(r"loading \d+ MiB", phase) for phase in phases)
    assert ">ready<" in (row := await press("load", "a")) and 'data-act="end a">Unload<' in row
    assert "KV cache up to 3 MiB" in row
    # What is loaded comes first, then what can be loaded at once; the others, being many, are folded away.
    loaded, others = (await panel.draw()).split('class="fold-line"')
    assert re.findall('<th scope="row">(.*?)</th>', loaded) == ["fake", "a"] and 'aria-expanded="false"' in others
    verbs = re.findall('data-act="(load|fetch) ', others)
    assert verbs == sorted(verbs, reverse=True) and set(verbs) == {"load", "fetch"}
    assert others.rindex("torn.gguf") > others.rindex("data-act")
    assert 'data-act="load a"' in await press("end", "a")
    assert "could not be loaded: the weights of" in await press("load", "bad")
    assert "torn.gguf" in (row := await read_row("torn.gguf")) and "data-act" not in row

    def fetch(catalogue: Catalogue, name: str, report: Progress) -> None:
        report(2**20, 4 * 2**20)
        raise ConfigError("the disk is full")

    monkeypatch.setattr(Catalogue, "fetch", fetch)
    assert 'data-act="fetch smollm2"' in await read_row("smollm2")
    assert "the disk is full" in await press("fetch", "smollm2")
