"""Drafts: rows that sample several tokens in one step get those that they would have got one at a time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.actor_messages import BROKEN_LOGITS, NO_TOKEN_LEFT
from engine.outputs import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.worker.launched_step import LaunchedStep
from engine.worker.sampling.drafts import SampleRuns, sample_runs
from engine.worker.sampling.sampler import Sampler
from tests.effort import choose_count
from tests.engine.worker.sampler_cases import EOS, Case, make_sampler, pack_mask, read_logprobs, sample

VOCAB = 12
MAX_DRAFTS = 5
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.9, "presence_penalty": 0.5}
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=1.3),
    "filters": SamplingParams(top_k=5, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(**PENALTIES),
    "greedy penalties": SamplingParams(temperature=0, **PENALTIES),
    "bad words": SamplingParams(temperature=1.5, bad_words=("x",)),
    "logprobs": SamplingParams(logprobs=2),
    "logprobs and penalties": SamplingParams(logprobs=1, **PENALTIES),
    "min tokens": SamplingParams(min_tokens=4, logit_bias={EOS: 9.0}),
    "allowed": SamplingParams(allowed_token_ids=(2, 3, 5, 7), logit_bias={3: 1.5}),
}
BAD_WORDS = [[4], [3, 5], [2, 2], [1, 2, 3]]


def make_case(kind: str, seed: int) -> Case:
    params = KINDS[kind]
    return Case(params, seed=seed, output=[seed % 7, 3], bad_words=BAD_WORDS if params.bad_words else ())


def make_runs(cases: Sequence[Case], drafts: Sequence[Sequence[int]], indices: Sequence[int] = ()) -> SampleRuns:
    """Case i is in row i of the state, and stands at `indices[i]` in the step."""
    counts = np.array([1 + len(each) for each in drafts])
    return SampleRuns(
        indices=np.array(indices or range(len(cases))),
        rows=np.arange(len(cases)),
        ends=np.array([case.position for case in cases]) + counts - 1,
        counts=counts,
        draft_token_ids=np.array([token_id for each in drafts for token_id in each], dtype=np.int64),
    )


class Text:
    """A request that is sampled one token at a time: what comes next, at each of the positions ahead."""

    def __init__(self, case: Case, logits_seed: int, masks: np.ndarray | None = None) -> None:
        self.case = case
        self.masks = masks  # [MAX_DRAFTS + 1, V] bool
        self.logits = (torch.randn(MAX_DRAFTS + 1, VOCAB, generator=torch.Generator().manual_seed(logits_seed)) * 2)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        sampler = make_sampler([case], VOCAB)
        for number in range(MAX_DRAFTS + 1):
            mask = None if masks is None else masks[number]
            now = replace(case, output=[*case.output, *self.token_ids], mask=mask)
            sampled = sample(sampler, self.logits[number : number + 1], [now])
            self.logprobs += read_logprobs(sampled).values()
            if (token_id := int(sampled.token_ids[0])) < 0:
                break
            self.token_ids.append(token_id)

    def make_drafts(self, num_drafts: int, num_right: int) -> list[int]:
        """The first ones are right, the others are wrong."""
        whole = [*self.token_ids, *[0] * MAX_DRAFTS]
        return [token if at < num_right else (token + 1) % VOCAB for at, token in enumerate(whole[:num_drafts])]


def answer(sampler: Sampler, texts: Sequence[Text], drafts: Sequence[Sequence[int]]) -> LaunchedStep:
    """Sample a step of these rows, whose drafts are read in the same order."""
    runs = make_runs([text.case for text in texts], drafts)
    logits = torch.cat([text.logits[: 1 + len(each)] for text, each in zip(texts, drafts, strict=True)])
    masks = [
        pack_mask(mask)
        for text, each in zip(texts, drafts, strict=True)
        if text.masks is not None
        for mask in text.masks[: 1 + len(each)]
    ]
    sampled = sample_runs(sampler, runs, logits, np.stack(masks) if masks else None)
    return LaunchedStep(0, runs=runs, sampled=sampled)


def check(texts: Sequence[Text], plans: Sequence[tuple[int, int]]) -> None:
    """`plans` are (drafts, right ones) of each row."""
    drafts = [text.make_drafts(*plan) for text, plan in zip(texts, plans, strict=True)]
    sampler = make_sampler([text.case for text in texts], VOCAB)
    step = answer(sampler, texts, drafts)
    done = step.finish([tensor.numpy() for tensor in step.list_tensors()])
    ends = np.cumsum(done.counts)
    for index, (text, (num_drafts, num_right)) in enumerate(zip(texts, plans, strict=True)):
        count = 1 + min(num_drafts, num_right)
        got = done.token_ids[ends[index] - done.counts[index] : ends[index]].tolist()
        assert got == text.token_ids[:count]
        wants_logprobs = text.case.params.logprobs is not None
        assert done.logprobs.get(index, []) == (text.logprobs[:count] if wants_logprobs else [])
    check_histories(sampler, texts, [1 + min(plan) for plan in plans])


def check_histories(sampler: Sampler, texts: Sequence[Text], counts: Sequence[int]) -> None:
    """Penalties and bad words have followed the tokens that count, and no others: the next token is right, too."""
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        output = [*text.case.output, *text.token_ids[:count]]
        flat = torch.zeros(1, VOCAB)
        position = np.array([len(text.case.prompt) + len(output)])
        resumed = make_sampler([replace(text.case, output=output)], VOCAB)
        edited = flat.clone()
        resumed.sample(edited, np.zeros(1, np.int64), position)
        kept = flat.clone()
        sampler.sample(kept, np.array([row]), position)
        assert torch.equal(kept, edited)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_sampled_one_at_a_time(kind: str, is_masked: bool) -> None:
    """Each position has a mask of its own; tokens 5 and 6 are in every one, and no kind forbids both."""
    chance = np.random.default_rng(0)
    for seed in range(choose_count(4, 12)):
        masks = chance.random((MAX_DRAFTS + 1, VOCAB)) < 0.5
        masks[:, [5, 6]] = True
        text = Text(make_case(kind, seed), seed, masks if is_masked else None)
        for num_right in range(MAX_DRAFTS + 1):
            check([text], [(MAX_DRAFTS, num_right)])


ROWS = st.tuples(
    st.sampled_from(list(KINDS)), st.integers(0, 99), st.integers(0, MAX_DRAFTS), st.integers(0, MAX_DRAFTS)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=6), st.booleans())
def test_any_rows_side_by_side_sample_as_each_alone(rows: list[tuple[str, int, int, int]], is_gated: bool) -> None:
    masks = None
    if is_gated:
        masks = np.random.default_rng(1).random((MAX_DRAFTS + 1, VOCAB)) < 0.6
        masks[:, [5, 6]] = True
    texts = [Text(make_case(kind, seed), seed, masks) for kind, seed, *_ in rows]
    check(texts, [(num_drafts, num_right) for *_, num_drafts, num_right in rows])


@pytest.mark.parametrize("kind", ["seeded", "penalties"])
@pytest.mark.parametrize("broken_at", [0, 2])
def test_a_position_without_a_token_ends_what_counts(kind: str, broken_at: int) -> None:
    """Whatever stands behind it, and be it drafted right."""
    text, other = Text(make_case(kind, 3), 3), Text(make_case(kind, 4), 4)
    text.logits[broken_at] = torch.nan
    drafts = [text.make_drafts(MAX_DRAFTS, MAX_DRAFTS), other.make_drafts(2, 2)]
    step = answer(make_sampler([text.case, other.case], VOCAB), [text, other], drafts)
    done = step.finish([tensor.numpy() for tensor in step.list_tensors()])
    assert done.counts.tolist() == [broken_at + 1, 3]
    assert done.token_ids.tolist() == [*text.token_ids[:broken_at], BROKEN_LOGITS, *other.token_ids[:3]]


@pytest.mark.parametrize("kind", ["seeded", "penalties"])
def test_a_mask_that_allows_nothing_ends_what_counts(kind: str) -> None:
    """A grammar fills no mask behind a draft that it forbids, and behind one that ends the text only its end."""
    masks = np.ones((MAX_DRAFTS + 1, VOCAB), dtype=bool)
    masks[2] = False
    text = Text(make_case(kind, 3), 3, masks)
    step = answer(make_sampler([text.case], VOCAB), [text], [text.make_drafts(MAX_DRAFTS, MAX_DRAFTS)])
    done = step.finish([tensor.numpy() for tensor in step.list_tensors()])
    assert done.token_ids.tolist() == [*text.token_ids[:2], NO_TOKEN_LEFT]


def verify_slowly(
    counts: Sequence[int], drafts: Sequence[int], token_ids: Sequence[int]
) -> tuple[list[int], list[bool]]:
    """`SampleRuns.verify` as a loop."""
    kept, is_kept = [], []
    rest, tokens = iter(drafts), iter(token_ids)
    for count in counts:
        is_right = [True]
        for token_id in islice(tokens, count - 1):
            is_right.append((next(rest) == token_id) and is_right[-1])
        next(tokens)  # no draft stands behind the last one
        kept.append(sum(is_right))
        is_kept += is_right
    return kept, is_kept


@given(st.data())
def test_verify_spread_and_select_do_what_a_loop_does(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    num_positions, num_rows = sum(counts), len(counts)
    token_ids = data.draw(st.lists(st.integers(-2, 2), min_size=num_positions, max_size=num_positions))
    drafts = data.draw(
        st.lists(st.integers(0, 2), min_size=num_positions - num_rows, max_size=num_positions - num_rows)
    )
    ends = data.draw(st.lists(st.integers(10, 50), min_size=num_rows, max_size=num_rows))
    indices, rows = np.arange(num_rows) * 2 + 1, np.arange(num_rows)[::-1].copy()
    runs = SampleRuns(indices, rows, np.array(ends), np.array(counts), np.array(drafts, dtype=np.int64))
    walk = [(row, at) for row, count in enumerate(counts) for at in range(count)]

    assert runs.flat_rows.tolist() == [rows[row] for row, _ in walk]
    assert runs.positions.tolist() == [ends[row] - counts[row] + 1 + at for row, at in walk]
    assert [runs.index_of(place) for place in range(num_positions)] == [indices[row] for row, _ in walk]
    kept, is_kept = runs.verify(np.array(token_ids))
    assert (kept.tolist(), is_kept.tolist()) == verify_slowly(counts, drafts, token_ids)

    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)))
    part = runs.select(chosen)
    assert part.indices.tolist() == indices[chosen].tolist()
    part_kept, _ = part.verify(np.array(token_ids)[np.repeat(chosen, counts)])
    assert part_kept.tolist() == kept[chosen].tolist()
