"""Client: where requests go, and what becomes of them, with replicas that only note what they get."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine import EngineDead, InvalidRequest, RequestOutput
from engine.front.client import Client
from engine.front.completion import NoText
from engine.front.router import Router
from engine.front.streams import OutputStream
from engine.front.waiting_requests import NUM_UNHEARD
from engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    CoreStats,
    Detail,
    NewCompletion,
    NewTokens,
    Refused,
)
from engine.metrics import Metrics
from engine.sampling_params import SamplingParams
from tests.waiting import wait_until

NUM_SEATS = 4
TOKENIZER: Any = SimpleNamespace(eos_token_ids=(0,), make_text=lambda *_: NoText(), token_piece=lambda token_id: "")


class FakeReplica:
    """Notes what is sent to it."""

    def __init__(self, index: int, max_model_len: int = 1000, is_prefill_only: bool = False) -> None:
        self.index, self.max_model_len, self.is_prefill_only = index, max_model_len, is_prefill_only
        self.state, self.fingerprint, self.stats = "ready", "", CoreStats()
        self.max_num_seqs, scheduler = NUM_SEATS, SimpleNamespace(policy="fcfs")
        self.ready = SimpleNamespace(resolved=SimpleNamespace(scheduler=scheduler))
        self.sent: list[Any] = []

    @property
    def is_up(self) -> bool:
        return self.state == "ready"

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def list_held(self) -> list[int]:
        return [each.completions[0].handle for each in self.sent if isinstance(each, AddRequest)]


class House:
    """A client with its replicas, and the requests that it was given."""

    def __init__(self, *replicas: FakeReplica) -> None:
        self.replicas, self.metrics = replicas, Metrics()
        self.client = Client(replicas, Router("round_robin", 16), self.metrics, 1)  # type: ignore[arg-type]
        self.streams: dict[int, OutputStream] = {}
        self.opening: dict[int, asyncio.Task[Any]] = {}
        for replica in replicas:
            self.client.note_ready(replica)  # type: ignore[arg-type]

    async def open(self, *handles: int, num_tokens: int = 4, **params: Any) -> None:
        sampling = SamplingParams(**({"output_kind": "delta"} | params))
        completions = [NewCompletion(handle, 0) for handle in handles]
        message = AddRequest(f"{handles[0]}", [5] * num_tokens, sampling, completions)
        stream = OutputStream(message, None, time.monotonic(), TOKENIZER, self.metrics)
        self.streams |= dict.fromkeys(handles, stream)
        self.opening[handles[0]] = asyncio.create_task(self.client.open(message, stream))
        await asyncio.sleep(0)

    async def accept(self, replica: FakeReplica, *handles: int) -> None:
        """The core queues these requests, and makes a step."""
        for handle in handles:
            self.receive(replica, Accepted(handle))
        self.receive(replica, CoreStats())
        await asyncio.sleep(0)

    def receive(self, replica: FakeReplica, message: Any) -> None:
        self.client.receive(replica, message)  # type: ignore[arg-type]

    def give(self, replica: FakeReplica, *handles: int, is_first: bool = False, **detail: Any) -> None:
        """One token for each, at once."""
        if is_first:
            detail["queue_time_s"] = 0.0
        details = [Detail(handle, **detail) for handle in handles] if detail else []
        self.receive(replica, NewTokens(list(handles), [], [7] * len(handles), details))
        self.client.take_tokens()

    async def read(self, handle: int) -> RequestOutput:
        async with asyncio.timeout(5):
            return await self.streams[handle].get()

    def end(self, replica: FakeReplica, is_crash: bool = True) -> None:
        replica.state = "starting"
        self.client.note_down(replica, "it crashed", is_crash)  # type: ignore[arg-type]

    async def restart(self, replica: FakeReplica) -> None:
        replica.sent, replica.state = [], "ready"
        self.client.note_ready(replica)  # type: ignore[arg-type]
        await wait_until(lambda: not self.client.waiting._num_to_place)

    def is_empty(self) -> bool:
        client = self.client
        is_idle = not (client._entries or client._prefills or client._num_opening)
        return is_idle and not (client.waiting._others or client.waiting.has_suspects)


@pytest.mark.parametrize("num_accepted", [3000, 200])
async def test_only_what_may_have_run_is_suspected_and_recovery_is_short(num_accepted: int) -> None:
    """Of 3,000 requests the core ran a few. Suspects find a free seat; then the others follow, in short turns.

    Others than the first wait there, too, whether or not the core could still say that it has them.
    """
    replica, count = FakeReplica(0), 3000
    house = House(replica)
    for handle in range(1, count + 1):
        await house.open(handle)
    await house.accept(replica, *range(1, num_accepted + 1))
    house.give(replica, 1, 2, is_first=True)
    house.give(replica, 1, 2)
    start = time.thread_time()
    house.end(replica)
    replica.sent, replica.state = [], "ready"
    house.client.note_ready(replica)  # type: ignore[arg-type]
    pause_s = time.thread_time() - start
    await wait_until(lambda: not house.client.waiting._num_to_place)
    num_suspects = NUM_SEATS + NUM_UNHEARD
    assert 1 in replica.list_held() and len(replica.sent) <= NUM_SEATS and pause_s < 0.1
    for handle in range(1, num_suspects + 1):
        assert handle in replica.list_held()
        house.give(replica, handle, is_first=True)
    await wait_until(lambda: len(replica.sent) == count)
    first = next(each for each in replica.sent if each.completions[0].handle == 1)
    assert first.completions[0].generated_token_ids == [7, 7]


async def test_a_request_goes_only_where_its_tokens_have_room() -> None:
    long, short = FakeReplica(0, 100), FakeReplica(1, 50)
    house = House(long, short)
    for handle in (1, 2):
        await house.open(handle, num_tokens=80)
    await house.accept(long, 1, 2)
    assert long.list_held() == [1, 2] and not short.sent
    house.end(long, is_crash=False)
    await house.open(3)
    assert short.list_held() == [3], "those that wait for the other replica hold nobody up"
    long.max_model_len = 60  # it has less memory now
    await house.restart(long)
    for handle in (1, 2):
        assert "the context of the replicas" in str((await house.read(handle)).outputs[0].error)
    with pytest.raises(InvalidRequest, match="the context of the replicas"):
        await house.open(4, num_tokens=80)
        await house.opening[4]
    assert not long.sent and [*house.client._entries] == [3]


@pytest.mark.parametrize("end", ["refused", "computed", "replica lost", "aborted"])
async def test_a_request_leaves_the_replica_that_computes_its_prompt(end: str) -> None:
    prefill, decode = FakeReplica(0, is_prefill_only=True), FakeReplica(1)
    house = House(prefill, decode)
    await house.open(1, num_tokens=40)
    (handle,) = prefill.list_held()
    assert handle < 0 and not decode.sent
    if end == "refused":
        house.receive(prefill, Refused(handle, "internal", "an image could not be encoded"))
    elif end == "computed":
        house.give(prefill, handle, finish_reason="length")
    elif end == "replica lost":
        house.end(prefill, is_crash=False)
        await asyncio.sleep(0)
    else:
        house.client.abort("1")
        assert prefill.sent[-1] == AbortRequest([handle]) and house.is_empty()
        return
    assert decode.list_held() == [1]
    await house.accept(decode, 1)
    house.give(decode, 1, is_first=True, finish_reason="length")
    assert (await house.read(1)).outputs[0].token_ids == [7] and house.is_empty()


@pytest.mark.parametrize("when", ["opening", "running", "waiting", "suspected"])
async def test_an_abort_ends_a_request_at_once_wherever_it_is(when: str) -> None:
    replica = FakeReplica(0)
    house = House(replica)
    await house.open(8)
    await house.open(1, 2, n=2)
    await house.accept(replica, 8)
    if when != "opening":
        await house.accept(replica, 1)
        house.give(replica, 8, 1, 2, is_first=True)
    if when in ("waiting", "suspected"):
        house.end(replica, is_crash=when == "suspected")
    house.client.abort("1")
    output = await house.read(1)
    assert [each.finish_reason for each in output.outputs] == ["abort", "abort"] and output.finished
    assert (AbortRequest([1, 2]) in replica.sent) is (when in ("opening", "running"))
    house.give(replica, 1, 2)  # what the core has computed meanwhile is dropped
    assert house.metrics.finished["abort"] == 2 and [*house.client._entries] == [8]
    await house.opening[1]
    assert house.client.make_stats().num_waiting_for_grammar == 0


async def test_steps_that_come_together_are_read_one_after_another() -> None:
    """A core process may have written two frames before the front could read one."""
    replica = FakeReplica(0)
    house = House(replica)
    await house.open(1)
    await house.accept(replica, 1)
    house.give(replica, 1, is_first=True)
    assert (await house.read(1)).outputs[0].token_ids == [7]
    await wait_until(lambda: not house.client._pacing._is_busy)
    reader = asyncio.create_task(house.read(1))
    await asyncio.sleep(0)
    for token_id in (8, 9):
        house.receive(replica, NewTokens([1], [], [token_id]))
    assert [(await reader).outputs[0].token_ids, (await house.read(1)).outputs[0].token_ids] == [[8], [9]]


async def test_a_stop_string_ends_a_completion_and_the_core_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoText, "feed_token", lambda self, token_id: "x")
    replica = FakeReplica(0)
    house = House(replica)
    await house.open(1, stop="xxx")
    await house.open(2)
    await house.accept(replica, 1, 2)
    house.give(replica, 1, 2, is_first=True)
    house.receive(replica, NewTokens([1, 2], [4, 4], [7] * 8))
    house.client.take_tokens()
    completion = (await house.read(1)).outputs[0]
    assert (completion.stop_reason, completion.token_ids) == ("xxx", [7, 7, 7])
    assert replica.sent[-1] == AbortRequest([1], "stop")
    house.give(replica, 1, 2)
    assert len((await house.read(2)).outputs[0].token_ids) == 6


async def test_all_that_wait_fail_before_others_could_take_their_places() -> None:
    replica = FakeReplica(0)
    house = House(replica)
    for handle in range(1, 9):
        await house.open(handle)
    await house.accept(replica, *range(1, 9))
    house.end(replica)
    replica.sent, replica.state = [], "ready"
    house.client.fail_all(EngineDead("it hangs"))
    for handle in range(1, 9):
        with pytest.raises(EngineDead):
            await house.read(handle)
    assert house.is_empty() and not any(isinstance(each, AddRequest) for each in replica.sent)


async def test_a_call_waits_for_no_replica_that_has_ended() -> None:
    house = House(FakeReplica(0))
    (replica,) = house.replicas
    replica.send = lambda message: house.client.note_end(replica)  # type: ignore
    with pytest.raises(EngineDead, match="no replica is running"):
        await house.client.calls.take_snapshot(with_blocks=False)


async def test_an_error_in_the_front_fails_its_requests_and_the_next_ones_are_served() -> None:
    replica = FakeReplica(0)
    house = House(replica)
    await house.open(1)
    await house.accept(replica, 1)
    house.receive(replica, NewTokens([1], [], [7, 7]))
    with pytest.raises(EngineDead, match="the engine crashed: ValueError"):
        await house.read(1)
    assert replica.sent[-1] == AbortRequest([1]) and house.is_empty()
    await house.open(2)
    await house.accept(replica, 2)
    house.give(replica, 2, is_first=True, finish_reason="length")
    assert (await house.read(2)).finished
