"""Commands of rank 0 to the other ranks, and their replies, over one socket per rank.

A frame is the length of the body (uint32, little endian) and the body in MessagePack.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from engine.comm import RankLost
from engine.config import EngineConfig
from engine.core.actor_messages import BlockMove
from engine.parallel.stage_link import LinkEnd
from engine.resolved_config import WorkerConfig

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load the model's part of one rank. The rank replies Loaded or Failed."""

    config: EngineConfig
    worker: WorkerConfig
    stage: int
    rank: int  # in the stage
    layers: tuple[int, int] | None = None  # [first, end) of the stage's; None: all
    port: int = 0  # of the store on 127.0.0.1 that connects the ranks' torch.distributed; 0: shared memory
    memory: int = 0  # descriptors for SharedMemoryComm, if the stage has several ranks
    sending: dict[int, int] = {}
    receiving: dict[int, int] = {}
    before: LinkEnd | None = None  # SharedMemoryLinks from the stage before, and to the next one
    after: LinkEnd | None = None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate the KV cache, and prepare for contexts of up to `max_model_len` tokens."""

    num_blocks: int
    block_size: int
    max_model_len: int


class Free(msgspec.Struct, frozen=True, tag=True):
    """Free the KV cache; with a level of 1 move the weights to the host, as a sleep does."""

    level: int


Segment = tuple[int, int, int]  # an adapter's number, and the start and end of its rows in their list


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Run a step. Its integers follow as one tensor, see `pack_step`."""

    query_lens: list[int]
    seq_lens: list[int]
    num_groups: int  # of layers, each with a block table
    num_columns: int  # of the block tables
    adapters: list[Segment]
    aux_layers: tuple[int, ...]  # see `Model.aux_layers`


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Compute the rank's logits of hidden states, in the first stage.

    They follow as a broadcast tensor [num_rows, hidden size], and the rows of adapters, if there are some, as integers.
    """

    num_rows: int
    adapters: list[Segment]


class OpenAdapter(msgspec.Struct, frozen=True, tag=True):
    """Expect the modules of a new adapter."""

    number: int
    config: dict[str, Any]  # its adapter_config.json


class MeasureModule(msgspec.Struct, frozen=True, tag=True):
    """Reply with the squared lengths of the rows of a changed matrix, see `AdapterBuilder.measure`."""

    number: int
    module: str
    tensors: bytes  # by kind, as safetensors


class PutModule(msgspec.Struct, frozen=True, tag=True):
    """Add a module to an adapter, see `AdapterBuilder.add`."""

    number: int
    module: str
    tensors: bytes  # by kind, as safetensors


class FinishAdapter(msgspec.Struct, frozen=True, tag=True):
    """The adapter has all its modules; steps may name it."""

    number: int


class UnbindAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free what an adapter holds on the device; the next step that names it takes it there again."""

    number: int


class FreeAdapters(msgspec.Struct, frozen=True, tag=True):
    """Free adapters that no step will name again."""

    numbers: list[int]


class SlotMap(msgspec.Struct, frozen=True, tag=True):
    """Map the slots of host memory for blocks of the KV cache, see `engine.transfer.host_store`."""

    path: str
    num_slots: int
    slot_bytes: int


class MoveBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy the rank's KV heads of blocks between its cache and the slots, see `SlotCopier.copy`."""

    moves: list[BlockMove]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The rank is ready for commands."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank could not load the model, and ends."""

    message: str
    is_config_error: bool


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Answers MeasureModule."""

    squares: bytes  # one tensor, as safetensors


AdapterCommand = OpenAdapter | MeasureModule | PutModule | FinishAdapter | UnbindAdapter | FreeAdapters
Command = Start | Allocate | Free | Forward | Logits | SlotMap | MoveBlocks | AdapterCommand
Reply = Loaded | Failed | Measured
_COMMANDS = msgspec.msgpack.Decoder(Command)
_REPLIES = msgspec.msgpack.Decoder(Reply)


def send(connection: socket.socket, message: Command | Reply) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(message)
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except OSError as error:
        raise RankLost(f"a rank has ended: {error}") from error


def receive_command(connection: socket.socket) -> Command:
    """Return the next command."""
    command: Command = _COMMANDS.decode(_receive(connection))
    return command


def receive_reply(connection: socket.socket) -> Reply:
    """Return the next reply."""
    reply: Reply = _REPLIES.decode(_receive(connection))
    return reply


def _receive(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(read_bytes(connection, _LENGTH.size))
    return read_bytes(connection, length)


def read_bytes(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes."""
    parts = []
    while count:
        try:
            part = connection.recv(count)
        except OSError as error:
            raise RankLost(f"a rank has ended: {error}") from error
        if not part:
            raise RankLost("a rank has ended")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
