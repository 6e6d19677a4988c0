"""Adapters on several ranks: logits of PEFT, bits and texts of one rank, loaded and unloaded while requests run."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, LoRARequest
from engine.errors import InvalidRequest
from engine.lora.adapter_files import AdapterFiles
from engine.lora.loader import Adapter, load_adapter
from engine.messages import AdapterRef
from engine.model import DecoderModel, load_model
from engine.model.sharding import Sharding
from engine.parallel.adapters import PeerAdapters, RankAdapters
from engine.parallel.commands import Command, Reply
from engine.parallel.load import limit_ops
from engine.worker.adapter_store import AdapterStore
from kernels.cpu import make_native_ops
from tests.engine.lora.peft_adapters import KINDS, PeftTwin
from tests.engine.mixed_requests import TIGHT, Completion, make_mixed_requests, summarise
from tests.engine.model.drive import Driver, make_prompt
from tests.engine.parallel.test_ranks import signal_rank
from tests.engine.parallel.test_sharding import EIGHTHS, open_comms
from tests.engine.parallel.test_sharding import MODELS as DIVIDED
from tests.engine.tokenizer_folders import make_byte_level_folder
from tests.kernels.cpu.conftest import require_library

# PEFT calls deprecated functions of transformers.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
NAMES = ("one KV head, odd vocabulary", "tied head", "fused matrices", "interleaved heads, parallel MLP")
MODELS = {name: DIVIDED[name] for name in NAMES} | {"shared experts": ("qwen2_moe", {})}


class ThreadRanks:
    """Stands for `Ranks`: hands commands to the adapters of models in this process, encoded as for a socket."""

    def __init__(self, models: list[DecoderModel]) -> None:
        self.adapters = [RankAdapters(model, max_rank=8) for model in models]

    def send(self, command: Command) -> None:
        self.ask(command)

    def ask(self, command: Command) -> list[Reply | None]:
        encoded = msgspec.msgpack.encode(command)
        return [each.handle(msgspec.msgpack.decode(encoded, type=type(command))) for each in self.adapters]


def load_ranks(folder: Path, shardings: list[Sharding]) -> list[DecoderModel]:
    models = []
    for sharding in shardings:
        model = load_model(folder, ops=limit_ops(make_native_ops(require_library(), 1)), sharding=sharding)
        assert isinstance(model, DecoderModel)
        models.append(model)
    return models


def load_adapters(twin: PeftTwin, models: list[DecoderModel]) -> list[dict[str, Adapter]]:
    """Each rank's adapters by kind, as rank 0 distributes them."""
    ranks = ThreadRanks(models[1:])
    peers = PeerAdapters(ranks) if models[1:] else None  # type: ignore[arg-type]
    found: list[dict[str, Adapter]] = [{} for _ in models]
    for number, kind in enumerate(KINDS):
        files = AdapterFiles.read(twin.folder / kind)
        peer = None if peers is None else peers.open(files)
        found[0][kind] = load_adapter(files, models[0], 8, peer)
        if peer is not None:
            peer.finish()
        for adapters, theirs in zip(found[1:], ranks.adapters, strict=True):
            adapters[kind] = theirs._adapters[number]
    return found


def run_mixed_batch(model: DecoderModel, adapters: dict[str, Adapter]) -> dict[str, Tensor]:
    """The logits of one prompt with each adapter and with none, in one batch, then of a decode."""
    driver = Driver(model)
    driver.adapters = adapters
    prompts = make_prompts()
    found = driver.step({kind: ids[:-1] for kind, ids in prompts.items()})
    more = driver.step({kind: ids[-1:] for kind, ids in reversed(prompts.items())})
    return {kind: torch.cat([found[kind], more[kind]]) for kind in prompts}


def make_prompts() -> dict[str, list[int]]:
    return {kind: make_prompt(9 + 5 * at, at) for at, kind in enumerate([*KINDS, "base"])}


SOAK = ("fused matrices", "interleaved heads, parallel MLP")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.soak] * (each in SOAK)) for each in MODELS])
def test_logits_of_a_mixed_batch_are_those_of_peft_and_the_bits_of_one_rank(name: str, tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    twin = PeftTwin(family, tmp_path, **EIGHTHS | overrides)
    models = load_ranks(twin.checkpoint, [Sharding(is_sliced=True)])
    one = run_mixed_batch(models[0], load_adapters(twin, models)[0])
    for kind, ids in make_prompts().items():
        expected = twin.compute(ids, None if kind == "base" else kind)
        torch.testing.assert_close(one[kind], expected, atol=1e-4, rtol=0)
    for size in (2, 4) if name == "tied head" else (4,):
        with open_comms(size) as comms, ThreadPoolExecutor(size) as threads:
            models = load_ranks(twin.checkpoint, [Sharding(r, size, comm) for r, comm in enumerate(comms)])
            adapters = load_adapters(twin, models)
            found = [*threads.map(run_mixed_batch, models, adapters)]
        for kind, logits in one.items():
            assert torch.equal(found[0][kind], logits), f"{size} ranks differ with {kind}"


def test_other_ranks_free_an_adapter_when_rank_0_has_freed_it(tmp_path: Path) -> None:
    kinds = {kind: {"r": 4, "lora_alpha": at} for at, kind in enumerate("abc", 1)}
    twin = PeftTwin("qwen3", tmp_path, kinds, **EIGHTHS)
    models = load_ranks(twin.checkpoint, [Sharding(0, 2), Sharding(1, 2)])
    ranks = ThreadRanks(models[1:])
    (theirs,) = ranks.adapters
    refs = {kind: AdapterRef(kind, str(tmp_path / kind), AdapterFiles.read(tmp_path / kind).digest) for kind in "abc"}
    size = load_adapter(AdapterFiles.read(tmp_path / "a"), models[0], 8).num_bytes
    store = AdapterStore(models[0], 8, 2 * size, PeerAdapters(ranks))  # type: ignore[arg-type]
    store.load(refs["a"], pins=True)
    store.load(refs["b"])
    used = store.find(refs["a"].digest)
    store.unpin(refs["a"].digest)
    store.load(refs["c"])
    assert sorted(theirs._adapters) == [0, 1, 2], "a row uses the first one, which the store has evicted"
    del used
    store.drop(refs["c"].digest)
    assert sorted(theirs._adapters) == [1]
    (tmp_path / "a/adapter_config.json").write_text("{}")
    digest = AdapterFiles.read(tmp_path / "a").digest
    with pytest.raises(InvalidRequest, match="peft_type"):
        store.load(AdapterRef("a", str(tmp_path / "a"), digest))
    store.drop(refs["b"].digest)
    assert not theirs._adapters and not theirs._builders


def test_an_adapter_leaves_the_devices_of_all_ranks_when_no_row_uses_it(tmp_path: Path) -> None:
    kinds = {kind: {"r": 4, "lora_alpha": at} for at, kind in enumerate("abc", 1)}
    twin = PeftTwin("qwen3", tmp_path, kinds, **EIGHTHS)
    models = load_ranks(twin.checkpoint, [Sharding(0, 2), Sharding(1, 2)])
    ranks = ThreadRanks(models[1:])
    store = AdapterStore(models[0], 8, 2**30, PeerAdapters(ranks))  # type: ignore[arg-type]
    store._is_on_host = False
    for number, kind in enumerate("abc"):
        ref = AdapterRef(kind, str(tmp_path / kind), AdapterFiles.read(tmp_path / kind).digest)
        store.load(ref, pins=True)
        store.find(ref.digest).bind(models[0])  # as a step does
        ranks.adapters[0]._adapters[number].bind(models[1])
        if kind != "c":
            store.unpin(ref.digest)
    for adapters in (store._adapters, ranks.adapters[0]._adapters):
        assert [each.bound is not None for each in adapters.values()] == [False, False, True]
    store.unpin_all()
    assert store._adapters[ref.digest].bound is None


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> PeftTwin:
    """A model with a tokenizer, experts, and adapters."""
    folder = tmp_path_factory.mktemp("twin")
    (folder / "base").mkdir()
    make_byte_level_folder(folder / "base")
    shape = EIGHTHS | {"vocab_size": 423, "num_key_value_heads": 1, "num_experts": 7}
    return PeftTwin("qwen3_moe", folder, **shape | {"eos_token_id": 1})


def make_engine(twin: PeftTwin, **changes: Any) -> Engine:
    settings = TIGHT | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "attention_backend": "native"}
    settings |= {"core": "local", "num_threads": 1, "grammar_timeout_s": 120.0}
    return Engine(EngineConfig(str(twin.checkpoint), **settings | changes))


async def run_requests(engine: Engine, twin: PeftTwin) -> list[list[Completion]]:
    """Mixed requests, each with one of three adapters or none; two adapters are loaded and unloaded meanwhile."""
    await engine.adapters.load("first", str(twin.folder / "dora"))

    async def run(number: int, request: Any) -> list[Completion]:
        names = (None, "first", "saved", "tables")
        name = names[number % len(names)]
        chosen = (None if name is None else LoRARequest(name, 1, str(twin.folder / name) if name != "first" else ""))
        stream = engine.generate(request.prompt, request.params, str(number), lora_request=chosen)
        outputs = [output async for output in stream]
        return [summarise(outputs[-1], index) for index in range(request.params.n)]

    requests = make_mixed_requests(num_requests=26)
    running = [asyncio.create_task(run(*each)) for each in enumerate(requests)]
    await running[1]
    unloading = asyncio.create_task(engine.adapters.unload("first"))  # ends with its last request
    found = await asyncio.gather(*running)
    await unloading
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
async def test_mixed_requests_with_adapters_have_the_texts_of_one_rank(size: int, twin: PeftTwin) -> None:
    """Ranks hold whole experts, whose number they do not divide."""
    async with make_engine(twin, batch_invariant_tp=True, enable_expert_parallel=True) as engine:
        expected = await run_requests(engine, twin)
    async with make_engine(twin, tensor_parallel_size=size, enable_expert_parallel=True) as engine:
        assert await run_requests(engine, twin) == expected
        assert engine.stats().num_preemptions > 0


async def test_adapters_are_loaded_again_after_a_rank_is_killed(twin: PeftTwin) -> None:
    request = make_mixed_requests(num_requests=1)[0]
    async with make_engine(twin, tensor_parallel_size=2) as engine:
        await engine.adapters.load("a", str(twin.folder / "dora"))

        async def run() -> list[int]:
            stream = engine.generate(request.prompt, request.params, lora_request=LoRARequest("a"))
            return [output async for output in stream][-1].outputs[0].token_ids

        expected = await run()
        signal_rank(os.getpid(), signal.SIGKILL)
        assert await run() == expected
        assert engine.stats().num_restarts == 1
