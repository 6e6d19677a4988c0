"""InputBatch against a slow reference, assembled by the host and gathered on the device; and its PrefixGroups.

The groups: which rows share a prefix, whether sharing pays off, and that the search is not repeated.
"""

import random

import numpy as np
import pytest
import torch

from engine.messages import NewRow
from engine.worker.input_batch import InputBatch
from engine.worker.prefix_groups import MIN_SAVED_BYTES, MIN_SHARED_KEYS, PrefixGroups
from kernels.shared_prefixes import MAX_GROUPS, SharedPrefixes
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
def test_any_mix_of_runs_is_flattened_as_by_the_reference(
    block_size: int, seed: int, is_gathered: bool
) -> None:
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
    assert metadata.slot_mapping.tolist() == [
        [36, 23, 28, 29, 30, 31, 44],
        [40, 27, 32, 33, 34, 35, 48],
    ]
    assert batch.list_slots(0, 3, 5).tolist() == [23, 28]
    first = metadata.use_first_group(2)
    assert first.slot_mapping.tolist() == [metadata.slot_mapping[0].tolist()] * 2


def test_a_sampled_token_is_the_next_input_and_a_harmless_zero_where_there_was_none(
    batch: InputBatch,
) -> None:
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
    assert batch.make_input(as_array(0), as_array(4), as_array(1)).attn_metadata.slot_mapping.tolist() == [
        [12]
    ]


def make_batch(tables: list[list[int]]) -> InputBatch:
    batch = InputBatch(MAX_ROWS, MAX_LEN, BLOCK, torch.device("cpu"))
    add_rows(batch, dict(enumerate(tables)))
    return batch


def make_family(num_rows: int, num_shared: int) -> InputBatch:
    """Rows that share their first blocks, and have one more of their own."""
    return make_batch([[*range(1, 1 + num_shared), 20 + row] for row in range(num_rows)])


def add_rows(batch: InputBatch, tables: dict[int, list[int]]) -> None:
    batch.apply(make_plan(new=[make_new_row(row, [1] * 3, ids) for row, ids in tables.items()]))


def find(batch: InputBatch, num_rows: int, start: int = 18, **options: int) -> list[tuple[list[int], int]]:
    sizes = {"min_keys": MIN_KEYS, "min_bytes": MIN_BYTES, "min_rows": MIN_ROWS} | options
    rows = np.arange(num_rows)
    found = PrefixGroups(batch, KEY_BYTES, **sizes).find(rows, np.full(num_rows, start), rows)
    return [(list(members), shared_len) for members, shared_len in found]


def mark(groups: PrefixGroups, batch: InputBatch, rows: list[int], *lens: int) -> SharedPrefixes | None:
    run = np.array(rows), np.full(len(rows), 18), np.array(lens or [1] * len(rows))
    return groups.mark(batch.make_input(*run), *run).attn_metadata.shared


def make_groups(batch: InputBatch) -> PrefixGroups:
    return PrefixGroups(batch, KEY_BYTES, MIN_KEYS, MIN_BYTES, MIN_ROWS)


SHARED = [[1, 2, 3, 4, 9], [1, 2, 3, 4, 10], [11, 12, 13, 14, 15], [1, 2, 3, 16, 17]]


def test_a_group_shares_what_all_its_members_share() -> None:
    assert find(make_batch(SHARED), 4, min_bytes=48) == [([0, 1, 3], 12)]


def test_a_prefix_shorter_than_the_minimum_is_none() -> None:
    batch = make_batch([[1, 2 + row, 30 + row, 60 + row] for row in range(8)])
    assert find(batch, 8, start=14) == []


def test_sharing_that_spares_too_little_is_left() -> None:
    batch = make_family(5, 2)
    assert find(batch, 5, start=10) == [(list(range(5)), 8)], "four times eight keys are enough"
    assert find(batch, 4, start=10) == []


def test_a_step_of_few_rows_is_not_looked_at() -> None:
    batch = make_family(8, 4)
    assert find(batch, 8, min_rows=8) == [(list(range(8)), 16)]
    assert find(batch, 7, min_rows=8) == []


def test_keys_that_are_not_written_yet_are_not_shared() -> None:
    batch = make_family(6, 5)
    assert find(batch, 6, start=13) == [(list(range(6)), 12)]
    assert find(batch, 6, start=7) == []


@pytest.mark.parametrize(("members_per_read", "is_worth_it"), [(8, True), (2, True), (1, False)])
def test_sharing_spares_only_what_one_read_serves(members_per_read: int, is_worth_it: bool) -> None:
    """Four members of 12 keys: read once instead of 4 times, or twice; or 4 times after all."""
    found = find(make_family(4, 3), 4, min_bytes=24 * KEY_BYTES, members_per_read=members_per_read)
    assert bool(found) is is_worth_it


def test_there_is_a_limit_of_groups_and_the_largest_are_taken() -> None:
    tables = [[100 * group, 100 * group + 1, 10 + row] for group in range(1, 10) for row in range(2)]
    batch = make_batch([*tables, [900, 901, 990], [900, 901, 991]])
    found = find(batch, 20, start=10)
    assert len(found) == MAX_GROUPS
    assert found[0] == ([16, 17, 18, 19], 8)


def test_only_requests_with_one_new_token_are_members() -> None:
    batch = make_family(5, 4)
    shared = mark(make_groups(batch), batch, [4, 3, 2, 1, 0], 1, 1, 2, 1, 1)
    assert shared is not None
    assert shared.leaders[:5].tolist() == [0, 0, -1, 0, 0]
    assert shared.shared_lens[:5].tolist() == [16, 16, 0, 16, 16]
    assert shared.members[:4].tolist() == [0, 1, 3, 4] and shared.group_start[:2].tolist() == [0, 4]


def test_a_step_with_the_same_rows_reuses_its_groups() -> None:
    batch = make_family(6, 4)
    groups = make_groups(batch)
    first = mark(groups, batch, [0, 1, 2, 3, 4])
    assert first is not None
    assert mark(groups, batch, [0, 1, 2, 3, 4]) is first
    assert mark(groups, batch, [0, 1, 2, 3, 5]) is not first
    add_rows(batch, {1: [61, 62, 63, 64, 65]})
    changed = mark(groups, batch, [0, 1, 2, 3, 5])
    assert changed is not None and changed.leaders[:5].tolist() == [0, -1, 0, 0, 0]


def test_steps_without_groups_stay_as_they_are() -> None:
    batch = make_batch([list(range(10 * row + 1, 10 * row + 6)) for row in range(6)])
    assert mark(make_groups(batch), batch, list(range(6))) is None


@pytest.mark.parametrize(("num_rows", "is_worth_it"), [(2, False), (16, False), (17, True)])
def test_the_rule_for_a_real_shape(num_rows: int, is_worth_it: bool) -> None:
    """512 keys of 4 KiB are 2 MiB: sixteen rows must be spared to make 32 MiB, and one reads them."""
    batch = InputBatch(32, 1024, 16, torch.device("cpu"))
    prefix = list(range(1, 1 + MIN_SHARED_KEYS // 16))
    add_rows(batch, {row: [*prefix, 100 + row] for row in range(num_rows)})
    key_bytes = 2 * 8 * 128 * 2
    assert MIN_SAVED_BYTES // key_bytes == 16 * MIN_SHARED_KEYS
    rows = np.arange(num_rows)
    found = PrefixGroups(batch, key_bytes).find(rows, np.full(num_rows, 520), rows)
    assert bool(found) is is_worth_it


def test_the_size_of_a_key_is_read_off_the_cache() -> None:
    batch = make_batch(SHARED)
    cache = torch.zeros(3, BLOCK, 2, 8)
    groups = PrefixGroups.of_cache(batch, (cache, cache.half()), num_heads=8)
    assert groups._min_saved_keys == MIN_SAVED_BYTES // (16 * 6) + 1
    assert groups._members_per_read == 16 // 4
    assert PrefixGroups.of_cache(batch, (cache, cache), num_heads=64)._members_per_read == 1
    assert mark(groups, batch, [0, 1]) is None
