"""InputBatch against a slow reference that walks every token; assembled by the host, and gathered on the device."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.messages import NewRow, StepPlan
from engine.sampling_params import SamplingParams
from engine.worker.input_batch import InputBatch

CPU = torch.device("cpu")
MAX_MODEL_LEN = 32
IS_GATHERED = False


@pytest.fixture(params=[False, True], ids=["assembled", "gathered"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test, for both ways to make a step's inputs."""
    monkeypatch.setattr(sys.modules[__name__], "IS_GATHERED", request.param)


@dataclass
class ReferenceRow:
    """What a row holds, in plain lists."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)


def make_batch(num_rows: int = 4, block_size: int = 4) -> InputBatch:
    return InputBatch(num_rows, MAX_MODEL_LEN, block_size, CPU, is_gathered=IS_GATHERED)


def make_new_row(row: int, tokens: list[int], blocks: list[int]) -> NewRow:
    params = SamplingParams()
    return NewRow(row, np.array(tokens, dtype=np.int64), len(tokens), blocks, params, 0, ())


def make_plan(*new_rows: NewRow, new_blocks: list[tuple[int, list[int]]] | None = None) -> StepPlan:
    """Only the changes: InputBatch.apply reads nothing else."""
    nothing = np.zeros(0, dtype=np.int64)
    return StepPlan(
        0, [], list(new_rows), new_blocks or [], nothing, nothing, nothing, nothing > 0, nothing > 0
    )


def as_array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def list_slots(row: ReferenceRow, start: int, end: int, block_size: int) -> list[int]:
    return [row.blocks[i // block_size] * block_size + i % block_size for i in range(start, end)]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_runs_is_flattened_as_the_reference_says(block_size: int, seed: int) -> None:
    chance = random.Random(seed)
    batch = make_batch(6, block_size)
    blocks = chance.sample(range(1, 500), 6 * -(-MAX_MODEL_LEN // block_size))
    rows = {}
    for row in range(6):
        tokens = [chance.randrange(1000) for _ in range(chance.randrange(2, MAX_MODEL_LEN))]
        count = -(-len(tokens) // block_size)
        rows[row] = ReferenceRow(tokens, [blocks.pop() for _ in range(count)])
        batch.apply(make_plan(make_new_row(row, tokens, rows[row].blocks)))
    picked = chance.sample(range(6), 4)
    spans = [sorted(chance.sample(range(len(rows[row].tokens) + 1), 2)) for row in picked]
    starts, ends = as_array(*(span[0] for span in spans)), as_array(*(span[1] for span in spans))
    made = batch.make_input(as_array(*picked), starts, ends - starts)
    walks = [(rows[row], start, end) for row, (start, end) in zip(picked, spans, strict=True)]
    assert made.input_ids.tolist() == [token for row, a, b in walks for token in row.tokens[a:b]]
    assert made.positions.tolist() == [position for _, a, b in walks for position in range(a, b)]
    slots = [slot for row, a, b in walks for slot in list_slots(row, a, b, block_size)]
    assert made.attn_metadata.slot_mapping.tolist() == slots


def test_lengths_and_borders_describe_the_runs() -> None:
    batch = make_batch()
    batch.apply(make_plan(make_new_row(2, list(range(9)), [5, 6, 7]), make_new_row(0, [1, 2], [8])))
    made = batch.make_input(as_array(2, 0), as_array(3, 1), as_array(6, 1))
    metadata = made.attn_metadata
    assert metadata.query_start_loc.tolist() == [0, 6, 7]
    assert metadata.seq_lens.tolist() == metadata.seq_lens_list == [9, 2]
    assert metadata.query_lens_list == [6, 1]
    assert made.last_token_index.tolist() == [5, 6]


def test_block_tables_are_padded_with_the_null_block() -> None:
    batch = make_batch()
    batch.apply(make_plan(make_new_row(0, list(range(9)), [5, 6, 7]), make_new_row(1, [1], [8])))
    made = batch.make_input(as_array(1, 0), as_array(0, 8), as_array(1, 1))
    assert made.attn_metadata.block_tables.tolist() == [[8, 0, 0], [5, 6, 7]]


def test_new_blocks_are_appended() -> None:
    batch = make_batch()
    batch.apply(make_plan(make_new_row(0, [1, 2, 3], [5])))
    batch.apply(make_plan(new_blocks=[(0, [9]), (0, [4, 6])]))
    batch.append(as_array(0), as_array(3), torch.tensor([4]))
    made = batch.make_input(as_array(0), as_array(12), as_array(1))
    assert made.attn_metadata.block_tables.tolist() == [[5, 9, 4, 6]]
    assert made.attn_metadata.slot_mapping.tolist() == [6 * 4]


def test_a_sampled_token_is_the_next_input() -> None:
    batch = make_batch()
    batch.apply(make_plan(make_new_row(0, [1, 2], [5]), make_new_row(3, [7], [6])))
    batch.append(as_array(3, 0), as_array(1, 2), torch.tensor([70, 20]))
    made = batch.make_input(as_array(0, 3), as_array(2, 1), as_array(1, 1))
    assert made.input_ids.tolist() == [20, 70]


def test_a_token_that_could_not_be_sampled_is_a_harmless_zero() -> None:
    batch = make_batch()
    batch.apply(make_plan(make_new_row(0, [1, 2], [5])))
    batch.append(as_array(0), as_array(2), torch.tensor([-1]))
    assert batch.token_ids(0, 0, 3).tolist() == [1, 2, 0]


def test_the_last_token_of_a_full_row_does_not_reach_the_next_row() -> None:
    batch = make_batch()
    full = list(range(100, 100 + MAX_MODEL_LEN))
    batch.apply(make_plan(make_new_row(0, full, list(range(1, 9))), make_new_row(1, [7], [9])))
    batch.append(as_array(0), as_array(MAX_MODEL_LEN), torch.tensor([5]))
    assert batch.token_ids(0, 0, MAX_MODEL_LEN + 1).tolist() == [*full, 5]
    assert batch.token_ids(1, 0, 1).tolist() == [7]


def test_a_row_taken_over_holds_nothing_of_the_one_before() -> None:
    batch = make_batch()
    batch.apply(make_plan(make_new_row(0, list(range(9)), [5, 6, 7])))
    batch.apply(make_plan(make_new_row(0, [1, 2], [8]), new_blocks=[(0, [3])]))
    made = batch.make_input(as_array(0), as_array(0), as_array(2))
    assert made.attn_metadata.block_tables.tolist() == [[8]]
    assert batch.make_input(as_array(0), as_array(4), as_array(1)).attn_metadata.slot_mapping.tolist() == [12]
