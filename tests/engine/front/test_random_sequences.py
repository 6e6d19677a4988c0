"""Any sequence of requests, aborts, sleeps, calls, crashes and restarts: no call hangs, and every request ends once.

The cores have a mock worker; one runs in the front's loop, the other behind frames. The full size is run by hand:
`python -m tests.engine.front.test_random_sequences 600`.
"""

import asyncio
import random
import socket
import sys
from collections.abc import Awaitable
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig, EngineError, InvalidRequest, SamplingParams
from engine.cluster.connection import LinkConnection, LocalConnector
from engine.cluster.core_host import CoreHost
from engine.cluster.core_process import serve_link
from engine.messages import AdapterRef
from engine.wire.frames import Link
from engine.worker.mock_worker import MockWorker
from grammar import GrammarSpec
from tests.waiting import wait_until

ACTIONS = [
    *("open",) * 6, "open many", "open grammar", "abort", "cancel", "sleep", "sleep now", "wake", "snapshot", "reset",
    "load", "cancel call", "restart", "crash", "drain",
]  # fmt: skip
EVENTS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 12)), min_size=5, max_size=30)


# A core that crashes while it falls asleep, for the second time.
CRASH_ASLEEP = [
    ("sleep", 3), ("reset", 0), ("open", 2), ("sleep now", 9), ("load", 2), ("crash", 9), ("cancel", 2),
    ("open many", 5), ("crash", 4), ("open", 3), ("sleep", 0), ("drain", 5),
]  # fmt: skip


class FrameConnector:
    """Cores in this process at the other end of a socket."""

    def __init__(self, config: EngineConfig, load_tokenizer: Any) -> None:
        self.host = CoreHost(config, load_tokenizer)
        self._serving: asyncio.Task[None] | None = None

    async def connect(self) -> LinkConnection:
        if self._serving is not None:
            await asyncio.wait([self._serving])
        ours, theirs = [Link(*await asyncio.open_connection(sock=each)) for each in socket.socketpair()]
        self._serving = asyncio.create_task(serve_link(self.host, theirs, False))
        self._serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        return LinkConnection(ours, 20.0)

    def close(self) -> None:
        self.host.close()


class Sequence:
    """Runs events on an engine, and remembers what must end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.readers: dict[str, asyncio.Task[int]] = {}
        self.calls: list[asyncio.Task[Any]] = []

    async def read(self, name: str, params: SamplingParams) -> int:
        """Return the number of last outputs."""
        try:
            outputs = [each async for each in self.engine.generate([5, 6, 7, 8], params, name)]
        except EngineError as error:
            assert not isinstance(error, InvalidRequest), error
            return 1
        return sum(each.finished for each in outputs)

    def call(self, work: Awaitable[Any]) -> None:
        self.calls.append(asyncio.ensure_future(work))

    def act(self, action: str, number: int) -> None:
        engine, name = self.engine, f"{number % max(1, len(self.readers))}"
        match action:
            case "open" | "open many" | "open grammar":
                grammar = GrammarSpec.regex("[a-z]{40}") if action == "open grammar" else None
                kind: Any = ("delta", "final")[number % 2]
                # The mock worker waits for no mask, so that a matcher may fill one only.
                num_tokens, n = 1 if grammar else 1 + 9 * number, 1 + number % 3
                params = SamplingParams(max_tokens=num_tokens, n=n, output_kind=kind, grammar=grammar, ignore_eos=True)
                for _ in range(30 if action == "open many" else 1):
                    name = f"{len(self.readers)}"
                    self.readers[name] = asyncio.create_task(self.read(name, params))
            case "abort":
                self.call(engine.abort(name))
            case "cancel" if self.readers:
                self.readers[name].cancel()
            case "sleep" | "sleep now":
                self.call(engine.sleep(1 + number % 2, drain=action == "sleep"))
            case "wake":
                self.call(engine.wake_up())
            case "snapshot":
                self.call(engine.snapshot(bool(number % 2)))
            case "reset":
                self.call(engine.reset_prefix_cache())
            case "load":
                self.call(engine._client.calls.load_adapter(AdapterRef("a", "", "")))
            case "cancel call" if self.calls:
                self.calls[number % len(self.calls)].cancel()
            case "restart":
                engine.replicas[0].restart()
            case "drain":
                self.call(engine.restart_replica(0))
            case "crash":
                core = engine.replicas[0].connector.host.core  # type: ignore[attr-defined]
                if core is not None:
                    core.scheduler.tell("no message")


async def run_events(connector: Any, events: list[tuple[str, int]]) -> None:
    config = EngineConfig(
        mock_step_ms=0.0, num_blocks=60, max_num_seqs=8, max_restarts=1000, journal=None, core="local"
    )
    memory = mock.Mock(load=mock.Mock(side_effect=[None, InvalidRequest("broken")] * 50))
    with (
        mock.patch("engine.cluster.placement.LocalConnector", connector),
        mock.patch.object(MockWorker, "adapters", memory),
        mock.patch("engine.front.replica.MAX_DELAY_S", 0.0),  # after starts that were interrupted
    ):
        async with Engine(config) as engine:
            sequence = Sequence(engine)
            for action, number in events:
                sequence.act(action, number)
                for _ in range(number * number):
                    await asyncio.sleep(0)
            async with asyncio.timeout(20):
                sequence.call(engine.wake_up())
                await asyncio.wait(sequence.calls)
                await wait_until(lambda: engine.state in ("ready", "sleeping"))
                await engine.wake_up()
                results = await asyncio.gather(*sequence.readers.values(), return_exceptions=True)
                for call in sequence.calls:
                    assert call.cancelled() or isinstance(call.exception(), EngineError | None)
                assert await sequence.read("last", SamplingParams(max_tokens=3, ignore_eos=True)) == 1
                await wait_until(lambda: engine.state == "ready")
                await wait_until(lambda: engine.stats().num_running == 0)
                assert await engine.snapshot() is not None
            assert all(each == 1 or isinstance(each, asyncio.CancelledError) for each in results), results
            client = engine._client
            assert not (client._entries or client._requests or client.waiting._others or client.waiting.has_suspects)
            assert not client.calls and client._num_opening == 0
            assert engine.describe_replicas()[0].num_requests == 0
            stats = engine.stats()
            assert stats.num_unfinished == 0 and stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("connector", [LocalConnector, FrameConnector])
@settings(max_examples=8, deadline=None)
@given(events=EVENTS)
@example(events=CRASH_ASLEEP)
def test_every_request_ends_once_and_no_call_hangs(connector: Any, events: list[tuple[str, int]]) -> None:
    asyncio.run(run_events(connector, events))


def main(count: int, first: int = 0) -> None:
    for seed in range(first, first + count):
        chance = random.Random(seed)
        events = [(chance.choice(ACTIONS), chance.randrange(13)) for _ in range(chance.randrange(5, 30))]
        for connector in (LocalConnector, FrameConnector):
            try:
                asyncio.run(run_events(connector, events))
            except BaseException:
                print("seed", seed, connector.__name__, events)
                raise
    print(f"{count} sequences, each in process and over frames: all ended")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
