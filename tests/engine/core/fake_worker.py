"""A worker without a model: its next token is a hash of the whole context, read back through the block tables.

So any block that is shared wrongly, freed too early or not written shows as a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from engine.messages import SampleGate, StepDone, StepPlan
from engine.outputs import Logprob, TokenLogprobs

VOCAB = 97
EOS = 96


def next_token(context: Sequence[int]) -> int:
    """The fake model: deterministic, EOS about once in 97 tokens."""
    return zlib.crc32(",".join(map(str, context)).encode()) % VOCAB


def reference_output(
    prompt: Sequence[int], max_tokens: int, max_model_len: int, window: int | None = None
) -> list[int]:
    """What a request must produce, whatever happens around it."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens[-(window or max_model_len) :]))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class FakeWorker:
    """Executes plans like the real one, on a dict of slots."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.kv: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.parked: dict[int, list[tuple[int, int, int]]] = {}  # step -> (index, row, sampled token)
        self.num_computed_tokens = 0
        self.prompt_ends: dict[int, int] = {}  # of the rows whose prompt is scored

    def execute(self, plan: StepPlan) -> StepDone | None:
        for new in plan.new_rows:
            self.tables[new.row], self.tokens[new.row] = list(new.block_ids), new.token_ids.tolist()
            self.prompt_ends.pop(new.row, None)
            if new.params.prompt_logprobs is not None:
                self.prompt_ends[new.row] = new.num_prompt_tokens
        for row, block_ids in plan.new_blocks:
            self.tables[row] += block_ids
        parked_rows = {row for entries in self.parked.values() for _, row, _ in entries}
        live = [index for index, row in enumerate(plan.rows.tolist()) if row not in parked_rows]
        skipped = tuple(index for index in range(len(plan.rows)) if index not in live)
        for index in live:
            self._write(int(plan.rows[index]), int(plan.starts[index]), int(plan.num_scheduled_tokens[index]))
        scores = self._score(plan, live)
        sampled = [(index, int(plan.rows[index])) for index in live if plan.is_sampled[index]]
        choices = {index: self._sample(row, plan, index) for index, row in sampled}
        gated = [(index, row, choices[index]) for index, row in sampled if plan.is_gated[index]]
        plain = [(index, row) for index, row in sampled if not plan.is_gated[index]]
        for index, row in plain:
            self.tokens[row].append(choices[index])
        if gated:
            self.parked[plan.step_id] = gated
            if len(gated) == len(plan.rows) and not scores:
                return None
        indices = [index for index, _ in plain]
        tokens = [choices[index] for index in indices]
        return StepDone(plan.step_id, indices, tokens, not gated, {}, scores, skipped)

    def sample_gated(self, gate: SampleGate) -> StepDone | None:
        entries = self.parked.pop(gate.step_id, None)
        if entries is None:
            return None
        allowed = set(gate.indices.tolist())
        kept = [(index, row, token) for index, row, token in entries if index in allowed]
        for _, row, token in kept:
            self.tokens[row].append(token)
        return StepDone(gate.step_id, [index for index, _, _ in kept], [token for *_, token in kept], True)

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

    def _write(self, row: int, start: int, count: int) -> None:
        assert count >= 1, "a run without tokens has nothing to sample from"
        self.num_computed_tokens += count
        if self.window is not None:
            seen = range(max(0, start + 1 - self.window), start)
            assert [self.kv[self._slot(row, at)] for at in seen] == [self.tokens[row][at] for at in seen]
        for position in range(start, start + count):
            self.kv[self._slot(row, position)] = self.tokens[row][position]

    def _sample(self, row: int, plan: StepPlan, index: int) -> int:
        end = int(plan.starts[index] + plan.num_scheduled_tokens[index])
        assert end == len(self.tokens[row]), "a sampled run must reach the last token"
        start = 0 if self.window is None else max(0, end - self.window)
        return next_token([self.kv[self._slot(row, position)] for position in range(start, end)])

    def _slot(self, row: int, position: int) -> int:
        block = self.tables[row][position // self.block_size]
        assert block > 0, "the null block is nobody's"
        return block * self.block_size + position % self.block_size
