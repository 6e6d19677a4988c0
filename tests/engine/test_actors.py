"""Actor and ThreadActor: order, batches, crashes and ends.

ReaderPacing: nobody waits without need, nobody is forgotten, and a round that takes long is followed by a rest.
"""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from engine import SamplingParams
from engine.actors.actor import Actor, ThreadActor
from engine.actors.detokenizer import DetokenizerActor
from engine.actors.reader_pacing import ReaderPacing
from engine.core.detokenizer import Detokenizer, NoText
from engine.messages import AddRequest, Detail, NewCompletion, NewTokens
from engine.metrics import Metrics
from engine.output_stream import OutputStream
from tests.waiting import wait_until


class Listener(Actor[str]):
    """Notes what it hears; "burn" kills it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def handle(self, message: str) -> None:
        if message == "burn":
            raise RuntimeError("on fire")
        if message == "echo":
            self.tell("from itself")
        self.heard.append(message)

    def finish_batch(self) -> None:
        self.heard.append("|")


class ThreadListener(ThreadActor[str]):
    """The same in a thread."""

    def __init__(self, on_message: Callable[[str], None] | None = None) -> None:
        super().__init__("troupe-test")
        self.heard: list[str] = []
        self.thread: threading.Thread | None = None
        self._on_message = on_message

    def work(self) -> None:
        self.thread = threading.current_thread()
        self.mark_ready()
        while (message := self._queue.get()) is not None:
            if message == "burn":
                raise RuntimeError("on fire")
            self.heard.append(message)
            if self._on_message is not None:
                self.post(self._on_message, message)


@asynccontextmanager
async def running(actor: Actor[str] | ThreadActor[str]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(actor.run())
    try:
        if isinstance(actor, ThreadActor):
            await actor.ready.wait()
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, RuntimeError):
            await task


class LateWaiter(ThreadActor[str]):
    """Waits for a message for 50 ms."""

    def work(self) -> None:
        with pytest.raises(Empty):
            self._queue.get(timeout=0.05)


async def test_a_wait_ends_although_its_thread_was_stopped_beyond_the_deadline() -> None:
    """SimpleQueue of CPython 3.11 then waits without limit; the handler of a signal stops the thread here."""
    actor = LateWaiter("troupe-test")
    previous = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.2))
    threads = [
        threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)),
        threading.Timer(2.0, actor.tell, ("too late",)),
    ]
    try:
        for thread in threads:
            thread.start()
        actor.work()
    finally:
        for thread in threads:
            thread.cancel()
            thread.join()
        signal.signal(signal.SIGUSR1, previous)


async def test_messages_are_handled_in_order_and_batches_are_closed_once() -> None:
    """What comes before it runs and what it tells itself belong to the batch."""
    actor = Listener()
    actor.tell("early")
    async with running(actor):
        for message in ("a", "b"):
            actor.tell(message)
        await wait_until(lambda: "|" in actor.heard)
        actor.tell("echo")
        await wait_until(lambda: "from itself" in actor.heard)
    assert actor.heard[:7] == ["early", "a", "b", "|", "echo", "from itself", "|"]


@pytest.mark.parametrize("kind", [Listener, ThreadListener])
async def test_an_exception_comes_out_of_run(kind: type[Listener | ThreadListener]) -> None:
    actor = kind()
    async with running(actor) as task:
        actor.tell("burn")
        with pytest.raises(RuntimeError, match="on fire"):
            await task
    if isinstance(actor, ThreadListener):
        assert actor.thread is not None and not actor.thread.is_alive()


class GatedListener(ThreadActor[threading.Event]):
    """Waits for each event that it hears."""

    num_heard = 0

    def work(self) -> None:
        while (message := self._queue.get()) is not None:
            self.num_heard += 1
            self.mark_ready()
            message.wait(10)


async def test_an_end_finishes_the_message_at_hand_and_drops_those_that_wait() -> None:
    actor, gate = GatedListener("troupe-test"), threading.Event()
    for _ in range(25):
        actor.tell(gate)
    task = asyncio.create_task(actor.run())
    await actor.ready.wait()
    task.cancel()
    await wait_until(lambda: actor.is_ending)
    gate.set()
    await asyncio.wait([task])
    assert actor.num_heard == 1


async def test_a_post_is_called_on_the_loop() -> None:
    posted = []
    actor = ThreadListener(on_message=lambda _: posted.append(threading.current_thread()))
    async with running(actor):
        actor.tell("a")
        await wait_until(lambda: bool(posted))
    assert posted[0] is threading.current_thread() and actor.heard == ["a"]
    assert actor.thread is not None and not actor.thread.is_alive()
    assert actor.thread is not posted[0] and actor.thread.name == "troupe-test"


async def test_a_thread_actor_may_be_told_from_any_thread() -> None:
    actor = ThreadListener()
    async with running(actor):
        tellers = [threading.Thread(target=actor.tell, args=(f"{n}",)) for n in range(20)]
        for teller in tellers:
            teller.start()
        for teller in tellers:
            teller.join()
        await wait_until(lambda: len(actor.heard) == 20)
    assert sorted(actor.heard, key=int) == [f"{n}" for n in range(20)]


async def test_a_crash_ends_its_task_group_and_joins_the_others() -> None:
    healthy, ill = ThreadListener(), ThreadListener()
    ill.tell("burn")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(healthy.run())
            tasks.create_task(ill.run())
    assert [str(error) for error in caught.value.exceptions] == ["on fire"]
    assert healthy.thread is not None
    assert not healthy.thread.is_alive()


def test_a_post_to_a_closed_loop_is_dropped() -> None:
    """The interpreter may end before a hung step does."""

    async def make() -> ThreadListener:
        return ThreadListener()

    actor = asyncio.run(make())
    actor.post(print, "never")


class Reader:
    """Is woken in rounds; `works_s` is how long it then keeps the loop."""

    def __init__(self, works_s: float = 0.0) -> None:
        self.wake_times: list[float] = []
        self._works_s = works_s

    def wake(self) -> None:
        self.wake_times.append(time.monotonic())
        if self._works_s:
            asyncio.get_running_loop().call_soon(time.sleep, self._works_s)


async def test_news_during_a_round_come_with_the_next_one_and_once() -> None:
    pacing, reader = ReaderPacing(), Reader()
    group = [reader]
    for _ in range(5):
        pacing.wake(group)
    assert len(reader.wake_times) == 1
    await wait_until(lambda: len(reader.wake_times) == 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(reader.wake_times) == 2


async def test_no_group_is_forgotten() -> None:
    pacing, readers = ReaderPacing(), [Reader() for _ in range(4)]
    for reader in readers:
        pacing.wake([reader])
    await wait_until(lambda: all(len(reader.wake_times) == 1 for reader in readers))


async def test_a_long_round_is_followed_by_a_rest_as_long() -> None:
    pacing, reader = ReaderPacing(), Reader(works_s=0.03)
    pacing.wake([reader])
    pacing.wake([reader])
    await wait_until(lambda: len(reader.wake_times) == 2)
    first, second = reader.wake_times
    assert second - first >= 0.055


async def test_after_a_rest_without_news_the_loop_is_quiet_again() -> None:
    pacing, reader = ReaderPacing(), Reader()
    group = [reader]
    for count in (1, 2, 3):
        await wait_until(lambda: not pacing._is_busy)
        pacing.wake(group)
        assert len(reader.wake_times) == count


def make_detokenizer_actor(params: SamplingParams) -> tuple[DetokenizerActor, OutputStream]:
    """One with a request of one completion, whose handle is 9, and the request's stream."""
    tokenizer: Any = SimpleNamespace(
        eos_token_ids=(0,), make_text=lambda *_: NoText(), token_piece=lambda token_id: ""
    )
    metrics = Metrics()
    stream = OutputStream("r", None, [1], params, 0.0, metrics)
    actor = DetokenizerActor(Detokenizer(tokenizer), {9: (stream, 0)}, metrics, lambda abort: None)
    actor.handle(AddRequest("r", [1], params, [NewCompletion(9, seed=0)]))
    return actor, stream


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, NewTokens([9], [], [5])),
        ({"stop": ("x",)}, NewTokens([9], [], [5])),
        ({"stop_token_ids": (7,)}, NewTokens([9], [], [5], [Detail(9)])),
        ({}, NewTokens([9], [2], [5, 5])),
    ],
    ids=["plain", "stop string", "stop token", "draft"],
)
async def test_every_kind_of_row_wakes_its_reader_in_rounds(options: Any, message: NewTokens) -> None:
    """The tokenizer is silent, so that no stop string ever comes."""
    actor, stream = make_detokenizer_actor(SamplingParams(output_kind="delta", **options))
    actor.handle(message)
    await stream.get()
    actor.handle(message)
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    assert not reader.done(), "the first round is not over"
    assert (await reader).outputs[0].token_ids == message.token_ids


@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_rows_go_the_general_way_only_as_long_as_there_is_more_to_tell_of_them(
    monkeypatch: pytest.MonkeyPatch, has_logprobs: bool
) -> None:
    """The first token of each request comes with its times; the batch may stay the same for long after it."""
    process, processed = Detokenizer.process, []

    def note(detokenizer: Detokenizer, handle: int, *more: Any) -> Any:
        processed.append(handle)
        return process(detokenizer, handle, *more)

    monkeypatch.setattr(Detokenizer, "process", note)
    actor, stream = make_detokenizer_actor(SamplingParams(output_kind="delta"))
    handles = [9]
    for token_id in range(5):
        details = [Detail(9)] if token_id == 0 or has_logprobs else []
        actor.handle(NewTokens(handles, [], [token_id], details))
    assert len(processed) == (5 if has_logprobs else 1)
    stream.wake()
    assert (await stream.get()).outputs[0].token_ids == list(range(5))
