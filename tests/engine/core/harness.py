"""SchedulerHarness: the scheduler with a fake worker and fake grammar, driven by hand in any order."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from engine.core.actor_messages import (
    AdapterReady,
    DraftTarget,
    FillMasks,
    FindDrafts,
    MaskTarget,
    StepDone,
    StepMasks,
    StepPlan,
)
from engine.core.host_tier import HostTier
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.mask_orders import MaskOrders
from engine.core.request import Request
from engine.core.request_table import RequestTable
from engine.core.scheduler import Scheduler
from engine.kv_cache_spec import KVCacheGroup
from engine.messages import AdapterRef, AddRequest, Detail, NewCompletion, NewTokens
from engine.resolved_config import CacheConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.spec.draft_planner import DraftPlanner, Proposer
from engine.spec.step_costs import StepCosts
from engine.speculative_config import SpeculativeConfig
from grammar import GrammarSpec
from tests.engine.core.fake_worker import EOS, FakeWorker, make_array, reference_output

MAX_MODEL_LEN = 96
_handles = itertools.count(1)


def make_scheduler_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, "max_num_batched_tokens": 16,
        "enable_chunked_prefill": True, "policy": "fcfs", "max_steps_in_flight": 2,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_group(window: int | None = None) -> KVCacheGroup:
    return KVCacheGroup(window, layers=(0,))


def make_request(
    name: str, prompt: list[int], max_tokens: int = 8, *, gated: bool = False, priority: int = 0, arrival: float = 0.0,
    salt: str | None = None, generated: Sequence[int] = (), adapter: str = "", **params: object,
) -> AddRequest:  # fmt: skip
    """A request of one completion. Its age is that at time 0."""
    grammar = GrammarSpec.json_object() if gated else None
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar, **params)  # type: ignore[arg-type]
    completions = [NewCompletion(next(_handles), 0, list(generated))]
    ref = AdapterRef(adapter, "", adapter) if adapter else None
    return AddRequest(name, prompt, sampling, completions, -arrival, priority, salt, adapter=ref)


def make_record(message: AddRequest, completion: NewCompletion | None = None) -> Request:
    """The scheduler's own record of a completion, the first one unless given, at time 0."""
    completion = completion or message.completions[0]
    return Request(message, completion, RequestTable(1), MAX_MODEL_LEN, frozenset(), now=0.0)


def find_prompt(num_tokens: int, *, ends: bool) -> tuple[list[int], list[int]]:
    """A prompt and its answer of so many tokens, or one that EOS ends after 5 tokens at least."""
    for first in range(5000):
        prompt = [first % 90, first // 90, 7, 8, 9]
        answer = reference_output(prompt, num_tokens, MAX_MODEL_LEN)
        if (EOS in answer) == ends and len(answer) > 4:
            return prompt, answer
    raise AssertionError("there is no such prompt")


def make_masks(step_id: int, targets: list[MaskTarget], ended: Sequence[int] = ()) -> StepMasks:
    """Masks that allow everything."""
    indices = make_array(target.index for target in targets)
    counts = make_array(1 + len(target.draft_token_ids) for target in targets)
    return StepMasks(step_id, indices, counts, np.full((counts.sum(), 4), -1, np.int32), list(ended))


def make_planner(
    proposers: Sequence[Proposer], costs: StepCosts | None = None, **settings: Any
) -> Callable[[RequestTable], DraftPlanner]:
    """A planner with these sources; it drafts as much as it can by default."""
    config = SpeculativeConfig(method=("ngram",), **({"adaptive": False} | settings))
    return partial(DraftPlanner, config, costs=costs, proposers=proposers)


def cut_sometimes(target: DraftTarget) -> DraftTarget:
    """A grammar that allows all drafts, or only the first of every second handle's."""
    kept = target.token_ids[: 1 if target.handle % 2 else None]
    return DraftTarget(target.handle, target.source if kept else "", kept)


class SchedulerHarness:
    """Owns a scheduler and moves its messages; `ended` and `outputs` collect what comes out, by request name.

    Args:
        narrower: windows of more groups of layers, below `window`. `num_blocks` grows with them.
        num_states: slots for snapshots of states, and for states of drafts; 0: there are no states.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        caching: bool = True,
        proposer: Proposer | None = None,
        window: int | None = None,
        has_slow_masks: bool = False,
        narrower: Sequence[int] = (),
        num_states: int = 0,
        tier: HostTier | None = None,
        **config: object,
    ) -> None:
        self.now = 0.0
        scheduler_config = make_scheduler_config(**config)
        max_chunk_len, more = scheduler_config.max_num_batched_tokens, [make_group(each) for each in narrower]
        num_blocks += sum(group.count_blocks(MAX_MODEL_LEN, max_chunk_len, block_size) for group in more)
        cache = CacheConfig(
            num_blocks, block_size, caching, (make_group(window), *more), max_chunk_len,
            has_states=num_states > 0, num_snapshots=num_states, num_draft_states=num_states, num_state_units=2,
        )  # fmt: skip
        self.kv_cache = KVCacheManager(cache, tier, end_ids=range(5))
        self.scheduler = Scheduler(
            scheduler_config, self.kv_cache, [EOS], lambda: self.now,
            make_drafts=None if proposer is None else make_planner([proposer], num_speculative_tokens=6),
        )  # fmt: skip
        if self.scheduler.state.adapters is not None:
            self.scheduler.state.adapters.loader = self
        self.worker = FakeWorker(block_size, [window, *narrower], num_states > 0)
        self.worker.has_stages = scheduler_config.num_stages > 1
        self.to_worker: deque[StepPlan | StepMasks] = deque()
        self.to_grammar: deque[FillMasks | FindDrafts] = deque()
        self.answers: deque[list[DraftTarget]] = deque()  # the grammar's answers to FindDrafts
        self.has_slow_masks = has_slow_masks  # every row's masks come alone, and in any order
        self.slow_masks: deque[StepMasks] = deque()
        self.num_rotations = 0
        self.to_scheduler: deque[StepDone] = deque()
        self.orders = MaskOrders()
        self.to_loader: deque[AdapterRef] = deque()
        self.pinned: set[str] = set()  # adapters that new rows may use
        self.broken: set[str] = set()  # adapters whose load fails
        self.handles: dict[str, int] = {}  # of the last request of each name
        self.names: dict[int, str] = {}  # of requests that have not ended
        self.num_accepted: Counter[int] = Counter()  # by handle
        # (step, index) -> output tokens the matcher must have seen
        self.num_due: dict[tuple[int, int], int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.scored: dict[str, list[int]] = {}  # tokens that came with log-probabilities
        self.ended: dict[str, list[Detail]] = {}

    def add(self, request: AddRequest) -> None:
        self.add_together(request)

    def add_together(self, *requests: AddRequest) -> None:
        """All come before the next step is planned."""
        for request in requests:
            name, (completion,) = request.request_id, request.completions
            self.outputs[name], self.scored[name] = [], []
            self.num_accepted[completion.handle] = len(completion.generated_token_ids)
            self.handles[name], self.names[completion.handle] = completion.handle, name
            self.scheduler.add(msgspec.structs.replace(request, age_s=self.now + request.age_s))
        self.plan()

    def abort(self, name: str) -> None:
        self._collect(self.scheduler.abort([self.handles.get(name, 0)]))
        self.plan()

    def plan(self) -> None:
        """Plan a step, as the actor does whenever its inbox is empty."""
        self._ask()
        while (plan := self.scheduler.schedule()) is not None:
            self._send(plan)

    def pin(self, ref: AdapterRef) -> None:
        self.to_loader.append(ref)

    def unpin(self, digest: str) -> None:
        self.pinned.discard(digest)

    drop = unpin

    def work(self) -> bool:
        """Let the worker take one message."""
        if not self.to_worker:
            return False
        message = self.to_worker.popleft()
        if isinstance(message, StepPlan):
            assert {row.adapter for row in message.new_rows} <= {"", *self.pinned}
            self.orders.add(message)
            done = self.worker.execute(message)
        else:
            done = self.worker.sample_gated(message)
        if done is not None:
            self.orders.take(done)
            self.to_scheduler.append(done)
        for order in self.orders.flush():
            self.to_grammar.append(order)
        return True

    def fill(self) -> bool:
        """Let the grammar answer one order."""
        if not self.to_grammar:
            return False
        order = self.to_grammar.popleft()
        if isinstance(order, FindDrafts):
            self.answers.append([cut_sometimes(target) for target in order.targets])
            return True
        self.num_accepted.update(handle for handle, _ in order.accepted)
        live = [target for target in order.targets if target.handle in self.names]
        for target in live:
            due = self.num_due[order.step_id, target.index]
            assert self.num_accepted[target.handle] == due, "a mask of another position"
        groups = [[target] for target in live] if self.has_slow_masks else [live]
        parts = [make_masks(order.step_id, targets) for targets in groups]
        if ended := [target.index for target in order.targets if target not in live]:
            parts.append(make_masks(order.step_id, [], ended))
        (self.slow_masks if self.has_slow_masks else self.to_worker).extend(parts)
        return True

    def fill_slowly(self) -> bool:
        """Let the masks of one row come, in the order of their steps or not."""
        if not self.slow_masks:
            return False
        self.slow_masks.rotate(self.num_rotations)
        self.num_rotations += 1
        self.to_worker.append(self.slow_masks.popleft())
        return True

    def load_adapter(self) -> bool:
        """Let the thread of the adapters answer one order."""
        if not self.to_loader:
            return False
        digest = self.to_loader.popleft().digest
        error = "it is broken" if digest in self.broken else None
        if error is None:
            self.pinned.add(digest)
        self._collect(self.scheduler.take_adapter(AdapterReady(digest, error)))
        self.plan()
        return True

    def answer(self) -> bool:
        """Let the scheduler take one answer."""
        if not self.to_scheduler:
            return False
        self._collect(self.scheduler.update(self.to_scheduler.popleft()))
        self.plan()
        return True

    def answer_drafts(self) -> bool:
        """Let the scheduler take the grammar's answer for some drafts."""
        if not self.answers:
            return False
        assert self.scheduler.drafts is not None
        self.scheduler.drafts.take_answers(self.answers.popleft())
        self.plan()
        return True

    def run(self, chance: random.Random | None = None, limit: int = 20000) -> None:
        """Move messages until all is quiet; in random order when `chance` is given."""
        moves = [self.work, self.fill, self.fill_slowly, self.load_adapter, self.answer, self.answer_drafts]
        for _ in range(limit):
            if chance is not None:
                chance.shuffle(moves)
            if not any(move() for move in moves):
                assert not self.scheduler.state.requests, "quiet, but requests are left"
                return
        raise AssertionError("the scheduler does not come to an end")

    def check(self) -> None:
        """The invariants that hold at any moment."""
        pool = self.kv_cache.pool
        owned = pool.owned_ids()
        assert 0 not in owned
        assert pool.num_free + len(owned) == pool.num_usable
        running = self.scheduler.state.running
        held = [block for each in running for block in (*each.block_ids, *each.reserved_ids) if block]
        assert sorted(held) == sorted(block for block, owners in owned.items() for _ in range(owners))
        assert all(not request.block_ids for request in self.scheduler.state.waiting.requests())
        assert self.names.keys() == self.scheduler.state.requests.keys()

    def _send(self, plan: StepPlan) -> None:
        """The limits hold for every plan of every test."""
        config = self.scheduler.config
        assert int(plan.num_scheduled_tokens.sum()) <= config.max_num_batched_tokens
        assert len(plan.rows) <= len(self.scheduler.state.running) <= config.max_num_seqs
        assert self.scheduler.num_open_steps <= config.max_steps_in_flight
        self._note_due(plan)
        self.to_worker.append(plan)

    def _note_due(self, plan: StepPlan) -> None:
        running = {request.row: request for request in self.scheduler.state.running}
        ends = (plan.starts + plan.num_scheduled_tokens).tolist()
        for index, (row, num_samples) in enumerate(zip(plan.rows.tolist(), plan.num_samples.tolist(), strict=True)):
            request = running[row]
            assert ends[index] < request.max_num_tokens, ("a token behind the last one that the request may have")
            num_known = ends[index] - max(num_samples - 1, 0)
            self.num_due[plan.step_id, index] = num_known - request.num_prompt_tokens

    def _ask(self) -> None:
        if (questions := self.scheduler.order_drafts()) is not None:
            self.to_grammar.append(questions)

    def _collect(self, told: NewTokens) -> None:
        counts = told.counts or [1] * len(told.handles)
        token_ids = iter(told.token_ids)
        for handle, count in zip(told.handles, counts, strict=True):
            self.outputs[self.names[handle]] += itertools.islice(token_ids, count)
        assert next(token_ids, None) is None, "tokens of nobody"
        for handles in (told.handles, [detail.handle for detail in told.details]):
            assert len(handles) == len(set(handles)), "told twice in one message"
        for detail in told.details:
            name = self.names[detail.handle]
            self.scored[name] += [entry.token.token_id for entry in detail.logprobs or ()]
            if detail.finish_reason is not None:
                del self.names[detail.handle]
                self.ended.setdefault(name, []).append(detail)
