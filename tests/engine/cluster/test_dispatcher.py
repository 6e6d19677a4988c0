"""Dispatcher: where requests go after a crash, with replicas and a front that only note what they get."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.cluster.dispatcher import Dispatcher
from engine.cluster.prefills import Prefills
from engine.cluster.router import Router
from engine.errors import EngineDead
from engine.messages import (
    Accepted,
    AddRequest,
    CoreStats,
    Detail,
    NewCompletion,
    NewTokens,
    Refused,
    TakeSnapshot,
)
from engine.metrics import Metrics
from engine.sampling_params import SamplingParams


class FakeReplica:
    """Notes what is sent to it."""

    def __init__(self, index: int, max_model_len: int = 1000, is_prefill_only: bool = False) -> None:
        self.index, self.max_model_len, self.is_prefill_only = index, max_model_len, is_prefill_only
        self.state, self.fingerprint, self.stats = "ready", "", CoreStats()
        self.sent: list[Any] = []

    @property
    def is_up(self) -> bool:
        return self.state == "ready"

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def list_held(self) -> list[int]:
        return [each.completions[0].handle for each in self.sent if isinstance(each, AddRequest)]


def make_dispatcher(*replicas: FakeReplica) -> tuple[Any, list[Any]]:
    delivered: list[Any] = []
    router = Router("round_robin", 16)
    dispatcher: Any = Dispatcher(replicas, router, Metrics(), Prefills(router, 1))  # type: ignore[arg-type]
    dispatcher.client = SimpleNamespace(
        deliver=delivered.append, detokenizer=SimpleNamespace(forget=lambda source: None)
    )
    for replica in replicas:
        dispatcher.note_ready(replica)
    return dispatcher, delivered


def make_message(handle: int, num_tokens: int = 4) -> AddRequest:
    return AddRequest(f"{handle}", [5] * num_tokens, SamplingParams(), [NewCompletion(handle, 0)])


def crash(dispatcher: Any, replica: FakeReplica) -> None:
    replica.state = "starting"
    dispatcher.note_down(replica, "it crashed", is_crash=True)


def restart(dispatcher: Any, replica: FakeReplica) -> None:
    replica.sent, replica.state = [], "ready"
    dispatcher.note_ready(replica)


def test_many_suspects_run_again_one_by_one_in_time_linear_in_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, count, num_looks = FakeReplica(0), 600, 0
    dispatcher, delivered = make_dispatcher(replica)
    list_ready = dispatcher._list_ready

    def count_looks(entry: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return list_ready(entry)

    monkeypatch.setattr(dispatcher, "_list_ready", count_looks)
    for handle in range(1, count + 1):
        dispatcher.send(make_message(handle))
        dispatcher.receive(replica, Accepted(handle))
    crash(dispatcher, replica)
    restart(dispatcher, replica)
    for handle in range(1, count + 1):
        assert replica.list_held() == [*range(1, handle + 1)], "one more after each first token"
        first = Detail(handle, queue_time_s=0.0)
        dispatcher.receive(replica, NewTokens([handle], [], [7], [first]))
    assert num_looks < 5 * count
    crash(dispatcher, replica)
    restart(dispatcher, replica)
    assert replica.list_held() == [1] and not any(isinstance(each, Refused) for each in delivered)


def test_a_request_goes_only_where_its_tokens_have_room() -> None:
    long, short = FakeReplica(0, 100), FakeReplica(1, 50)
    dispatcher, delivered = make_dispatcher(long, short)
    for handle in (1, 2):
        dispatcher.send(make_message(handle, 80))
        dispatcher.receive(long, Accepted(handle))
    assert long.list_held() == [1, 2] and not short.sent
    long.state = "starting"
    dispatcher.note_down(long, "it was killed", is_crash=False)
    dispatcher.send(make_message(3))
    assert short.list_held() == [3], "those that wait for the other replica hold nobody up"
    long.max_model_len = 60  # it has less memory now
    restart(dispatcher, long)
    ends = [each for message in delivered if isinstance(message, NewTokens) for each in message.details]
    assert [each.handle for each in ends] == [1, 2] and "the context of the replicas" in str(ends[0].error)
    assert not long.sent and not dispatcher._waiting


def test_a_refused_prefill_goes_on_to_a_replica_that_answers() -> None:
    prefill, decode = FakeReplica(0, is_prefill_only=True), FakeReplica(1)
    dispatcher, _ = make_dispatcher(prefill, decode)
    dispatcher.send(make_message(1, 40))
    (handle,) = prefill.list_held()
    assert handle < 0 and not decode.sent
    dispatcher.receive(prefill, Refused(handle, "internal", "an image could not be encoded"))
    assert decode.list_held() == [1]


async def test_a_call_waits_for_no_replica_that_has_ended() -> None:
    dispatcher, _ = make_dispatcher(FakeReplica(0))
    call = dispatcher.call(lambda call_id: TakeSnapshot(call_id))
    (replica,) = dispatcher._replicas
    replica.send = lambda message: dispatcher.note_end(replica)
    with pytest.raises(EngineDead, match="no replica is running"):
        await call
