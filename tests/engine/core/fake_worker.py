"""A worker without a model: its next token is a hash of the whole context, read back through the block tables.

So any block that is shared wrongly, freed too early or not written shows as a wrong token.
"""

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.actor_messages import StepDone, StepMasks, StepPlan
from engine.core.request import Request
from engine.outputs import Logprob, TokenLogprobs

VOCAB = 97
EOS = 96


def next_token(context: Sequence[int]) -> int:
    """The fake model: deterministic, EOS about once in 97 tokens."""
    return zlib.crc32(",".join(map(str, context)).encode()) % VOCAB


def reference_output(
    prompt: Sequence[int], max_tokens: int, max_model_len: int, window: int | None = None
) -> list[int]:
    """The expected output of a request, whatever other requests run."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens[-(window or max_model_len) :]))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class RandomProposer:
    """Drafts the model's next tokens, wrong tokens, or right ones followed by wrong ones."""

    name = "random"

    def __init__(self, chance: random.Random, window: int | None = None) -> None:
        self._chance = chance
        self._window = window

    def propose(self, request: Request, limit: int) -> list[int]:
        num_drafts = self._chance.randrange(min(limit, 6) + 1)
        num_right = self._chance.choice([0, num_drafts, self._chance.randrange(num_drafts + 1)])
        tokens = list(request.token_ids)
        for number in range(num_drafts):
            right = next_token(tokens if self._window is None else tokens[-self._window :])
            wrong = (right + self._chance.randrange(1, VOCAB)) % VOCAB
            tokens.append(right if number < num_right else wrong)
        return tokens[request.num_tokens :]

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def make_array(numbers: Iterable[int]) -> np.ndarray:
    return np.array(list(numbers), dtype=np.int64)


def split_drafts(plan: StepPlan) -> list[list[int]]:
    """The drafts of each row of the step."""
    counts = np.maximum(plan.num_samples - 1, 0)
    assert counts.sum() == len(plan.draft_token_ids)
    return [drafts.tolist() for drafts in np.split(plan.draft_token_ids, np.cumsum(counts)[:-1])]


@dataclass(frozen=True)
class Sample:
    """The tokens that a row of a step sampled: one after its known tokens, and one after each draft."""

    index: int
    row: int
    token_ids: list[int]
    draft_token_ids: list[int]

    @property
    def kept(self) -> list[int]:
        """The tokens that follow right drafts only."""
        count = 1
        while (count <= len(self.draft_token_ids) and self.draft_token_ids[count - 1] == self.token_ids[count - 1]):
            count += 1
        return self.token_ids[:count]


class FakeWorker:
    """Executes plans like the real one, on a dict of slots.

    Args:
        windows: of the groups of layers, the widest first. A next token depends on the first group.
        has_states: whether rows also have a state.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,), has_states: bool = False) -> None:
        self.block_size = block_size
        self.windows = windows
        self.window = windows[0]
        self.kv: dict[int, tuple[int, int]] = {}  # slot -> (group, token)
        self.has_states, self.has_stages = has_states, False
        # A state is the tokens before it: of each row, of each slot, and by row and position those before its drafts.
        self.states: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self.drafted: dict[tuple[int, int], int] = {}
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.parked: dict[int, list[Sample]] = {}  # by step
        self.num_computed_tokens = 0
        self.num_kept_drafts = 0
        self.prompt_ends: dict[int, int] = {}  # of the rows whose prompt is scored
        self.scored_rows: set[int] = set()  # whose tokens come with log-probabilities

    def execute(self, plan: StepPlan) -> StepDone | None:
        parked_rows = {sample.row for samples in self.parked.values() for sample in samples}
        self._apply(plan, parked_rows)
        live = [index for index, row in enumerate(plan.rows.tolist()) if row not in parked_rows]
        skipped = [index for index in range(len(plan.rows)) if index not in live]
        drafts = split_drafts(plan)
        if self.has_states:
            self._advance(plan, live, drafts)
        for index in live:
            self._write(plan, index, drafts[index])
        for index in live:  # a row may read what a later row of this step has written
            self._check_windows(int(plan.rows[index]), int(plan.starts[index]))
        scores = self._score(plan, live)
        samples = [self._sample(plan, index, drafts[index]) for index in live if plan.num_samples[index]]
        plain = [sample for sample in samples if not plan.is_gated[sample.index]]
        gated = [sample for sample in samples if plan.is_gated[sample.index]]
        if gated:
            self.parked[plan.step_id] = gated
            if len(gated) == len(plan.rows) and not scores:
                return None
        return self._answer(plan.step_id, plain, not gated, prompt_logprobs=scores, skipped=skipped)

    def sample_gated(self, masks: StepMasks) -> StepDone | None:
        samples = self.parked.pop(masks.step_id, None)
        if samples is None:
            return None
        counts = dict(zip(masks.indices.tolist(), masks.counts.tolist(), strict=True))
        rest = [sample for sample in samples if sample.index not in (*counts, *masks.ended)]
        if rest:
            self.parked[masks.step_id] = rest
        kept = [sample for sample in samples if sample.index in counts]
        assert all(counts[sample.index] == len(sample.token_ids) for sample in kept), ("a mask for each position")
        return self._answer(masks.step_id, kept, is_last=not rest)

    def _apply(self, plan: StepPlan, parked_rows: set[int]) -> None:
        for row in plan.removed_rows:
            assert row not in parked_rows, "what is parked needs the row's sampling state"
            assert self.has_stages or row in self.tables, "only a pipeline names rows that it has dropped"
            self.tables.pop(row, None)
            self.tokens.pop(row, None)
        for new in plan.new_rows:
            self.tables[new.row], self.tokens[new.row] = list(new.block_ids), new.token_ids.tolist()
            self.states[new.row] = self.kept[new.snapshot] if new.snapshot >= 0 else []
            self.prompt_ends.pop(new.row, None)
            self.scored_rows.discard(new.row)
            if new.params.logprobs is not None:
                self.scored_rows.add(new.row)
            if new.params.prompt_logprobs is not None:
                self.prompt_ends[new.row] = new.num_prompt_tokens
        for row, block_ids in plan.new_blocks:
            self.tables[row] += block_ids

    def _advance(self, plan: StepPlan, live: list[int], drafts: list[list[int]]) -> None:
        """Run the states through the step's tokens, and keep those that are saved."""
        saved = {(save.row, save.position): save.slot for save in plan.saves}
        assert len(set(saved.values())) == len(plan.saves), "two states in one slot"
        for index, (row, start) in enumerate(zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)):
            tokens = self.tokens[row] + drafts[index]
            end = start + int(plan.num_scheduled_tokens[index]) if index in live else start
            assert index not in live or self.states[row] == tokens[:start], "the state of other tokens"
            for position in range(start, max(end, start + 1)):
                if (slot := saved.get((row, position))) is not None:
                    self.kept[slot] = tokens[:position]
                    if position > end - len(drafts[index]) - 1 and drafts[index]:
                        self.drafted[row, position] = slot
            if index in live:
                self.states[row] = tokens[:end]

    def _settle(self, sample: Sample) -> None:
        """Take back the states of rejected drafts."""
        position = len(self.tokens[sample.row]) - 1
        if len(sample.kept) <= len(sample.draft_token_ids):
            self.states[sample.row] = self.kept[self.drafted[sample.row, position]]

    def _answer(self, step_id: int, samples: list[Sample], is_last: bool = True, **more: Any) -> StepDone:
        for sample in samples:
            self.tokens[sample.row] += sample.kept
            self.num_kept_drafts += len(sample.kept) - 1
            if self.has_states:
                self._settle(sample)
        indices = make_array(sample.index for sample in samples)
        counts = make_array(len(sample.kept) for sample in samples)
        token_ids = make_array(token_id for sample in samples for token_id in sample.kept)
        logprobs = {
            sample.index: [TokenLogprobs(Logprob(token_id, 0.0, 1)) for token_id in sample.kept]
            for sample in samples
            if sample.row in self.scored_rows
        }
        return StepDone(step_id, indices, counts, token_ids, is_last, logprobs, **more)

    def _score(self, plan: StepPlan, live: list[int]) -> dict[int, list[TokenLogprobs]]:
        """The tokens that follow each computed prompt token; minus their position stands for the logprob."""
        found = {}
        for index in live:
            row, start = int(plan.rows[index]), int(plan.starts[index])
            end = min(start + int(plan.num_scheduled_tokens[index]), self.prompt_ends.get(row, 0) - 1)
            if end > start:
                places = range(start + 1, end + 1)
                found[index] = [TokenLogprobs(Logprob(self.tokens[row][at], -float(at), 1)) for at in places]
        return found

    def _write(self, plan: StepPlan, index: int, drafts: list[int]) -> None:
        row, start = int(plan.rows[index]), int(plan.starts[index])
        count = int(plan.num_scheduled_tokens[index])
        assert count >= 1, "a run without tokens has nothing to sample from"
        self.num_computed_tokens += count
        tokens = self.tokens[row] + drafts
        for position in range(start, start + count):
            for group in range(len(self.windows)):
                self.kv[self._slot(row, position, group)] = group, tokens[position]

    def _check_windows(self, row: int, start: int) -> None:
        """The first token of a run finds those before it in the cache, also where the last one does not look."""
        for group, window in enumerate(self.windows):
            if window is not None:
                seen = range(max(0, start + 1 - window), start)
                assert self._read(row, seen, group) == [self.tokens[row][at] for at in seen]

    def _sample(self, plan: StepPlan, index: int, drafts: list[int]) -> Sample:
        row = int(plan.rows[index])
        end = int(plan.starts[index] + plan.num_scheduled_tokens[index])
        num_known = end - len(drafts)
        assert num_known == len(self.tokens[row]), "a sampled run must reach the last token"
        token_ids = [next_token(self._read(row, self._list_seen(length), 0)) for length in range(num_known, end + 1)]
        return Sample(index, row, token_ids, drafts)

    def _list_seen(self, end: int) -> range:
        """The positions that the last of `end` tokens attends to."""
        return range(0 if self.window is None else max(0, end - self.window), end)

    def _read(self, row: int, positions: range, group: int) -> list[int]:
        found = [self.kv[self._slot(row, at, group)] for at in positions]
        assert all(owner == group for owner, _ in found), "a block of another group"
        return [token_id for _, token_id in found]

    def _slot(self, row: int, position: int, group: int) -> int:
        block = self.tables[row][position // self.block_size * len(self.windows) + group]
        assert block > 0, "the null block is nobody's"
        return block * self.block_size + position % self.block_size
