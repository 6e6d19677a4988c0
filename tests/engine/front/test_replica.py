"""Replica: which ends of its core it survives. The cores are scripts."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.cluster.connection import Connection, End
from engine.front.replica import Replica
from engine.wire.link_messages import CoreReady
from tests.waiting import wait_until


class FakeCore(Connection):
    """Is ready at once, and ends when told."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def send(self, message: Any) -> None:
        """Ignore it."""

    async def run(self, handle: Callable[[Any], None]) -> End:
        resolved: Any = SimpleNamespace(
            fingerprint="", max_model_len=9, kv_role=None, scheduler=SimpleNamespace(max_num_seqs=1)
        )
        handle(CoreReady(resolved, [], {}))
        return await self._ended

    def abort(self) -> None:
        self._ended.set_result(End("it was restarted"))

    def crash(self) -> None:
        self._ended.set_result(End("it crashed", RuntimeError("broken")))


class FakeConnector:
    async def connect(self) -> FakeCore:
        return FakeCore()

    def close(self) -> None:
        """There is nothing to free."""


async def test_a_dead_replica_is_started_again_by_hand_and_has_all_its_restarts_then() -> None:
    causes: list[str] = []
    replica = Replica(
        *(0, FakeConnector(), 1, lambda *_: None, lambda *_: None, lambda _: None),
        lambda _, cause, __: causes.append(cause),
    )
    running = asyncio.create_task(replica.run())
    for num_restarts in range(4):
        await wait_until(lambda n=num_restarts: (replica.state, replica.num_restarts) == ("ready", n))
        assert isinstance(replica.connection, FakeCore)
        replica.connection.crash()
        if num_restarts % 2:
            await wait_until(lambda: replica.state == "dead")
            replica.restart()
    await wait_until(lambda: (replica.state, replica.num_restarts) == ("ready", 4))
    assert causes == ["it crashed"] * 4 and not running.done()
    running.cancel()
    await asyncio.wait([running])
