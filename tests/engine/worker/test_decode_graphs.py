"""Recorded decode steps: padding, buffers, and the same tokens as without. A fake recorder runs the step again."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from triton.errors import TritonError

from engine.core.actor_messages import NewRow, StepDone
from engine.device.kv_cache import allocate_kv_cache
from engine.kv_cache_spec import group_layers
from engine.lora.loader import Adapter
from engine.model import DecoderModel, load_model
from engine.model.adapters import AdapterTables
from engine.sampling_params import SamplingParams
from engine.worker.adapter_rows import AdapterRows
from engine.worker.decode_graphs import DecodeBuffers, DecodeGraphs, Recording, list_padded_sizes
from engine.worker.input_batch import InputBatch, ModelInput
from engine.worker.model_runner import ModelRunner
from engine.worker.sampling.state import SamplingState
from engine.worker.state_slots import StateSlots, allocate_states
from kernels import torch as torch_ops
from kernels.lora import LoraMatrix, LoraSegment, add_lora
from kernels.states import StateSegments
from kernels.torch.attention import paged_attention
from kernels.torch.states import run_conv, scan_states
from tests.engine.model.drive import VOCAB_SIZE, make_adapter, make_prompt, make_transformers_model, save
from tests.engine.worker.plans import make_new_row, make_plan
from tests.kernels.reference import gather_inputs

CPU = torch.device("cpu")
MAX_ROWS, MAX_LEN, BLOCK = 10, 96, 8
BLOCKS_PER_ROW = MAX_LEN // BLOCK


class FakeRecorder:
    """A replay runs the function again: it sees new contents of its tensors, and the same shapes."""

    def __init__(self, fails_from: int = 10**9, error: Exception | None = None) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self._fails_from = fails_from
        self._error = error or RuntimeError("out of memory")

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        if self.num_recorded >= self._fails_from:
            raise self._error
        run()

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load(tmp_path_factory.mktemp("model"), "qwen3")


def load(folder: Path, family: str, **sizes: int) -> DecoderModel:
    """Its ops read lengths and states from tensors alone, as a recording demands."""
    save(make_transformers_model(family, **sizes), folder)
    changes: dict[str, Any] = {"make_plan": lambda *_: None, "paged_attention": attend}
    changes |= {"run_conv": read_tables(run_conv), "scan_states": read_tables(scan_states)}
    return load_model(folder, ops=replace(torch_ops.make_ops(), is_graph_safe=True, **changes))


def attend(
    q: Tensor, k: Tensor, v: Tensor, tables: Tensor, starts: Tensor, lens: Tensor, plan: None, **options: Any
) -> Tensor:
    """Attend the rows that do not pad; tokens that pad have no result."""
    out, is_used = torch.full_like(q, torch.nan), starts.diff() > 0
    bounds = torch.cat((starts[:1], starts[1:][is_used]))
    if is_used.any():
        used = q[: bounds[-1]]
        out[: bounds[-1]] = paged_attention(used, k, v, tables[is_used], bounds, lens[is_used], **options)
    return out


def read_tables(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the op with its segments read from their tables, as Triton's kernels do."""

    def run_tables(*operands: Any, **options: Any) -> Tensor:
        *tensors, segments = operands
        tables = segments.find_tables(CPU)
        bounds = tables.bounds.numpy()
        source, target, first, count = (each.contiguous().numpy() for each in tables.segments[: bounds[-1]].t())
        return run(*tensors, StateSegments(source, target, first, count, bounds[1:]), **options)

    return run_tables


class FakeTables:
    """Lists matrices by their place in a list, where a GPU has addresses."""

    def __init__(self) -> None:
        self._matrices: list[LoraMatrix] = []

    def encode(self, matrix: LoraMatrix) -> list[int]:
        self._matrices.append(matrix)
        return [len(self._matrices)]

    def add_listed(self, y: Tensor, x: Tensor, rows: Tensor, numbers: Tensor, table: Tensor, limits: object) -> None:
        for number, place in enumerate(table[:, 0].tolist()):
            found = rows[numbers == number]
            if place and len(found):
                add_lora(y, x, found, [LoraSegment(self._matrices[place - 1], 0, len(found))])


class Rows:
    """A runner and the requests in it, all sampled with seeds; `step` decodes some of them."""

    def __init__(
        self, model: DecoderModel, recorder: FakeRecorder | None = None, widths: Sequence[int] = (1,),
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.adapters = adapters or {}
        self.num_groups = len(group_layers(model.kv_specs()))
        num_blocks = (MAX_ROWS * BLOCKS_PER_ROW + 1) * self.num_groups
        self.caches = allocate_kv_cache(model.kv_specs(), num_blocks, BLOCK, torch.float32, CPU)
        for cache in (each for pair in self.caches for each in pair):
            cache.fill_(torch.nan)
            cache[0] = 0
        states = allocate_states(model.state_specs(), MAX_ROWS, CPU)
        caches = [*self.caches, *states]
        parts: list[Any] = [StateSlots(states, MAX_ROWS)] if states else []
        tables = None
        if adapters and recorder is not None:
            tables = AdapterTables(model.ops, model.matrix_parts.values(), 2, 8, CPU)
        if adapters:
            store: Any = SimpleNamespace(find=adapters.__getitem__)
            parts.append(AdapterRows(store, model, CPU, tables))
        self.graphs = DecodeGraphs(
            model, caches, MAX_ROWS, MAX_LEN, recorder or FakeRecorder(), widths, tables=tables
        )
        batch = InputBatch(MAX_ROWS, MAX_LEN, BLOCK, CPU, self.num_groups, gather_inputs)
        state = SamplingState(MAX_ROWS, VOCAB_SIZE, CPU)
        self.is_recorded = recorder is not None
        place = None if recorder is None else self.graphs.buffers
        self.runner = ModelRunner(
            model, caches, batch, state, (0,), forward=self._forward, parts=parts, place=place
        )
        self.ends: dict[int, int] = {}
        self.tokens: list[list[int]] = []  # of each step
        self.texts: dict[int, list[int]] = defaultdict(list)  # of each row, behind its first token

    def record(self, count: int = 99) -> None:
        """Record so many sizes more, or as many as are left."""
        for _ in range(count):
            if self.graphs.has_more:
                self.graphs.record_next()

    def add(self, row: int, prompt: list[int], shared_blocks: Sequence[int] = ()) -> None:
        """Prefill a request into a row; `shared_blocks` are its first ones, which others may have, too."""
        own = range(1 + row * BLOCKS_PER_ROW + len(shared_blocks), 1 + (row + 1) * BLOCKS_PER_ROW)
        params = SamplingParams(temperature=1.0, seed=row, max_tokens=90)
        block_ids = [
            block * self.num_groups + group
            for block in (*shared_blocks, *own)
            for group in range(self.num_groups)
        ]
        new_row = make_new_row(row, prompt, block_ids, params)
        if (adapter := str(row % 4)) in self.adapters:
            new_row = msgspec.structs.replace(new_row, adapter=adapter)
        self._run([(row, 0, len(prompt))], [new_row])
        self.ends[row] = len(prompt)

    def step(self, rows: list[int], drafts: Mapping[int, Sequence[int]] | None = None) -> None:
        """Decode one token of each of the rows, and verify their drafts."""
        drafts = drafts or {}
        done = self._run([(row, self.ends[row], 1 + len(drafts.get(row, ()))) for row in rows], drafts=drafts)
        token_ids = iter(done.token_ids.tolist())
        for row, count in zip(rows, done.counts.tolist(), strict=True):
            self.ends[row] += count
            self.texts[row] += islice(token_ids, count)

    def _forward(self, step: ModelInput) -> Tensor:
        self.hidden = self.graphs(step) if self.is_recorded else self.runner.run_model(step)
        return self.hidden

    def _run(
        self,
        runs: Iterable[tuple[int, int, int]],
        new: Sequence[NewRow] = (),
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> StepDone:
        done = self.runner.execute(make_plan(runs, new=new, drafts=drafts))
        assert isinstance(done, StepDone)
        self.tokens.append(done.token_ids.tolist())
        return done


def play(rows: Rows, num_steps: int, seed: int = 0) -> list[list[int]]:
    """Requests come, decode in changing core, and are replaced when they get long."""
    dice = random.Random(seed)
    for row in range(MAX_ROWS):
        rows.add(row, make_prompt(dice.randint(1, 30), row))
    for number in range(num_steps):
        rows.step(dice.sample(range(MAX_ROWS), dice.randint(1, MAX_ROWS)))
        for row in (row for row, end in list(rows.ends.items()) if end >= MAX_LEN - 2):
            rows.add(row, make_prompt(dice.randint(1, 30), number))
    return rows.tokens


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [1, 2, 4, 8]), (8, [1, 2, 4, 8]), (17, [1, 2, 4, 8, 16, 24]),
        (72, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80]),
    ],
)
def test_sizes_are_1_2_4_then_every_8_and_above_64_every_16(max_num_seqs: int, sizes: list[int]) -> None:
    assert list_padded_sizes(max_num_seqs) == sizes


def test_recorded_steps_give_the_tokens_of_plain_ones_and_record_nothing_more(model: DecoderModel) -> None:
    recorder = FakeRecorder()
    recorded, plain = Rows(model, recorder), Rows(model)
    recorded.record()
    assert play(recorded, 100) == play(plain, 100)
    assert (recorder.num_recorded, recorder.num_replayed) == (len(list_padded_sizes(MAX_ROWS)), 100)
    for ours, theirs in zip(recorded.caches, plain.caches, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one[1:], other[1:], atol=1e-4, rtol=1e-4, equal_nan=True)


def test_recorded_steps_of_a_model_with_two_groups_give_the_tokens_of_plain_ones(tmp_path: Path) -> None:
    model = load(tmp_path, "gemma2", num_hidden_layers=4, sliding_window=20)
    recorded, plain = Rows(model, FakeRecorder()), Rows(model)
    assert recorded.num_groups == 2
    recorded.record()
    assert play(recorded, 60) == play(plain, 60)


def make_drafts(rows: Rows, texts: Mapping[int, list[int]], chosen: list[int]) -> dict[int, list[int]]:
    """No draft, one or two of each row: the next tokens of its text; every other row's second one is wrong."""
    ends = {row: len(rows.texts[row]) for row in chosen}
    return {
        row: [texts[row][end], texts[row][end + 1] ^ row % 2][: (row + end) % 3] for row, end in ends.items()
    }


def test_recorded_steps_with_drafts_give_the_tokens_of_plain_ones_without(model: DecoderModel) -> None:
    recorder = FakeRecorder()
    recorded, plain = Rows(model, recorder, widths=(1, 3)), Rows(model)
    recorded.record()
    for rows in (recorded, plain):
        for row in range(MAX_ROWS):
            rows.add(row, make_prompt(5 + row, row))
    for _ in range(50):
        plain.step(list(range(MAX_ROWS)))
    for number in range(15):
        chosen = random.Random(number).sample(range(MAX_ROWS), number % MAX_ROWS + 1)
        drafts = make_drafts(recorded, plain.texts, chosen)
        recorded.step(chosen, drafts)
        num_wrong = sum(row % 2 and len(drafts[row]) == 2 for row in chosen)
        assert len(recorded.tokens[-1]) == len(chosen) + sum(map(len, drafts.values())) - num_wrong
    assert all(text == plain.texts[row][: len(text)] for row, text in recorded.texts.items())
    assert (recorder.num_recorded, recorder.num_replayed) == (2 * len(list_padded_sizes(MAX_ROWS)), 15)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_a_replay_without_padding_gives_the_bits_of_an_eager_step(
    model: DecoderModel, num_rows: int, width: int
) -> None:
    recorder = FakeRecorder()
    recorded, plain = Rows(model, recorder, widths=(1, 3)), Rows(model)
    recorded.record()
    chosen = list(range(num_rows))
    for rows in (recorded, plain):
        for row in chosen:
            rows.add(row, make_prompt(9 + 5 * row, row))
        rows.step(chosen, {row: [7, row][: width - 1] for row in chosen})
    assert recorder.num_replayed == 1
    assert torch.equal(recorded.hidden, plain.hidden)
    for ours, theirs in zip(recorded.caches, plain.caches, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one[1:], other[1:], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_drafts", "is_replayed"), [([2, 2], True), ([0, 0], True), ([2, 0], True), ([1, 1], True), ([3, 0], False)]
)
def test_steps_whose_rows_have_no_more_tokens_than_recorded_are_replayed(
    model: DecoderModel, num_drafts: list[int], is_replayed: bool
) -> None:
    recorder = FakeRecorder()
    rows = Rows(model, recorder, widths=(1, 3))
    rows.record()
    for row in (0, 1):
        rows.add(row, make_prompt(9, row))
    rows.step([0, 1], {row: [7] * count for row, count in enumerate(num_drafts)})
    assert recorder.num_replayed == is_replayed


def test_recorded_steps_with_adapters_give_the_tokens_of_plain_ones(tmp_path: Path) -> None:
    """There are three adapters, and two in a step at most, so that they change their numbers."""
    model = load(tmp_path, "qwen3")
    model.ops = replace(model.ops, lora_tables=FakeTables())
    adapters = {str(seed): make_adapter(model, seed) for seed in (1, 2, 3)}
    recorder = FakeRecorder()
    recorded, plain = Rows(model, recorder, adapters=adapters), Rows(model, adapters=adapters)
    recorded.record()
    for rows in (recorded, plain):
        for row in range(MAX_ROWS):
            rows.add(row, make_prompt(5 + row, row))
        for number in range(30):
            rows.step([row for row in range(MAX_ROWS) if row % 4 != number % 5 and row % 4 != 1 + number % 3])
    assert recorded.tokens == plain.tokens
    assert (recorder.num_recorded, recorder.num_replayed) == (2 * len(list_padded_sizes(MAX_ROWS)), 30)
    base = Rows(model)
    base.add(1, make_prompt(6, 1))
    base.step([1])
    assert base.texts[1] != plain.texts[1][:1], "an adapter changes the text"


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_recorded_steps_of_a_model_with_states_give_the_tokens_of_plain_ones(tmp_path: Path, family: str) -> None:
    recorder = FakeRecorder()
    model = load(tmp_path, family)
    recorded, plain = Rows(model, recorder), Rows(model)
    recorded.record()
    assert play(recorded, 40) == play(plain, 40)
    assert recorder.num_replayed == 40


def test_a_short_context_replays_a_recording_for_short_ones(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds of a recording are those of its contexts, whatever the steps that it serves."""
    monkeypatch.setattr("engine.worker.decode_graphs.SHORT_CONTEXTS", (16, 2**20))
    bounds: list[int] = []
    plan = {"make_plan": lambda *given: bounds.append(max(given[4]))}
    monkeypatch.setattr(model, "ops", replace(model.ops, **plan))
    rows = Rows(model, FakeRecorder())
    rows.record()
    rows.add(0, make_prompt(14))
    bounds.clear()
    for _ in range(4):
        rows.step([0])
    assert bounds == [16, 16, MAX_LEN, MAX_LEN]


def test_recording_between_steps_changes_no_token(model: DecoderModel) -> None:
    """The largest size comes first: once it is there, it serves every step."""
    recorder = FakeRecorder()
    recorded, plain = Rows(model, recorder), Rows(model)
    for rows in (recorded, plain):
        for row in (0, 1, 2):
            rows.add(row, make_prompt(9, row))
        for _ in range(5):
            rows.step([0, 1, 2])
            rows.record(1)
    assert recorded.tokens == plain.tokens
    assert (recorder.num_recorded, recorder.num_replayed) == (5, 4)


def test_recording_writes_only_into_the_null_block(model: DecoderModel) -> None:
    """The blocks of the step before may belong to another request by now."""
    rows = Rows(model, FakeRecorder())
    rows.record(1)
    rows.add(0, make_prompt(9))
    rows.step([0])
    for cache in (each for pair in rows.caches for each in pair):
        cache.fill_(7)
    rows.record()
    assert all((cache[1:] == 7).all() and (cache[0, 0] != 7).any() for pair in rows.caches for cache in pair)


def test_the_first_recording_compiles_all_kernels(model: DecoderModel) -> None:
    recorder = FakeRecorder()
    rows = Rows(model, recorder)
    while rows.graphs.is_cold:
        rows.graphs.record_next()
    assert recorder.num_recorded == 1
    assert rows.graphs.has_more


def test_a_prompt_is_never_replayed(model: DecoderModel) -> None:
    recorder = FakeRecorder()
    rows = Rows(model, recorder)
    rows.record()
    rows.add(0, make_prompt(2))
    assert recorder.num_replayed == 0
    rows.add(1, make_prompt(1))
    assert recorder.num_replayed == 1, "one token is a decode step, whoever sent it"


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TritonError("out of memory")])
def test_a_device_that_refuses_to_record_keeps_what_it_has(
    model: DecoderModel, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    recorder = FakeRecorder(fails_from=3, error=error)
    rows = Rows(model, recorder)
    rows.record()
    assert (rows.graphs.num_recorded, rows.graphs.has_more, rows.graphs.is_cold) == (2, False, False)
    assert "recording failed: out of memory" in caplog.text
    assert play(rows, 10) == play(Rows(model), 10)


def fill(buffers: DecodeBuffers, counts: list[int]) -> ModelInput:
    """Make the input of a step whose rows have so many tokens, behind 5 others."""
    batch = InputBatch(MAX_ROWS, MAX_LEN, BLOCK, CPU, gather=gather_inputs)
    rows, starts = np.arange(len(counts)), np.full(len(counts), 5)
    batch.apply(make_plan(new=[make_new_row(row, range(90), range(1 + 2 * row, 3 + 2 * row)) for row in rows.tolist()]))
    step = batch.make_input(rows, starts, np.array(counts), buffers)
    assert step.is_placed
    return step


def read(buffers: DecodeBuffers, num_rows: int, num_tokens: int) -> list[list[int]]:
    """Return ids, slots and bounds."""
    step = buffers.view(Recording(num_tokens, MAX_LEN, num_rows))
    metadata = step.attn_metadata
    assert torch.equal(step.input_ids, step.positions)
    return [each.tolist() for each in (step.input_ids, metadata.slot_mapping[0], metadata.query_start_loc)]


def test_tokens_of_a_larger_step_before_pad_again() -> None:
    buffers = DecodeBuffers(8, 8, MAX_LEN, BLOCK, 1, CPU)
    fill(buffers, [1] * 6)
    fill(buffers, [1] * 2)
    pads = [0] * 6
    assert read(buffers, 8, 8) == [[5, 5, *pads], [13, 29, *pads], [0, 1, *[2] * 7]]
    buffers.clear()
    assert read(buffers, 8, 8) == [[0] * 8, [0] * 8, [0] * 9]


def test_rows_of_different_lengths_lie_one_after_the_other() -> None:
    buffers = DecodeBuffers(4, 12, MAX_LEN, BLOCK, 1, CPU, max_query_len=3)
    fill(buffers, [3, 3, 3])
    fill(buffers, [1, 3])
    pads = [0] * 4
    assert read(buffers, 4, 8) == [[5, 5, 6, 7, *pads], [13, 29, 30, 31, *pads], [0, 1, 4, 4, 4]]


def test_positions_that_images_shift_reach_the_recording() -> None:
    buffers = DecodeBuffers(4, 4, MAX_LEN, BLOCK, 1, CPU)
    step = fill(buffers, [1, 1])
    buffers.fill(replace(step, positions=step.positions + torch.tensor([7, 0])))
    assert buffers.view(Recording(4, MAX_LEN, 4)).positions.tolist() == [12, 5, 0, 0]
