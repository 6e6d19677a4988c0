"""Ranks: rank 0's side of the other ranks' processes.

Ranks.start ─▶ processes load their part, beside rank 0 ─▶ wait_loaded ─▶ allocate ─▶ exchange ... ─▶ close

    stage 0: ranks 0, 1    stage 1: ranks 2, 3    ...     commands go from rank 0 to all others,
             0 ────────────────────▶ 2 ─▶ ... ─▶ 0        hidden states from stage to stage
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock, Thread

import msgspec
import torch
from torch import Tensor

from engine.comm import Comm, RankLost, TorchComm, open_store
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.parallel.commands import (
    Allocate,
    Command,
    Failed,
    Free,
    Logits,
    Reply,
    SlotMap,
    Start,
    receive_reply,
    send,
)
from engine.parallel.nodes import accept_ranks, choose_device, launch
from engine.parallel.shared_memory import SharedMemoryComm, make_memory, make_pipes
from engine.parallel.stage_link import Arrival, LinkEnd, SharedMemoryLink, StageLink, TorchLink, make_link
from engine.parallel.stages import count_message_bytes, split_layers
from engine.resolved_config import CacheConfig, WorkerConfig

DRAIN_POLL_S = 0.0005


class Ranks:
    """The processes of the other ranks, and rank 0's connections to them.

    A thread watches the connections. When one closes, the thread ends all ranks, so that every wait for a rank ends.

    Attributes:
        layers: [first, end) of each stage's layers.
        comm: exchanges tensors with the other ranks of the first stage; None: there are none.

    Raises:
        ConfigError: the model's layers cannot be divided into that many stages.
    """

    def __init__(self, config: EngineConfig, worker: WorkerConfig, model: ModelConfig) -> None:
        self.layers: list[tuple[int, int]] = []
        if config.pipeline_parallel_size > 1:
            self.layers = split_layers(model, config.pipeline_parallel_size)
        self.comm: Comm | None = None
        self._size = config.tensor_parallel_size  # ranks of a stage
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # processes of this machine, by rank
        self._connections: list[socket.socket] = []  # to ranks 1, 2, ... in this order
        self._loss: str | None = None  # the reason why the ranks have ended
        self._is_exchanging = False
        self._lock = Lock()  # held while a command is sent
        self._results: StageLink | None = None  # link from the last stage; None: there is one stage
        self._next: StageLink | None = None  # link to the second stage
        self._expected: deque[Arrival] = deque(maxlen=config.pipeline_parallel_size)  # the latest steps
        self._watcher = Thread(target=self._watch, name="troupe-ranks", daemon=True)
        try:
            if worker.device == "cuda" or config.nnodes > 1:
                self._start_torch(config, worker)
            else:
                self._start_processes(config, worker, count_message_bytes(config, worker, model))
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    @property
    def is_broken(self) -> bool:
        """Whether a rank ended, or an exchange was interrupted; only a new start helps."""
        return self._loss is not None or self._is_exchanging

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded their part of the model.

        Raises:
            ConfigError: a rank could not load it.
            RankLost: a rank ended.
        """
        for reply in self._receive():
            if isinstance(reply, Failed):
                raise (ConfigError if reply.is_config_error else RankLost)(reply.message)

    def allocate(self, cache: CacheConfig, max_model_len: int) -> None:
        self.send(Allocate(cache.num_blocks, cache.block_size, max_model_len))

    def open_slots(self, slots: SlotMap) -> None:
        self.send(slots)

    def free(self, level: int) -> None:
        """Free the KV cache on the other ranks, and for a sleep of level 1 their device's weights."""
        if not self.is_broken:
            self.send(Free(level))

    def send(self, command: Command) -> None:
        """Send a command to the other ranks. Any thread may call it.

        Raises:
            RankLost: a rank has ended.
        """
        connections = self._connections
        if isinstance(command, Logits):
            connections = connections[: self._size - 1]
        with self._note_loss(), self._lock:
            for connection in connections:
                send(connection, command)

    def ask(self, command: Command) -> list[Reply]:
        """Send a command and return the other ranks' replies. Only the thread that loads adapters calls it."""
        self.send(command)
        return self._receive()

    @contextmanager
    def exchange(self, command: Command) -> Iterator[Comm | None]:
        """Send a command; all ranks exchange tensors inside the block."""
        if self.is_broken:
            raise RankLost(self._loss or "an exchange of ranks was interrupted")
        self._is_exchanging = True  # stays set if the block raises an error
        self.send(command)
        yield self.comm
        self._is_exchanging = False

    def pass_on(self, integers: Tensor, stream: Tensor, hidden: Tensor) -> Arrival:
        """Send a step to the second stage. Returns the arrival of its hidden states from the last one."""
        assert self._next is not None and self._results is not None, "there are several stages"
        self._next.send(integers, stream)
        arrival = self._results.expect(hidden)
        self._expected.append(arrival)
        return arrival

    @torch.inference_mode()
    def drain(self) -> None:
        """Wait for the steps in flight and drop their results: the core that planned them has crashed."""
        with suppress(RankLost), self._note_loss():
            for arrival in self._expected:
                while not arrival.is_done():
                    self.check()
                    time.sleep(DRAIN_POLL_S)
                arrival.wait()
        self._expected.clear()

    def check(self) -> None:
        """Check that all ranks run."""
        if self._loss is not None:
            raise RankLost(self._loss)

    def close(self) -> None:
        self._loss = self._loss or "the ranks were ended"
        self._end_all()
        if self._watcher.is_alive():
            self._watcher.join()
        for connection in self._connections:
            connection.close()
        for end in (self.comm, self._next, self._results):
            if end is not None:
                end.close()

    def _start_torch(self, config: EngineConfig, worker: WorkerConfig) -> None:
        size, num_stages = self._size, config.pipeline_parallel_size
        remote = accept_ranks(config) if config.nnodes > 1 else {}
        store = open_store(config.master_addr, config.num_ranks)
        for number in range(1, config.num_ranks):
            stage, rank = divmod(number, size)
            start = Start(config, worker, stage, rank, self._list_layers(stage), store.port)
            if (connection := remote.get(number)) is None:
                self._launch(start, [])
            else:
                self._connections.append(connection)
                # Do not send the key to another machine.
                theirs = replace(config, nnodes=1, data_parallel_key=None, distributed_executor_backend="mp")
                send(connection, msgspec.structs.replace(start, config=theirs))
        device = torch.device("cuda:0" if worker.device == "cuda" else "cpu")
        comm = TorchComm(store, 0, size, device, 0, num_stages, config.master_addr)
        self.comm = comm if size > 1 else None
        if num_stages > 1:
            self._next, self._results = TorchLink(size), TorchLink(size * (num_stages - 1))

    def _start_processes(self, config: EngineConfig, worker: WorkerConfig, message_bytes: int) -> None:
        size = self._size
        links = _make_links(config.pipeline_parallel_size, size, message_bytes)
        for stage in range(config.pipeline_parallel_size):
            memory, (sending, receiving) = make_memory(size), make_pipes(size)
            for rank in range(size):
                before, after = links.get((stage, rank), (None, None))
                if stage == rank == 0:
                    continue
                ends = [end for end in (before, after) if end is not None]
                theirs = [memory, *sending[rank].values(), *receiving[rank].values()]
                theirs += [descriptor for end in ends for descriptor in (end.memory, end.pipe)]
                layers = self._list_layers(stage)
                self._launch(
                    Start(
                        *(config, worker, stage, rank, layers, 0),
                        *(memory, sending[rank], receiving[rank], before, after),
                    ),
                    theirs,
                )
                for descriptor in theirs[1:]:
                    # A pipe reports the end of a rank only if this process has closed its copy
                    os.close(descriptor)
            if stage == 0 and size > 1:
                self.comm = SharedMemoryComm(0, size, memory, sending[0], receiving[0])
            else:
                os.close(memory)
        before, after = links.get((0, 0), (None, None))
        if before is not None and after is not None:
            self._results, self._next = SharedMemoryLink(before), SharedMemoryLink(after)

    def _list_layers(self, stage: int) -> tuple[int, int] | None:
        return self.layers[stage] if self.layers else None

    def _receive(self) -> list[Reply]:
        with self._note_loss():
            return [receive_reply(connection) for connection in self._connections]

    @contextmanager
    def _note_loss(self) -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            self._loss = self._loss or str(error)
            raise

    def _watch(self) -> None:
        """Wait until a rank ends, and end the others."""
        poll = select.poll()
        ranks = {connection.fileno(): rank for rank, connection in enumerate(self._connections, start=1)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)
        rank = ranks[poll.poll()[0][0]]
        process = self._processes.get(rank)
        code = "" if process is None else f" with exit code {process.wait()}"
        self._loss = self._loss or f"rank {rank} has ended{code}"
        self._end_all()

    def _end_all(self) -> None:
        """Kill the processes of this machine, and close the connections to other nodes."""
        for connection in self._connections:
            with suppress(OSError):  # the connection is closed already
                connection.shutdown(socket.SHUT_RDWR)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def _launch(self, start: Start, descriptors: list[int]) -> None:
        ours, theirs = socket.socketpair()
        self._connections.append(ours)
        number = len(self._connections)
        self._processes[number] = launch(theirs, _choose_device(start), descriptors)
        send(ours, start)


def _choose_device(start: Start) -> dict[str, str]:
    """Return the environment in which a rank sees its own CUDA device only; rank 0 uses the first one."""
    if start.worker.device != "cuda":
        return {}
    count, config = torch.cuda.device_count(), start.config
    number = start.stage * config.tensor_parallel_size + start.rank
    if number >= count:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} and pipeline_parallel_size="
            f"{config.pipeline_parallel_size} need {config.ranks_per_node} CUDA devices on each machine, and {count} "
            "are visible"
        )
    return choose_device(number)


def _make_links(
    num_stages: int, size: int, message_bytes: int
) -> dict[tuple[int, int], tuple[LinkEnd | None, LinkEnd | None]]:
    """Return (stage, rank) -> links from the stage before and to the next one.

    Each rank sends to the same rank of the next stage. The last stage returns to rank 0 alone.
    """
    before: dict[tuple[int, int], LinkEnd] = {}
    after: dict[tuple[int, int], LinkEnd] = {}
    for stage in range(num_stages if num_stages > 1 else 0):
        target = (stage + 1) % num_stages
        for rank in range(size if target else 1):
            after[stage, rank], before[target, rank] = make_link(num_stages, message_bytes)
    return {place: (before.get(place), after.get(place)) for place in before | after}
