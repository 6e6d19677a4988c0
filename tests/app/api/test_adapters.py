"""Adapters through the API: names of models, loading and unloading while the server runs."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from app.config import AppConfig
from engine import Engine, EngineConfig
from engine.config_fields import DEMO_MODEL
from tests.app.api.harness import Server, needs_model, run_server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_model]
ADMIN = {"Authorization": "Bearer boss"}
FOLDER = Path(DEMO_MODEL) / "lora"
QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
CHAT: dict[str, Any] = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roots")


@pytest.fixture
def folder(root: Path) -> Path:
    """A copy of the adapter where adapters may be loaded from."""
    shutil.rmtree(root / "copy", ignore_errors=True)
    return Path(shutil.copytree(FOLDER, root / "copy"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(root: Path) -> AsyncIterator[Server]:
    modules = (f"loud={FOLDER}",)
    config = EngineConfig(num_blocks=256, enable_lora=True, lora_modules=modules, lora_root=(str(root),))
    engine = Engine(config)
    async with engine, run_server(engine, AppConfig(admin_key="boss")) as running:
        yield running


async def ask(server: Server, model: str, **more: Any) -> str:
    status, body = await server.post("/v1/chat/completions", CHAT | {"model": model} | more)
    assert (status, body["model"]) == (200, model), body
    return str(body["choices"][0]["message"]["content"])


async def load(server: Server, name: str, path: Path, **more: Any) -> tuple[int, Any]:
    given = {"lora_name": name, "lora_path": str(path)} | more
    return await server.post("/v1/load_lora_adapter", given, headers=ADMIN)


async def test_an_adapter_is_a_model_of_every_route(server: Server) -> None:
    base, loud = await asyncio.gather(ask(server, "demo_model"), ask(server, "loud"))
    assert base.startswith("I am the Troupe")
    assert loud == "I AM THE TR"
    _, listed = await server.get("/v1/models")
    assert [(each["id"], each["parent"]) for each in listed["data"]] == [("demo_model", None), ("loud", "demo_model")]
    assert (await server.get("/v1/models/loud"))[1]["root"] == str(FOLDER)
    anthropic = {"model": "loud", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    _, message = await server.post("/v1/messages", anthropic)
    assert (message["model"], message["content"][0]["text"]) == ("loud", loud)
    asked = {"model": "loud", "input": "Hello, who are you?", "max_output_tokens": 16, "temperature": 0}
    _, response = await server.post("/v1/responses", asked)
    assert response["output"][0]["content"][0]["text"].startswith("I AM")
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    _, record = await server.post("/v1/extract", {"model": "loud", "text": "Ada is here.", "schema": schema})
    assert record["model"] == "loud"
    status, body = await server.post("/v1/completions", {"model": "quiet", "prompt": "x"})
    assert status == 404
    assert "'demo_model', 'loud'" in body["error"]["message"]


async def test_adapters_come_and_go_while_the_server_runs(server: Server, folder: Path) -> None:
    assert (await server.post("/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "x"}))[0] == 401
    status, body = await load(server, "b", FOLDER)
    assert (status, body["error"]["param"]) == (400, "lora_path"), "outside of --lora-root"
    assert (await load(server, "demo_model", folder))[0] == 400
    status, body = await load(server, "b", folder)
    assert (status, body["parent"]) == (200, "demo_model")
    loud = await ask(server, "b")
    assert (await load(server, "b", folder))[0] == 400
    tensors = load_file(folder / "adapter_model.safetensors")
    zeros = {name: tensor * (0 if "lora_B" in name else 1) for name, tensor in tensors.items()}
    save_file(zeros, folder / "adapter_model.safetensors")
    assert await ask(server, "b") == loud, "what was read stays"
    assert (await load(server, "b", folder, load_inplace=True))[0] == 200
    assert await ask(server, "b") == await ask(server, "demo_model")
    status, body = await server.post("/v1/unload_lora_adapter", {"lora_name": "b"}, headers=ADMIN)
    assert (status, body["deleted"]) == (200, True)
    assert (await server.post("/v1/chat/completions", CHAT | {"model": "b"}))[0] == 404
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "b"}, headers=ADMIN))[0] == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type"), ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"), ({"r": 65}, "max_lora_rank allows 64"),
        ({"use_dora": True}, "no magnitude for model.layers.0"), ({"r": 4}, "must be [4, "),
        ({"something_new": 1}, "something_new"),
    ],
    ids=str,
)
async def test_what_is_not_supported_is_refused_by_name(
    server: Server, folder: Path, change: dict[str, Any], message: str
) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status, body = await load(server, "b", path.parent)
    assert status == 400
    assert message in body["error"]["message"]


@pytest.mark.parametrize("name", ["model.layers.99.mlp.up_proj.lora_A.weight", "model.norm.weight", "x.lora_E"])
async def test_a_tensor_that_lands_nowhere_fails_the_load(server: Server, folder: Path, name: str) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    extra = next(iter(tensors.values())).clone()
    save_file(tensors | {f"base_model.model.{name}": extra}, file)
    status, body = await load(server, "b", file.parent)
    assert status == 400
    assert name.split(".lora")[0].removesuffix(".weight") in body["error"]["message"]
    file.write_bytes(file.read_bytes()[:-100])
    status, body = await load(server, "b", file.parent)
    assert status == 400
    assert "cannot be read as safetensors" in body["error"]["message"]
    assert (await ask(server, "loud")).startswith("I AM"), "nobody else is hurt"
