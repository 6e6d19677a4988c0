"""InputBatch against a slow reference, assembled by the host and gathered on the device.

The groups: which rows share a prefix, whether sharing pays off, and that the search is not repeated.
"""

import random

import numpy as np
import pytest
import torch

from engine.core.actor_messages import NewRow
from engine.worker.input_batch import InputBatch
from tests.engine.worker.plans import make_new_row, make_plan
from tests.kernels import reference

MAX_MODEL_LEN = 32
BLOCK, MAX_LEN, MAX_ROWS = 4, 80, 24
# Bytes of one token's keys and values; 8 keys are the shortest prefix here, 30 keys must be spared, of 2 rows or more.
KEY_BYTES, MIN_KEYS, MIN_BYTES, MIN_ROWS = 2, 8, 60, 2
GATHERS = (None, reference.gather_inputs)


@pytest.fixture(params=[False, True], ids=["assembled", "gathered"])
def batch(request: pytest.FixtureRequest) -> InputBatch:
    """Four rows of blocks of four tokens, for both ways to make a step's inputs."""
    return InputBatch(4, MAX_MODEL_LEN, 4, torch.device("cpu"), gather=GATHERS[request.param])


def apply(batch: InputBatch, *new: NewRow, new_blocks: list[tuple[int, list[int]]] | None = None) -> None:
    batch.apply(make_plan(new=new, new_blocks=new_blocks or []))


def as_array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_runs_is_flattened_as_by_the_reference(block_size: int, seed: int, is_gathered: bool) -> None:
    chance = random.Random(seed)
    batch = InputBatch(6, MAX_MODEL_LEN, block_size, torch.device("cpu"), gather=GATHERS[is_gathered])
    free = chance.sample(range(1, 500), 6 * -(-MAX_MODEL_LEN // block_size))
    texts = [[chance.randrange(1000) for _ in range(chance.randrange(2, MAX_MODEL_LEN))] for _ in range(6)]
    tables = [[free.pop() for _ in range(-(-len(text) // block_size))] for text in texts]
    apply(batch, *(make_new_row(row, texts[row], tables[row]) for row in range(6)))
    picked = chance.sample(range(6), 4)
    spans = [sorted(chance.sample(range(len(texts[row]) + 1), 2)) for row in picked]
    starts, ends = as_array(*(span[0] for span in spans)), as_array(*(span[1] for span in spans))
    made = batch.make_input(as_array(*picked), starts, ends - starts)
    walk = [(row, at) for row, (start, end) in zip(picked, spans, strict=True) for at in range(start, end)]
    assert made.input_ids.tolist() == [texts[row][at] for row, at in walk]
    assert made.positions.tolist() == [at for _, at in walk]
    slots = [tables[row][at // block_size] * block_size + at % block_size for row, at in walk]
    assert made.attn_metadata.slot_mapping.tolist() == [slots]


def test_lengths_and_borders_describe_the_runs(batch: InputBatch) -> None:
    apply(batch, make_new_row(2, range(9), [5, 6, 7]), make_new_row(0, [1, 2], [8]))
    made = batch.make_input(as_array(2, 0), as_array(3, 1), as_array(6, 1))
    metadata = made.attn_metadata
    assert metadata.query_start_loc.tolist() == [0, 6, 7]
    assert metadata.seq_lens.tolist() == metadata.seq_lens_list == [9, 2]
    assert metadata.query_lens_list == [6, 1]
    assert made.last_token_index.tolist() == [5, 6]
    assert metadata.block_tables.tolist() == [[[5, 6, 7], [8, 0, 0]]], "padded with the null block"


def test_new_blocks_are_appended(batch: InputBatch) -> None:
    apply(batch, make_new_row(0, [1, 2, 3], [5]))
    apply(batch, new_blocks=[(0, [9]), (0, [4, 6])])
    batch.append(as_array(0), as_array(3), torch.tensor([4]))
    made = batch.make_input(as_array(0), as_array(12), as_array(1))
    assert made.attn_metadata.block_tables.tolist() == [[[5, 9, 4, 6]]]
    assert made.attn_metadata.slot_mapping.tolist() == [[6 * 4]]


@pytest.mark.parametrize("is_gathered", [False, True])
def test_each_group_of_layers_has_its_own_table(is_gathered: bool) -> None:
    batch = InputBatch(4, MAX_MODEL_LEN, 4, torch.device("cpu"), num_groups=2, gather=GATHERS[is_gathered])
    apply(batch, make_new_row(0, range(5), [5, 6, 7, 8]), make_new_row(2, [7], [9, 10]))
    apply(batch, new_blocks=[(0, [11, 12])])
    metadata = batch.make_input(as_array(2, 0), as_array(0, 3), as_array(1, 6)).attn_metadata
    assert metadata.block_tables.tolist() == [[[9, 0, 0], [5, 7, 11]], [[10, 0, 0], [6, 8, 12]]]
    assert metadata.slot_mapping.tolist() == [[36, 23, 28, 29, 30, 31, 44], [40, 27, 32, 33, 34, 35, 48]]
    assert batch.list_slots(0, 3, 5).tolist() == [23, 28]
    first = metadata.use_first_group(2)
    assert first.slot_mapping.tolist() == [metadata.slot_mapping[0].tolist()] * 2


def test_a_sampled_token_is_the_next_input_and_a_harmless_zero_where_there_was_none(batch: InputBatch) -> None:
    apply(batch, make_new_row(0, [1, 2], [5]), make_new_row(3, [7], [6]), make_new_row(1, [8], [7]))
    batch.append(as_array(3, 0, 1), as_array(1, 2, 1), torch.tensor([70, 20, -1]))
    made = batch.make_input(as_array(0, 3, 1), as_array(2, 1, 1), as_array(1, 1, 1))
    assert made.input_ids.tolist() == [20, 70, 0]


def test_drafts_are_written_behind_the_known_tokens(batch: InputBatch) -> None:
    """Row 1 computes a chunk of its prompt, row 3 has a known token only."""
    new = [make_new_row(0, [1, 2], [5, 6]), make_new_row(1, range(9), [7, 8, 9]), make_new_row(3, [7], [10])]
    runs = [(1, 0, 4), (3, 0, 3), (0, 1, 2)]
    batch.apply(make_plan(runs, new=new, unsampled=[1], drafts={3: [70, 71], 0: [20]}))
    made = batch.make_input(*np.array(runs).T)
    assert made.input_ids.tolist() == [0, 1, 2, 3, 7, 70, 71, 2, 20]
    assert batch.token_ids(1, 0, 9).tolist() == list(range(9))


def test_the_last_token_of_a_full_row_does_not_reach_the_next_row(batch: InputBatch) -> None:
    full = list(range(100, 100 + MAX_MODEL_LEN))
    apply(batch, make_new_row(0, full, range(1, 9)), make_new_row(1, [7], [9]))
    batch.append(as_array(0), as_array(MAX_MODEL_LEN), torch.tensor([5]))
    assert batch.token_ids(0, 0, MAX_MODEL_LEN + 1).tolist() == [*full, 5]
    assert batch.token_ids(1, 0, 1).tolist() == [7]


def test_a_row_taken_over_holds_nothing_of_the_one_before(batch: InputBatch) -> None:
    apply(batch, make_new_row(0, range(9), [5, 6, 7]))
    apply(batch, make_new_row(0, [1, 2], [8]), new_blocks=[(0, [3])])
    made = batch.make_input(as_array(0), as_array(0), as_array(2))
    assert made.attn_metadata.block_tables.tolist() == [[[8]]]
    assert batch.make_input(as_array(0), as_array(4), as_array(1)).attn_metadata.slot_mapping.tolist() == [[12]]
