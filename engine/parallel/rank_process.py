"""A rank's process: `python -m engine.parallel.rank_process FD`, where FD is a connected socket of rank 0."""

from __future__ import annotations

import logging
import mmap
import signal
import socket
import sys

import torch
import torch.distributed as dist

from engine.comm import Comm, RankLost, TorchComm
from engine.device.device_memory import open_device
from engine.device.kv_cache import allocate_kv_cache, choose_kv_dtype
from engine.device.slot_copier import SlotCopier
from engine.device.weight_moves import list_tensors, move_tensors
from engine.errors import ConfigError
from engine.model import read_model_config
from engine.model.decoder import DecoderModel
from engine.model.sharding import Sharding
from engine.parallel.adapters import RankAdapters
from engine.parallel.commands import (
    Allocate,
    Failed,
    Forward,
    Free,
    Loaded,
    Logits,
    MoveBlocks,
    SlotMap,
    Start,
    receive_command,
    send,
)
from engine.parallel.load import load_shard
from engine.parallel.shared_memory import SharedMemoryComm
from engine.parallel.stage_link import SharedMemoryLink, StageLink, TorchLink
from engine.parallel.step import count_rows, list_sizes, unpack_step

logger = logging.getLogger("troupe.engine")


class Follower:
    """Runs one rank's part of the steps that rank 0 announces."""

    def __init__(self, start: Start, address: str) -> None:
        self._worker = start.worker
        torch.set_num_threads(start.worker.num_threads)
        self._device, _, _ = open_device(start.worker)
        self._comm = connect(start, self._device, address)
        self._before, self._after = link_stages(start)
        self._is_last = start.stage == start.config.pipeline_parallel_size - 1
        config = read_model_config(
            start.config.model, start.config.model_impl, start.config.read_hf_overrides()
        )
        size = start.config.tensor_parallel_size
        sharding = Sharding(
            start.rank, size, self._comm if size > 1 else None, is_sliced=start.config.batch_invariant_tp,
            has_whole_experts=start.config.enable_expert_parallel, layers=start.layers,
        )
        self._model: DecoderModel = load_shard(start.config, start.worker, config, self._device, sharding)
        self._adapters = RankAdapters(self._model, start.config.max_lora_rank)
        self._kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slots: torch.Tensor
        self._copier: SlotCopier

    @torch.inference_mode()
    def follow(self, connection: socket.socket) -> None:
        """Obey rank 0 until it ends.

        Raises:
            RankLost: rank 0, or another rank, has ended.
        """
        send(connection, Loaded())
        while True:
            match receive_command(connection):
                case Forward() as forward:
                    self._run(forward)
                case Logits() as logits:
                    self._compute_logits(logits)
                case Allocate() as command:
                    self._allocate(command)
                case SlotMap() as slots:
                    self._slots = map_slots(slots)
                    self._copier = SlotCopier(
                        self._kv_caches, self._model.list_head_parts(), has_pieces=self._model.ops.has_pieces
                    )
                case MoveBlocks(moves=moves):
                    self._copier.copy(self._slots, moves, self._comm, is_async=False)
                case Free(level=level):
                    self._kv_caches = []
                    self._copier = SlotCopier([], [])
                    if level == 1 and self._device.type != "cpu":
                        move_tensors(list_tensors(self._model), torch.device("cpu"))
                        self._adapters.unbind()
                case Start():
                    raise AssertionError("a rank is started once")
                case command:
                    if (reply := self._adapters.handle(command)) is not None:
                        send(connection, reply)

    def _run(self, command: Forward) -> None:
        flat = torch.empty(sum(list_sizes(command)), dtype=torch.int64, device=self._device)
        stream = None
        if self._before is None:
            self._comm.broadcast(flat)
        else:
            stream = self._model.make_stream(sum(command.query_lens), command.aux_layers)
            self._before.expect(flat, stream).wait()
        ids, positions, metadata, rows = unpack_step(flat, command)
        adapters = self._adapters.find(command.adapters, rows)
        self._model.aux_layers = command.aux_layers
        result = self._model(ids, positions, self._kv_caches, metadata, adapters, received=stream)
        if self._after is not None:
            tensors = (result,) if self._is_last else (flat, result)
            self._after.send(*tensors)

    def _compute_logits(self, command: Logits) -> None:
        size, dtype = self._model.config.hidden_size, self._model.dtype
        hidden = torch.empty(command.num_rows, size, dtype=dtype, device=self._device)
        self._comm.broadcast(hidden)
        rows = torch.empty(count_rows(command.adapters), dtype=torch.int64, device=self._device)
        if command.adapters:
            self._comm.broadcast(rows)
        self._model.compute_logits(hidden, self._adapters.find(command.adapters, rows))

    def _allocate(self, command: Allocate) -> None:
        if self._device.type != "cpu":
            move_tensors(list_tensors(self._model), self._device)
        self._kv_caches = allocate_kv_cache(
            self._model.kv_specs()[self._model.list_held()], command.num_blocks,
            command.block_size, choose_kv_dtype(self._worker), self._device,
        )
        self._model.limit_positions(command.max_model_len)


def map_slots(slots: SlotMap) -> torch.Tensor:
    """Return the slots, [num_slots, slot_bytes] uint8."""
    with open(slots.path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), slots.num_slots * slots.slot_bytes)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    return memory.view(slots.num_slots, slots.slot_bytes)


def connect(start: Start, device: torch.device, address: str) -> Comm:
    """Return the rank's connection to the others, who may reach it at the address."""
    size, num_stages = start.config.tensor_parallel_size, start.config.pipeline_parallel_size
    if start.port:
        store = dist.TCPStore(start.config.master_addr, start.port, start.config.num_ranks)
        return TorchComm(store, start.rank, size, device, start.stage, num_stages, address)
    return SharedMemoryComm(start.rank, size, start.memory, start.sending, start.receiving)


def link_stages(start: Start) -> tuple[StageLink | None, StageLink | None]:
    """Return the rank's links from the stage before and to the next one; None: nothing is sent there."""
    if not start.port:
        return (
            None if start.before is None else SharedMemoryLink(start.before),
            None if start.after is None else SharedMemoryLink(start.after),
        )
    size, num_stages = start.config.tensor_parallel_size, start.config.pipeline_parallel_size
    target = (start.stage + 1) % num_stages
    return (
        TorchLink((start.stage - 1) * size + start.rank) if start.stage else None,
        TorchLink(target * size + start.rank) if num_stages > 1 and (target or not start.rank) else None,
    )


def main() -> int:
    # Ctrl+C in a terminal reaches all processes; rank 0 decides when the others end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="rank process %(process)d: %(levelname)s: %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        start = receive_command(connection)
        assert isinstance(start, Start), "the first command starts the rank"
        is_remote = connection.family != socket.AF_UNIX
        follower = Follower(start, connection.getsockname()[0] if is_remote else start.config.master_addr)
    except RankLost:
        return 0
    except Exception as error:  # the border of the process: rank 0 raises it again
        send(connection, Failed(f"{type(error).__name__}: {error}", isinstance(error, ConfigError)))
        return 1
    try:
        follower.follow(connection)
    except RankLost:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
