"""Ranks: rank 0's side of the other ranks' processes.

Ranks.start ─▶ processes load their part, beside rank 0 ─▶ wait_loaded ─▶ allocate ─▶ exchange ... ─▶ close
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.parallel.comm import Comm, RankLost, TorchComm
from engine.parallel.commands import (
    Allocate,
    Command,
    Failed,
    Free,
    Reply,
    SlotMap,
    Start,
    receive_reply,
    send,
)
from engine.parallel.shared_memory import SharedMemoryComm, make_memory, make_pipes
from engine.resolved_config import CacheConfig, WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
EXIT_TIMEOUT_S = 5.0


class Ranks:
    """The processes of ranks 1 to size - 1, and rank 0's Comm.

    Attributes:
        is_broken: a rank ended, or an exchange was interrupted; only a new start helps.
    """

    def __init__(self, config: EngineConfig, worker: WorkerConfig, size: int) -> None:
        self.is_broken = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._lock = Lock()  # of sending
        self.comm = self._start(config, worker, size)

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
        """Allocate the KV cache on the other ranks."""
        self.send(Allocate(cache.num_blocks, cache.block_size, max_model_len))

    def open_slots(self, slots: SlotMap) -> None:
        """Let the other ranks map slots for blocks."""
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
        try:
            with self._lock:
                for connection in self._connections:
                    send(connection, command)
        except RankLost:
            self.is_broken = True
            raise

    def ask(self, command: Command) -> list[Reply]:
        """Send a command and return the other ranks' replies. Only the thread that loads adapters calls it.

        Raises:
            RankLost: a rank has ended.
        """
        self.send(command)
        return self._receive()

    @contextmanager
    def exchange(self, command: Command) -> Iterator[Comm]:
        """Send a command; all ranks exchange tensors inside the block.

        Raises:
            RankLost: a rank has ended.
        """
        if self.is_broken:
            raise RankLost("a rank of this model has ended")
        self.is_broken = True  # unless the block ends
        self.send(command)
        yield self.comm
        self.is_broken = False

    def check(self) -> None:
        """Check that all ranks run.

        Raises:
            RankLost: one has ended.
        """
        for rank, process in enumerate(self._processes, start=1):
            if process.poll() is not None:
                self.is_broken = True
                raise RankLost(f"rank {rank} has ended with exit code {process.returncode}")

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        self.comm.close()
        for process in self._processes:
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, config: EngineConfig, worker: WorkerConfig, size: int) -> Comm:
        if worker.device == "cuda":
            store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
            for rank in range(1, size):
                self._launch(Start(config, worker, rank, size, store.port), [])
            return TorchComm(store, 0, size, torch.device("cuda", 0))
        memory, (sending, receiving) = make_memory(size), make_pipes(size)
        for rank in range(1, size):
            theirs = [memory, *sending[rank].values(), *receiving[rank].values()]
            self._launch(Start(config, worker, rank, size, 0, memory, sending[rank], receiving[rank]), theirs)
        for descriptors in (*sending[1:], *receiving[1:]):
            for descriptor in descriptors.values():
                os.close(descriptor)  # else the end of a rank would not be seen
        return SharedMemoryComm(0, size, memory, sending[0], receiving[0])

    def _receive(self) -> list[Reply]:
        try:
            return [receive_reply(connection) for connection in self._connections]
        except RankLost:
            self.is_broken = True
            raise

    def _launch(self, start: Start, descriptors: list[int]) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            command = [sys.executable, "-m", "engine.parallel.rank_process", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *descriptors],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | _choose_device(start),
            )
        self._processes.append(process)
        self._connections.append(ours)
        send(ours, start)


def _choose_device(start: Start) -> dict[str, str]:
    """Return the environment in which a rank sees its own CUDA device only; rank 0 uses the first one.

    Raises:
        ConfigError: there are fewer devices than ranks.
    """
    if start.worker.device != "cuda":
        return {}
    count = torch.cuda.device_count()
    if start.rank >= count:
        raise ConfigError(
            f"tensor_parallel_size={start.size} needs as many CUDA devices, and {count} are visible"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[start.rank] if len(visible) == count else str(start.rank)}
