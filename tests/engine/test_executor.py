"""ExecutorActor over a worker whose results come back late, as those of a GPU do."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Event
from typing import Any

import numpy as np
import pytest

from engine.actors.executor_actor import ExecutorActor
from engine.core.actor_messages import StepDone, StepMasks, StepPlan
from engine.device.device_link import PendingStep
from tests.waiting import wait_until

NOTHING = np.zeros(0, dtype=np.int64)


def make_answer(step_id: int) -> StepDone:
    return StepDone(step_id, NOTHING, NOTHING, NOTHING)


class LateFetch:
    """A fetch that the test completes."""

    def __init__(self) -> None:
        self.arrived = Event()

    def is_done(self) -> bool:
        return self.arrived.is_set()

    def wait(self) -> list[np.ndarray]:
        assert self.arrived.is_set(), "the executor waits for a device that is not done"
        return []


class LateWorker:
    """Launches a step at once and answers when its fetch is done. Steps from 100 on answer at once."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.fetches: dict[int, LateFetch] = {}
        self.has_parked = False
        self.chores = 0
        self.before_layers: Callable[[], None] = lambda: None
        self.take_masks: Callable[[int, np.ndarray], StepMasks | None] = lambda step_id, indices: None
        self.on_launch: Callable[[], None] = lambda: None
        self.make_fetch: Callable[[], LateFetch] = LateFetch

    def load(self) -> None:
        """Nothing to load."""

    def get_mask_timeout(self, plan: StepPlan) -> float:
        return math.inf if self.has_parked else 0.0

    def do_chore(self) -> bool:
        self.chores -= 1
        return self.chores >= 0

    def execute(self, plan: StepPlan) -> StepDone | PendingStep:
        self.launched.append(plan.step_id)
        done = make_answer(plan.step_id)
        fetch = None if plan.step_id >= 100 else self.make_fetch()
        if fetch is not None:
            self.fetches[plan.step_id] = fetch
        self.on_launch()  # the test goes on from here
        return done if fetch is None else PendingStep(fetch, lambda _: done)

    def sample(self, masks: StepMasks) -> StepDone | None:
        self.has_parked = False
        return make_answer(masks.step_id)


def make_plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, [], [], [], *[NOTHING] * 4, NOTHING.astype(bool), NOTHING)


class Desk:
    """The scheduler's side: sends steps, and sees answers in the order they come."""

    def __init__(self, worker: LateWorker) -> None:
        self.answers: asyncio.Queue[int] = asyncio.Queue()
        self.launches: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        worker.on_launch = lambda: loop.call_soon_threadsafe(self.launches.put_nowait, None) and None
        any_worker: Any = worker
        self.executor = ExecutorActor(any_worker, None)
        self.executor.tell_grammar = lambda order: None
        self.executor.deliver = lambda done: self.answers.put_nowait(done.step_id)

    async def send(self, *step_ids: int) -> None:
        """Send steps and wait until they are launched."""
        for step_id in step_ids:
            self.executor.tell(make_plan(step_id))
        for _ in step_ids:
            await self.launches.get()


@asynccontextmanager
async def open_desk(worker: LateWorker) -> AsyncIterator[Desk]:
    desk = Desk(worker)
    task = asyncio.create_task(desk.executor.run())
    await desk.executor.ready.wait()
    try:
        yield desk
    finally:
        desk.executor.tell(None)  # type: ignore[arg-type]
        await task


async def test_the_next_step_is_launched_before_the_last_one_is_read_and_answers_keep_their_order() -> None:
    """A later step that is ready earlier, or that nothing had to be computed for, waits for its turn."""
    worker = LateWorker()
    async with open_desk(worker) as desk:
        await desk.send(0, 1)
        assert (worker.launched, desk.answers.qsize()) == ([0, 1], 0)
        worker.fetches[0].arrived.set()
        assert await desk.answers.get() == 0
        await desk.send(2, 100)
        worker.fetches[2].arrived.set()
        worker.fetches[1].arrived.set()
        assert [await desk.answers.get() for _ in range(3)] == [1, 2, 100]


async def test_a_step_that_waits_for_masks_lets_late_answers_out() -> None:
    """The masks it waits for need the tokens of the step before."""
    worker = LateWorker()
    async with open_desk(worker) as desk:
        await desk.send(0)
        worker.has_parked = True
        desk.executor.tell(make_plan(1))
        worker.fetches[0].arrived.set()
        assert await desk.answers.get() == 0
        assert worker.launched == [0]
        desk.executor.tell(StepMasks(0, NOTHING, NOTHING, np.zeros((0, 1), np.int32)))
        await desk.launches.get()
        assert worker.launched == [0, 1]


async def test_a_step_takes_masks_that_have_arrived_for_all_its_rows() -> None:
    worker, has_masks = LateWorker(), Event()
    taken: list[Any] = []
    words = np.zeros((1, 1), np.int32)

    def launch() -> None:
        has_masks.wait(10)
        for step_id, index in ((100, 0), (101, 3), (101, 5), (101, 5)):
            found = worker.take_masks(step_id, np.array([index]))
            taken.append(None if found is None else found.step_id)

    async with open_desk(worker) as desk:
        worker.on_launch = launch
        desk.executor.tell(make_plan(101))
        one = np.ones(1, dtype=np.int64)
        desk.executor.tell(StepMasks(101, 5 * one, one, words))
        has_masks.set()
        assert await desk.answers.get() == 101
    assert taken == [None, None, 101, None]


async def test_a_chore_that_comes_up_while_nothing_happens_is_done() -> None:
    worker = LateWorker()
    async with open_desk(worker):
        worker.chores = 1
        await wait_until(lambda: worker.chores <= 0)


async def test_a_device_that_fails_takes_the_executor_down() -> None:
    class BrokenFetch(LateFetch):
        def wait(self) -> list[np.ndarray]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    worker = LateWorker()
    worker.make_fetch = BrokenFetch
    desk = Desk(worker)
    task = asyncio.create_task(desk.executor.run())
    await desk.executor.ready.wait()
    await desk.send(0)
    worker.fetches[0].arrived.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await task


async def test_the_end_of_the_work_is_seen_behind_a_step_that_was_held() -> None:
    """The first step waits for masks a moment, the second as long as it takes; the end comes meanwhile."""

    class ParkingWorker(LateWorker):
        def get_mask_timeout(self, plan: StepPlan) -> float:
            return 0.002 if plan.step_id == 101 else math.inf

    worker = ParkingWorker()
    async with open_desk(worker) as desk:
        for step_id in (101, 102):
            desk.executor.tell(make_plan(step_id))
        desk.executor.tell(None)  # type: ignore[arg-type]
        assert [await desk.answers.get() for _ in range(2)] == [101, 102]


async def test_a_result_is_sent_when_the_layers_of_the_next_step_start() -> None:
    worker, is_told, has_arrived = LateWorker(), Event(), Event()
    was_in_time: list[bool] = []

    def launch() -> None:
        if worker.launched == [101]:
            is_told.wait(10)  # until the second step is in the inbox
        else:
            worker.before_layers()
            was_in_time.append(has_arrived.wait(10))

    async with open_desk(worker) as desk:
        worker.on_launch = launch
        for step_id in (101, 102):
            desk.executor.tell(make_plan(step_id))
        is_told.set()
        assert await desk.answers.get() == 101
        has_arrived.set()
        assert await desk.answers.get() == 102
    assert was_in_time == [True]
