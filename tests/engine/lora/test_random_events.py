"""Hundreds of random events around adapters: every text is that of the adapter that was chosen, and nothing is left."""

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, InvalidRequest, LoRARequest, SamplingParams
from engine.lora.adapter_files import AdapterFiles
from tests.engine.lora.peft_adapters import PeftTwin
from tests.engine.model.drive import make_prompt
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
NUM_EVENTS = 700
KINDS: dict[str, dict[str, Any]] = {
    f"kind {rank}": {"r": rank, "use_dora": rank == 3, "lora_alpha": 2 + rank} for rank in range(1, 7)
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [make_prompt(length, length) for length in (18, 34)]
NAMES = ("a", "b", "c", "d", "e")
CHANGED = ("have changed since it was loaded", "cannot be read", "is not a folder")
Texts = dict[tuple[str, int], list[int]]  # by digest and prompt


class Storm:
    """Random events on one engine. The folders of names change while the names are loaded."""

    def __init__(self, engine: Engine, expected: Texts, sources: list[Path], folder: Path, seed: int) -> None:
        self.engine, self.expected, self.sources, self.folder = engine, expected, sources, folder
        self.random = random.Random(seed)
        self.tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []
        self.num_texts = self.num_refused = self.num_changed = 0

    async def run(self, num_events: int) -> None:
        events = [self.request] * 8 + [self.load] * 2 + [self.replace] * 2 + [self.unload, self.abort]
        for _ in range(num_events):
            self.start(self.random.choice(events)())
            await asyncio.sleep(0)
            if len(self.tasks) > 30:
                await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
        while self.tasks:
            await asyncio.wait(self.tasks)

    def start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.end)

    def end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    async def request(self) -> None:
        name = self.random.choice((*NAMES, ""))
        ref, number = self.engine.adapters.find(name), self.random.randrange(len(PROMPTS))
        chosen = LoRARequest(name) if name else None
        try:
            outputs = [output async for output in self.engine.generate(PROMPTS[number], PARAMS, lora_request=chosen)]
        except InvalidRequest:
            assert name and ref is None, "only a name that is not loaded is refused"
            self.num_refused += 1
            return
        last = outputs[-1].outputs[0]
        if last.finish_reason == "error":
            # Its weights had been evicted, and its files are being replaced, or another adapter's by now.
            assert any(part in str(last.error) for part in CHANGED), last.error
            self.num_changed += 1
            return
        digest = "" if ref is None else ref.digest
        assert last.token_ids == self.expected[digest, number]
        self.num_texts += 1

    async def abort(self) -> None:
        running = [task for task in self.tasks if task.get_coro().__name__ == "request"]  # type: ignore[union-attr]
        if running:
            self.random.choice(running).cancel()

    async def load(self, is_replaced: bool = False) -> None:
        name = self.random.choice(NAMES)
        try:
            await self.engine.adapters.load(name, str(self.put(name)), is_replaced)
        except InvalidRequest as error:  # also when another event replaces the files at this moment
            assert any(part in str(error) for part in ("is loaded from", "it must be", *CHANGED)), error

    async def replace(self) -> None:
        await self.load(is_replaced=True)

    async def unload(self) -> None:
        try:
            await self.engine.adapters.unload(self.random.choice(NAMES))
        except InvalidRequest as error:
            assert "is not loaded" in str(error)

    def put(self, name: str) -> Path:
        """Put a random adapter into the folder of the name, which may have another one."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        return shutil.copytree(self.random.choice(self.sources), target)


async def test_random_events_give_no_wrong_text_and_leak_nothing(tmp_path: Path) -> None:
    twin = PeftTwin("qwen3", tmp_path / "twin", KINDS)
    sources = [twin.folder / kind for kind in KINDS]
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "enable_lora": True, "max_model_len": 64}
    settings |= {"max_num_seqs": 6, "num_blocks": 40, "max_lora_rank": 6}
    expected: Texts = {}
    async with Engine(EngineConfig(str(twin.checkpoint), **settings)) as engine:
        for source in (None, *sources):
            digest = "" if source is None else AdapterFiles.read(source).digest
            chosen = None if source is None else LoRARequest(source.name, 1, str(source))
            for number, prompt in enumerate(PROMPTS):
                outputs = [output async for output in engine.generate(prompt, PARAMS, lora_request=chosen)]
                expected[digest, number] = outputs[-1].outputs[0].token_ids
    assert len({tuple(text) for text in expected.values()}) == len(expected)
    config = EngineConfig(str(twin.checkpoint), max_loras=2, max_cpu_loras=2, **settings)
    async with Engine(config) as engine:
        storm = Storm(engine, expected, sources, tmp_path, seed=3)
        await storm.run(NUM_EVENTS)
        assert not storm.errors
        assert storm.num_texts > 80
        assert storm.num_refused > 4
        for ref in engine.adapters.refs:
            await engine.adapters.unload(ref.name)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        core = engine.replicas[0].connector.host.core  # type: ignore[attr-defined]
        await wait_until(lambda: not core._worker.adapters.num_bytes)
        slots = core.scheduler.scheduler.state.adapters
        assert not slots._slots and not slots._held and not slots._dropped
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert not engine.adapters._num_users and not engine.adapters._unused
