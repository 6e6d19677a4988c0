"""DraftPlanner: chooses the drafts of every step, from all sources.

    host proposers ───────────────────────────┐
    device drafts (StepDone.drafts) ──────────┼─▶ best source per row ─▶ as many as pay (draft_counts) ─▶ StepPlan
    forced text, cut drafts (GrammarReport) ──┘                         ▲ acceptance by source, from verified drafts

A request drafts or it does not. While it drafts, its rows wait for the answer of their last step (`table.waits`), since
drafts continue known tokens. A request whose sources have nothing, or nothing that pays, stops drafting: its steps
overlap as without speculative decoding, and it costs nothing until it has `table.wake_at` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from engine.core.actor_messages import DraftTarget
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.step import StepRecord
from engine.messages import SourceCounts
from engine.spec.draft_counts import MAX_RATE, DraftCounts
from engine.spec.draft_record import (
    LONG_MEMORY,
    MIN_PAUSE,
    NEVER,
    Draft,
    DraftRecord,
    SourceRecord,
    update_rate,
)
from engine.spec.ngram import NgramProposer
from engine.spec.prediction import PredictionProposer
from engine.spec.step_costs import StepCosts
from engine.spec.suffix import SuffixProposer
from engine.speculative_config import SpeculativeConfig

FORCED = "forced"
MAX_QUESTIONS = 64  # to the grammar thread before one step; each takes about 8 us
STEPS_PER_NOTE = 4  # one of so many steps without drafts is taken as a measurement, which costs 10 us
MIN_PROMISE = 3  # drafts that make waiting worthwhile; the token in flight uses up the first
LOOK_TOKENS = 4  # of a request that does not draft, between two looks for drafts on the host
NUM_TAIL_TOKENS = 4  # output tokens before a forced text, which decide how it is split into tokens
# Acceptance that is assumed before the first draft of a source.
FIRST_RATES = {FORCED: 0.95, "prediction": 0.85}
FIRST_RATE = 0.6
PROBE_DRAFTS = 2  # of a device's source that is probed, even if they do not seem to pay


class Proposer(Protocol):
    """Predicts the next tokens of requests. A wrong draft costs time but does not change the text."""

    @property
    def name(self) -> str:
        """The label of its drafts in metrics."""

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return 0 to `limit` tokens that may follow the request's known tokens."""

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""


class DraftPlanner:
    """Owns the drafts of all requests. Synchronous; one owner."""

    def __init__(
        self, config: SpeculativeConfig, table: RequestTable, costs: StepCosts | None = None,
        proposers: Sequence[Proposer] | None = None,
    ) -> None:
        self.costs = costs or StepCosts(())
        self.num_requests = 0  # open ones to which a source applies; without any, nothing needs to be called
        self._config = config
        self._table = table
        self._proposers = make_proposers(config) if proposers is None else proposers
        self._device = config.device_method
        self._numbers = DraftCounts(config, self.costs)
        self._num_steps = 0
        # Times per row: of a step without drafts, of waiting for the last result, and of one more draft.
        self._row_s = self._wait_s = self._draft_s = 0.0
        self._asked: list[Request] = []  # their grammars are to be asked for forced tokens
        self._num_drafting = 1  # requests that drafted in the last step in which any did
        self._rates: dict[str, float] = {}  # moving average over all requests, by source
        self._pauses: dict[str, int] = {}  # the last pause in any request, by source
        # By source: drafts, drafted tokens, accepted tokens by position
        self._totals: dict[str, list[int]] = {}

    def open(self, request: Request) -> None:
        """Start drafting for a request, if any source applies to it."""
        names = [each.name for each in self._proposers if each.name != "prediction" or request.prediction]
        names += [FORCED] if request.has_grammar else []
        names += [self._device] if self._device is not None else []
        if names:
            request.drafts = DraftRecord({name: self._open_source(name, request.num_tokens) for name in names})
            self.num_requests += 1
            self._set_waiting(request, request.drafts.find_wake(0) == 0)
        else:
            self._table.wake_at[request.slot] = NEVER

    def _open_source(self, name: str, num_tokens: int) -> SourceRecord:
        """A source that lost time in other requests starts with a pause."""
        pause = self._pauses.get(name, 0) // 2
        source = SourceRecord(self._rates.get(name, FIRST_RATES.get(name, FIRST_RATE)), max(pause, MIN_PAUSE))
        if pause > MIN_PAUSE:
            source.rest(num_tokens)
        return source

    def _set_waiting(self, request: Request, is_waiting: bool) -> None:
        """Let a request draft, or overlap its steps until the next look for drafts."""
        assert request.drafts is not None
        self._table.waits[request.slot] = int(is_waiting)
        look = NEVER if is_waiting else request.drafts.find_wake(request.num_tokens + LOOK_TOKENS)
        self._table.wake_at[request.slot] = look

    def close(self, request: Request) -> None:
        self.num_requests -= request.drafts is not None
        self._table.waits[request.slot] = 0
        for proposer in self._proposers:
            proposer.forget(request)

    def offer_device(self, request: Request, token_ids: Sequence[int]) -> None:
        """Take the device's drafts, which continue the request's known tokens."""
        if request.drafts is not None and self._device is not None and len(token_ids):
            request.drafts.offered[self._device] = (request.num_tokens, token_ids)

    def wake(self, requests: Iterable[Request]) -> None:
        """Look for drafts of requests that do not draft and have reached their `wake_at`.

        A token in flight is not known yet; the drafts after the known tokens show whether waiting for it may pay.
        """
        for request in requests:
            record, num_tokens = request.drafts, request.num_tokens
            assert record is not None, "only requests with a record wake up"
            name = self._find_expected(record, num_tokens) or next(
                (each.name for each in self._proposers if self._is_promising(request, record, each)), None
            )
            record.awaited = name or record.awaited
            self._set_waiting(request, name is not None)

    def plan(
        self, requests: Sequence[Request], num_tokens: int, num_samples: int, budget: int
    ) -> dict[int, Draft]:
        """Choose the drafts of a step.

        Args:
            requests: those that draft, with one token scheduled and none in flight.
            num_tokens: tokens of the step so far.
            num_samples: rows that sample.
            budget: tokens that may be added.

        Returns slot -> drafts.
        """
        limit = self._config.limit_drafts(num_samples)
        self._num_drafting = len(requests)
        candidates: dict[int, Draft] = {}
        for request in requests:
            if (draft := self._choose(request, limit, is_cut=request.has_grammar)) is not None:
                candidates[request.slot] = draft
        found = self._numbers.cut(candidates, num_tokens, num_samples, budget)
        self._note_prices(num_tokens, num_samples, sum(len(draft.token_ids) for draft in found.values()))
        for request in requests:
            record, draft = request.drafts, found.get(request.slot)
            assert record is not None, "only requests with a record draft"
            if draft is not None:
                record.awaited = draft.source
                continue
            # If there was a candidate, more drafts would cost more than they bring.
            is_rejected = request.slot in candidates
            name = candidates[request.slot].source if is_rejected else record.awaited
            self._note_gain(request, name, -self._wait_s, is_rejected=is_rejected)
            if self._find_expected(record, request.num_tokens) is None:
                self._set_waiting(request, False)
        return found

    def settle(self, request: Request, draft: Draft, num_accepted: int) -> None:
        name, num_drafted, record = draft.source, len(draft.token_ids), request.drafts
        assert record is not None, "a request with drafts has a record"
        record.sources[name].note(num_drafted, num_accepted)
        before = self._rates.get(name, FIRST_RATES.get(name, FIRST_RATE))
        self._rates[name] = update_rate(before, num_drafted, num_accepted, LONG_MEMORY)
        gain_s = num_accepted * self._row_s - self._wait_s - self._draft_s * num_drafted
        if name == self._device:
            gain_s -= self.costs.estimate_drafts(num_drafted) / self._num_drafting
        self._note_gain(request, name, gain_s)
        totals = self._totals.setdefault(name, [0, 0])
        totals += [0] * (2 + num_accepted - len(totals))
        totals[0] += 1
        totals[1] += num_drafted
        for position in range(num_accepted):
            totals[2 + position] += 1

    def note_step(self, step: StepRecord, seconds: float, idle_s: float) -> None:
        self._num_steps += 1
        if (step.drafts or self._num_steps % STEPS_PER_NOTE == 0) and step.is_decode:
            self.costs.note(int(step.counts.sum()), seconds)
            if step.drafts:
                self.costs.note_gap(idle_s)
            elif not step.is_waiting:
                self.costs.note_idle(idle_s)

    def count_wanted(self, requests: Sequence[Request], slots: np.ndarray) -> np.ndarray | None:
        """Return how many drafts the device should propose after each row of the step; None: none at all.

        Rows that are still in their prompt have a number, too: the drafter follows the prompts of rows that will draft.
        """
        name = self._device
        if name is None:
            return None
        active: dict[int, SourceRecord] = {}
        for at in np.flatnonzero(self._table.waits[slots] > 0).tolist():
            record = requests[at].drafts
            if record is not None and record.is_active(name, requests[at].num_tokens):
                active[at] = record.sources[name]
        rates = np.array([source.rate for source in active.values()])
        counts = self._numbers.choose(rates, len(requests)).tolist()
        wanted = np.zeros(len(requests), dtype=np.int64)
        for (at, source), count in zip(active.items(), counts, strict=True):
            request = requests[at]
            if not count and source.gain_s is None:
                count = PROBE_DRAFTS
            elif not count:
                self._rest(source, name, request.num_tokens)
            # At least the token of this step precedes the drafts, and one follows them.
            wanted[at] = max(0, min(count, request.max_num_tokens - request.num_tokens - 2))
        return wanted if wanted.any() else None

    def ask(self, request: Request) -> None:
        """Have the next forced tokens of a request found before its next step is planned."""
        record, num_tokens = request.drafts, request.num_tokens
        has_room = request.max_num_tokens - num_tokens > 1
        if record is None or not has_room:
            return
        if len(self._asked) < MAX_QUESTIONS:
            self._table.waits[request.slot] = 2
            self._asked.append(request)
        else:
            self._set_waiting(request, False)

    def take_questions(self) -> list[DraftTarget]:
        """Return the questions to the grammar thread, each with the best drafts of the other sources."""
        asked, self._asked = self._asked, []
        targets = []
        for request in asked:
            record = request.drafts
            if not request.is_finished and record is not None:
                limit = self._config.num_speculative_tokens
                best = self._choose(request, limit)
                if best is None and not record.is_active(FORCED, request.num_tokens):
                    self._table.waits[request.slot] = 1
                    continue
                source, token_ids = ("", []) if best is None else (best.source, list(best.token_ids))
                tail = request.token_ids[
                    max(request.num_prompt_tokens, request.num_tokens - NUM_TAIL_TOKENS) :
                ]
                targets.append(DraftTarget(request.handle, source, token_ids, tail, limit))
        return targets

    def take_answer(self, request: Request, source: str, token_ids: Sequence[int]) -> None:
        """Take the answer of the grammar thread: forced tokens, or the given drafts as far as they are allowed."""
        record = request.drafts
        assert record is not None, "only requests with a record are asked"
        self._table.waits[request.slot] = 1
        if token_ids:
            record.offered[source] = (request.num_tokens, token_ids)

    def count(self) -> dict[str, SourceCounts]:
        """Return the counters of all sources since the start."""
        return {name: SourceCounts(each[0], each[1], each[2:]) for name, each in self._totals.items()}

    def _find_expected(self, record: DraftRecord, num_tokens: int) -> str | None:
        """Return a source that must be asked and may have drafts."""
        return next((name for name in (self._device, FORCED) if record.is_active(name, num_tokens)), None)

    def _is_promising(self, request: Request, record: DraftRecord, proposer: Proposer) -> bool:
        """Whether a host source has drafts beyond the token in flight."""
        is_active = record.is_active(proposer.name, request.num_tokens)
        return is_active and len(proposer.propose(request, MIN_PROMISE)) >= MIN_PROMISE

    def _note_gain(self, request: Request, name: str, seconds: float, *, is_rejected: bool = False) -> None:
        """Take the seconds that a step with a source saved; one that does not pay rests."""
        assert request.drafts is not None
        source = request.drafts.sources[name]
        pays = source.note_gain(seconds, self._row_s) and not is_rejected
        if seconds > 0:
            self._pauses[name] = MIN_PAUSE
        if self._config.adaptive and not pays:
            self._rest(source, name, request.num_tokens)

    def _rest(self, source: SourceRecord, name: str, num_tokens: int) -> None:
        source.rest(num_tokens)
        self._pauses[name] = source.pause

    def _note_prices(self, num_tokens: int, num_samples: int, num_drafts: int) -> None:
        """Estimate what the rows of a step with so many drafts pay."""
        costs = self.costs
        self._row_s = costs.price_token(num_samples, self._num_drafting)
        # If few rows draft, the others go on, and the step of the drafting row is lost.
        is_shared = 2 * self._num_drafting >= num_samples
        self._wait_s = max(0.0, costs.gap_s - costs.idle_s) / num_samples if is_shared else self._row_s
        self._draft_s = (costs.estimate(num_tokens + num_drafts) - costs.estimate(num_tokens)) / max(1, num_drafts)

    def _choose(self, request: Request, limit: int, *, is_cut: bool = False) -> Draft | None:
        """Return the drafts with the highest expected number of right tokens.

        Args:
            is_cut: take those of the grammar thread only, which has chosen among the others.
        """
        record, num_tokens = request.drafts, request.num_tokens
        assert record is not None, "only requests with a record draft"
        limit = min(limit, request.max_num_tokens - num_tokens - 1)
        offered, record.offered = record.offered, {}
        if limit < 1:
            return None
        drafts = {name: ids[:limit] for name, (place, ids) in offered.items() if place == num_tokens}
        if not is_cut:
            for each in self._proposers:
                if record.is_active(each.name, num_tokens):
                    drafts[each.name] = each.propose(request, limit)[:limit]
        best, best_value = None, 0.0
        for name, token_ids in drafts.items():
            rate = min(record.sources[name].rate, MAX_RATE)
            value = rate * (1 - rate ** len(token_ids)) / (1 - rate)
            if value > best_value:
                best, best_value = Draft(name, token_ids, rate), value
        return best


def make_proposers(config: SpeculativeConfig) -> list[Proposer]:
    """Return the host sources of a config."""
    found: list[Proposer] = [PredictionProposer()]
    if "ngram" in config.method:
        found.append(NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max))
    if "suffix" in config.method:
        found.append(SuffixProposer(config))
    return found
