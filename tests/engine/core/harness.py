"""SchedulerHarness: the scheduler with a fake worker and fake grammar, driven by hand in any order."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np

from engine.config import CacheConfig, SchedulerConfig
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.scheduler import Scheduler
from engine.kv_cache_spec import KVCacheGroup, KVCacheSpec
from engine.messages import AddRequest, FillMasks, RequestTokens, RunStep, SampleGate, StepDone, StepPlan
from engine.sampling_params import SamplingParams
from grammar import GrammarSpec
from tests.engine.core.fake_worker import EOS, FakeWorker, reference_output

MAX_MODEL_LEN = 96


def make_scheduler_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "enable_chunked_prefill": True,
        "policy": "fcfs",
        "priority_ageing_s": 10.0,
        "max_steps_in_flight": 2,
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_group(window: int | None = None) -> KVCacheGroup:
    return KVCacheGroup(KVCacheSpec(1, 8, window), layers=(0,))


def make_request(
    name: str, prompt: list[int], max_tokens: int = 8, *, gated: bool = False, priority: int = 0, arrival: float = 0.0,
    salt: str | None = None, **params: object,
) -> AddRequest:  # fmt: skip
    grammar = GrammarSpec.json_object() if gated else None
    sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar, **params)  # type: ignore[arg-type]
    return AddRequest(name, prompt, sampling, 0, arrival, priority=priority, cache_salt=salt)


def find_prompt(num_tokens: int, *, ends: bool) -> tuple[list[int], list[int]]:
    """A prompt and its answer of so many tokens, or one that EOS ends after 5 tokens at least."""
    for first in range(5000):
        prompt = [first % 90, first // 90, 7, 8, 9]
        answer = reference_output(prompt, num_tokens, MAX_MODEL_LEN)
        if (EOS in answer) == ends and len(answer) > 4:
            return prompt, answer
    raise AssertionError("there is no such prompt")


class SchedulerHarness:
    """Owns a scheduler and moves its messages; `ended` and `outputs` collect what comes out."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, caching: bool = True, window: int | None = None,
        **config: object,
    ) -> None:  # fmt: skip
        self.now = 0.0
        cache = CacheConfig(num_blocks, block_size, caching, groups=(make_group(window),))
        self.kv_cache = KVCacheManager(cache)
        self.scheduler = Scheduler(
            make_scheduler_config(**config), self.kv_cache, [EOS], clock=lambda: self.now
        )
        self.worker = FakeWorker(block_size, window)
        self.to_worker: deque[RunStep | SampleGate] = deque()
        self.to_grammar: deque[FillMasks] = deque()
        self.to_scheduler: deque[StepDone] = deque()
        self.num_accepted: Counter[str] = Counter()
        # (step, index) -> output tokens the matcher must have seen
        self.num_due: dict[tuple[int, int], int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, list[RequestTokens]] = {}

    def add(self, request: AddRequest) -> None:
        self.add_together(request)

    def add_together(self, *requests: AddRequest) -> None:
        """All come before the next step is planned."""
        for request in requests:
            self.outputs[request.request_id] = []
            self.scheduler.add(request)
        self.plan()

    def abort(self, name: str) -> None:
        self._collect(self.scheduler.abort([name]))
        self.plan()

    def plan(self) -> None:
        """What the actor does whenever its inbox is empty."""
        self._order_masks()
        while (plan := self.scheduler.schedule()) is not None:
            self._send(plan)

    def work(self) -> bool:
        """Let the worker take one message."""
        if not self.to_worker:
            return False
        message = self.to_worker.popleft()
        if isinstance(message, RunStep):
            done = self.worker.execute(message.plan)
        else:
            done = self.worker.sample_gated(message)
        if done is not None:
            self.to_scheduler.append(done)
        return True

    def fill(self) -> bool:
        """Let the grammar answer one order."""
        if not self.to_grammar:
            return False
        order = self.to_grammar.popleft()
        self.num_accepted.update(name for name, _ in order.accepted)
        for index, name in order.targets:
            assert self.num_accepted[name] == self.num_due[order.step_id, index], "a mask of another position"
        indices = np.array([index for index, _ in order.targets], dtype=np.int64)
        self.to_worker.append(SampleGate(order.step_id, indices, np.full((len(indices), 4), -1, np.int32)))
        return True

    def answer(self) -> bool:
        """Let the scheduler take one answer."""
        if not self.to_scheduler:
            return False
        new_tokens = self.scheduler.update(self.to_scheduler.popleft())
        plain = zip(new_tokens.plain_ids, new_tokens.plain_tokens, strict=True)
        self._collect([*new_tokens.items, *(RequestTokens(name, [token]) for name, token in plain)])
        self.plan()
        return True

    def run(self, chance: random.Random | None = None, limit: int = 20000) -> None:
        """Move messages until all is quiet; in random order when `chance` is given."""
        moves = [self.work, self.fill, self.answer]
        for _ in range(limit):
            if chance is not None:
                chance.shuffle(moves)
            if not any(move() for move in moves):
                assert not self.scheduler.has_work, "quiet, but requests are left"
                return
        raise AssertionError("the scheduler does not come to an end")

    def check(self) -> None:
        """The invariants that hold at any moment."""
        pool = self.kv_cache.pool
        owned = pool.owned_ids()
        assert 0 not in owned
        assert pool.num_free + len(owned) == pool.num_usable
        held = [block for request in self.scheduler.state.running for block in request.block_ids if block]
        assert sorted(held) == sorted(block for block, owners in owned.items() for _ in range(owners))
        assert all(not request.block_ids for request in self.scheduler.state.waiting.requests())

    def _send(self, plan: StepPlan) -> None:
        """The limits hold for every plan of every test."""
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(plan.rows) <= len(self.scheduler.state.running) <= config.max_num_seqs
        assert self.scheduler.num_open_steps <= config.max_steps_in_flight
        self._note_due(plan)
        self.to_worker.append(RunStep(plan))
        self._order_masks()

    def _note_due(self, plan: StepPlan) -> None:
        for index in np.flatnonzero(plan.is_gated).tolist():
            request = next(each for each in self.scheduler.state.running if each.row == plan.rows[index])
            end = int(plan.starts[index] + plan.num_scheduled_tokens[index])
            self.num_due[plan.step_id, index] = end - request.num_prompt_tokens

    def _order_masks(self) -> None:
        order = self.scheduler.order_masks()
        if order is not None:
            self.to_grammar.append(order)

    def _collect(self, items: list[RequestTokens]) -> None:
        for item in items:
            self.outputs[item.request_id] += item.token_ids
            if item.finish_reason is not None:
                self.ended.setdefault(item.request_id, []).append(item)
