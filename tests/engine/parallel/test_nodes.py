"""A model on two nodes, whose ranks connect to each other by TCP; the second node is a process of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from engine import ConfigError, Engine, EngineConfig
from engine.parallel.nodes import _greet
from engine.wire import handshake
from engine.wire.frames import Channel
from engine.wire.handshake import PeerRefused, make_challenge
from engine.wire.link_messages import Welcome
from tests.engine.mixed_requests import TIGHT, make_mixed_requests, run_mixed
from tests.engine.parallel.test_ranks import find_processes

MakeConfig = Callable[..., EngineConfig]
KEY = "a key of the two nodes"


def choose_settings(**changes: Any) -> dict[str, Any]:
    """Flags of both nodes; the address is that of this process alone."""
    address = f"127.{os.getpid() >> 16 & 127}.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}"
    settings = {"nnodes": 2, "master_addr": address, "data_parallel_key": KEY, "tensor_parallel_size": 2}
    return settings | changes


@contextmanager
def run_node(config: EngineConfig, settings: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "app", "serve", "--model", config.model, "--node-rank", "1", *flags]
    # As in a script's background: the process starts with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    node = subprocess.Popen(command)
    signal.signal(signal.SIGINT, before)
    try:
        yield node
    finally:
        node.send_signal(signal.SIGINT)
        node.wait()


async def test_two_nodes_have_the_tokens_of_one_and_survive_the_loss_of_a_rank(make_config: MakeConfig) -> None:
    requests = make_mixed_requests(num_requests=26)[::2]
    shape = TIGHT | {"core": "local", "attention_backend": "native"}
    async with Engine(make_config(**shape, batch_invariant_tp=True)) as engine:
        expected = await run_mixed(engine, requests)
    settings = choose_settings()
    config = make_config(**shape, **settings)
    with run_node(config, settings) as node:
        async with Engine(config) as engine:
            assert await run_mixed(engine, requests) == expected
            (rank,) = find_processes("engine.parallel.rank_process", node.pid)
            os.kill(rank, signal.SIGKILL)
            assert await run_mixed(engine, requests[:5]) == expected[:5]
            assert engine.stats().num_restarts == 1


def test_a_rank_with_another_key_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        introduced = threads.submit(handshake.introduce, Channel(theirs), "rank", "another key", 1)
        assert _greet(ours, KEY) is None
        with pytest.raises(PeerRefused, match="data_parallel_key differs"):
            introduced.result()


def test_a_rank_0_without_the_key_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        channel.send(make_challenge())
        channel.send(Welcome(b"no proof"))
        with pytest.raises(PeerRefused, match="does not know data_parallel_key"):
            handshake.introduce(Channel(theirs), "rank", KEY, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_key": None}, "needs data_parallel_key"),
        ({"nnodes": 3}, "does not divide the 2 ranks"),
        ({"node_rank": 2}, "node_rank=2 must be a number from 0 to 1"),
        ({"kv_offload_gb": 1.0}, "does not work with nnodes above 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 does not work with nnodes above 1"),
    ],
)
def test_nodes_that_cannot_share_a_model_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("model", **choose_settings(**changes))
