"""The launches of a step on a GPU, tested without one: meta tensors have shapes but no values.

Any read of a value raises there, as torch's check for waits does on a GPU. The launches of Triton are noted
with all that Triton compiles a kernel for: constants, dtypes, alignment, and which integers are 1 or divided by 16.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.actor_messages import NewRow, StepMasks
from engine.device.kv_cache import allocate_kv_cache
from engine.model import DecoderModel, ModelConfig
from engine.model.adapters import AdapterTables
from engine.model.sharding import ONE_RANK, Sharding
from engine.sampling_params import SamplingParams
from engine.worker.adapter_rows import AdapterRows
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.input_batch import InputBatch
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.state import SamplingState
from engine.worker.state_slots import StateSlots, allocate_states
from engine.worker.warm_up import list_largest_steps, list_warm_up, run_steps
from tests.engine.core.harness import make_scheduler_config
from tests.engine.model.drive import VOCAB_SIZE, make_adapter, make_transformers_model, save
from tests.engine.worker.meta_device import META, Launches, MetaLink
from tests.engine.worker.plans import make_new_row, make_plan
from tests.kernels.triton.conftest import IS_INTERPRETED

pytest.importorskip("triton", reason="needs triton")

from triton.runtime.jit import JITFunction

import kernels.triton as triton_ops

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="a process that interprets launches nothing"),
    pytest.mark.timeout(600),
]

MAX_ROWS, MAX_LEN, BLOCK = 72, 2048, 16
BLOCKS_PER_ROW = MAX_LEN // BLOCK
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9),
    SamplingParams(temperature=0.7, max_tokens=9),
    SamplingParams(top_k=7, top_p=0.9, max_tokens=9),
    SamplingParams(min_p=0.05, logprobs=3, prompt_logprobs=2, max_tokens=9),
    SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, bad_words=("x",), max_tokens=9),
    SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=(3, 4, 5), min_tokens=4, max_tokens=9),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    noted = Launches()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: noted.run(kernel, *args, **options))
    return noted


class FakeComm:
    """Another rank, whose results have the shapes of this one's."""

    rank, size = 1, 2

    def sum(self, part: Tensor) -> Tensor:
        return part + part

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        return part.new_empty(len(part), sum(widths))

    def collect(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        return part.new_empty(sum(counts), part.shape[1])


class Recorder:
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None


@dataclass
class Machine:
    """A runner on the meta device, its rows, and random steps for it."""

    runner: ModelRunner
    graphs: DecodeGraphs
    link: MetaLink
    kind: str = "plain"
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    ends: dict[int, int] = field(default_factory=dict)

    def warm_up(self) -> None:
        run_steps(self.runner, list_warm_up(MAX_LEN, VOCAB_SIZE, is_thorough=True))
        while self.graphs.has_more:
            self.graphs.record_next()

    def add(self, row: int, length: int, prefix: int) -> NewRow:
        """A request with one of three system prompts, or none, in front."""
        own = range(1000 + row * BLOCKS_PER_ROW, 1000 + (row + 1) * BLOCKS_PER_ROW)
        blocks = [*range(1 + 100 * prefix, 65 + 100 * prefix), *own][:BLOCKS_PER_ROW] if prefix else list(own)
        self.ends[row] = length
        params = self.dice.choice(PARAMS) if self.dice.random() < 0.3 else PARAMS[row % 2]
        bad_words = [[4], [3, 5]] if params.bad_words else []
        new_row = make_new_row(row, [1] * length, blocks, params, bad_words)
        if self.kind == "lora" and row % 3:
            new_row = msgspec.structs.replace(new_row, adapter=str(row % 3))
        return new_row

    def _count_drafts(self, row: int) -> int:
        return self.dice.randint(0, 3) if self.kind == "drafts" and self.ends[row] < MAX_LEN - 4 else 0

    def step(self, number: int) -> None:
        """Some requests come with a prompt of any length, some of those that run decode; some wait for masks."""
        free = [row for row in range(MAX_ROWS) if row not in self.ends]
        new = []
        if free and self.dice.random() < 0.4:
            for row in self.dice.sample(free, min(len(free), self.dice.choice([1, 2, 30]))):
                length = self.dice.choice([1, 2, 5, 16, 17, 40, 1000, 1100, 1100])
                new.append(self.add(row, length, self.dice.randint(1, 3) if length >= 1040 else 0))
        running = [row for row in self.ends if row not in {each.row for each in new}]
        chosen = self.dice.sample(running, self.dice.randint(0, len(running)))
        if self.dice.random() < 0.5:
            chosen = running
        rows = [each.row for each in new] + [row for row in chosen if self.ends[row] < MAX_LEN]
        if not rows:
            return
        prompts = [(each.row, 0, len(each.token_ids)) for each in new]
        drafts = {row: [1] * self._count_drafts(row) for row in rows[len(new) :]}
        runs = [*prompts, *((row, self.ends[row], 1 + len(drafts[row])) for row in rows[len(new) :])]
        gated = np.array([self.dice.random() < 0.1 for _ in rows])
        self.runner.execute(make_plan(runs, number, new=new, gated=np.array(rows)[gated].tolist(), drafts=drafts))
        for row in rows[len(new) :]:
            self.ends[row] += 1
        if gated.any():
            indices = np.flatnonzero(gated)
            counts = 1 + np.array([len(drafts.get(row, ())) for row in np.array(rows)[gated].tolist()])
            words = np.full((counts.sum(), -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
            self.runner.sample_gated(StepMasks(number, indices, counts, words))
        for row in [row for row in rows if self.dice.random() < 0.05]:
            del self.ends[row]


FAMILIES = {"hybrid": "qwen3_next", "moe": "qwen3_moe", "experts": "qwen3_moe", "tp": "qwen3_moe"}
KINDS = ("plain", "lora", "drafts", *FAMILIES)


def make_machine(kind: str, folder: Path) -> Machine:
    """Many layers would launch the same again; the rows are as many as fill the device and more."""
    shape: dict[str, Any] = {"head_dim": 64, "hidden_size": 64, "num_hidden_layers": 1}
    if kind == "hybrid":
        shape["num_hidden_layers"] = 4
    family = FAMILIES.get(kind, "qwen3")
    config = ModelConfig.from_pretrained(save(make_transformers_model(family, **shape), folder))
    sharding = ONE_RANK
    if kind in ("tp", "experts"):
        sharding = Sharding(1, 2, FakeComm(), has_whole_experts=kind == "experts")
    ops = triton_ops.make_ops(META, torch.bfloat16)
    model = DecoderModel(config, torch.bfloat16, META, ops, sharding)
    model.pack()
    model.reserve_positions(MAX_LEN)
    caches = allocate_kv_cache(model.kv_specs(), 20000, BLOCK, torch.bfloat16, META)
    batch, state = (
        InputBatch(MAX_ROWS, MAX_LEN, BLOCK, META, gather=ops.gather_inputs),
        SamplingState(MAX_ROWS, VOCAB_SIZE, META),
    )
    parts: list[Any] = []
    state_caches = allocate_states(model.state_specs(), MAX_ROWS, META)
    states = StateSlots(state_caches, MAX_ROWS) if state_caches else None
    tables = AdapterTables(ops, model.matrix_parts.values(), 2, 8, META) if kind == "lora" else None
    all_caches = [*caches, *state_caches]
    graphs = DecodeGraphs(model, all_caches, MAX_ROWS, MAX_LEN, Recorder(), widths=(1, 3), tables=tables)
    if states is not None:
        parts.append(states)
    if kind == "lora":
        store: Any = SimpleNamespace(find={str(seed): make_adapter(model, seed) for seed in (1, 2)}.__getitem__)
        parts.append(AdapterRows(store, model, META, tables))
    link = MetaLink()
    runner = ModelRunner(
        model, all_caches, batch, state, (0,), link, graphs, None, parts, states, graphs.buffers
    )
    return Machine(runner, graphs, link, kind)


@pytest.fixture
def machine(launches: Launches, tmp_path: Path) -> Machine:
    return make_machine("plain", tmp_path)


# Drafts are plain rows and more; ranks of a divided model launch all that one rank does.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak) if kind in ("plain", "experts") else kind for kind in KINDS]
)
def test_launching_a_step_never_waits_for_the_device(launches: Launches, tmp_path: Path, kind: str) -> None:
    machine = make_machine(kind, tmp_path)
    for _ in range(30):
        machine.graphs.record_next()
    for number in range(25):
        machine.step(number)
    assert machine.link.waits.found == set()
    expected = {"lora": "lora_low_kernel", "hybrid": "scan_chunks_kernel", "moe": "combine_experts_kernel"}
    assert expected.get(kind, "short_attention_kernel") in launches.names


def test_100_random_steps_compile_nothing_that_warm_up_did_not(machine: Machine, launches: Launches) -> None:
    """And no launch reads a value of the device: it would raise."""
    machine.warm_up()
    known, names = set(launches.variants), set(launches.names)
    launches.names.clear()
    for number in range(100):
        machine.step(number)
    new = sorted(str(variant) for variant in launches.variants - known)
    assert not new, "\n".join(new)
    assert set(launches.names) == names, "every kernel of the warm-up is used, or it need not be compiled"


def test_the_largest_steps_launch_what_the_warm_up_does(machine: Machine, launches: Launches) -> None:
    machine.warm_up()
    known = set(launches.variants)
    launches.names.clear()
    scheduler = make_scheduler_config(max_model_len=MAX_LEN, max_num_seqs=MAX_ROWS, max_num_batched_tokens=4096)
    run_steps(machine.runner, list_largest_steps(scheduler, 20000 * BLOCK, VOCAB_SIZE))
    assert launches.names and set(launches.variants) == known


@pytest.mark.parametrize("read", [Tensor.item, bool])
def test_reading_a_value_is_caught(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        read(torch.ones(2, device=META).sum())
