"""Messages between the front and a core in another process, beside those of `engine/messages.py`.

front ──Configure──▶ core process ──CoreReady or CoreFailed──▶ front
front ◀──Challenge, Welcome──  ──Greeting──▶ core on another machine      (see `remote.py`)
core ──Heartbeat, KVEvents──▶ front
front ──Sleep──▶ core ──Asleep──▶ front ──WakeUp──▶ core ──CoreReady──▶ front
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    CoreStats,
    DropAdapter,
    KVEvents,
    LoadAdapter,
    NewTokens,
    Refused,
    Reply,
    ResetPrefixCache,
    Sleep,
    TakeSnapshot,
)
from engine.resolved_config import ResolvedConfig

PROTOCOL_VERSION = 8  # raise it with every change of a message or of MESSAGE_TYPES


class Configure(msgspec.Struct, frozen=True):
    """First message to a core process: load this model."""

    config: EngineConfig
    publishes_kv_events: bool


class CoreReady(msgspec.Struct, frozen=True):
    """The core accepts requests."""

    resolved: ResolvedConfig
    timeline: list[tuple[str, float]]  # (phase of the load, seconds)
    runtime: dict[str, str | int]  # which ops it uses, see Executor.describe


class CoreFailed(msgspec.Struct, frozen=True):
    """The core accepts no requests any more. What else it sends while it ends is ignored.

    config    it could not start, and another start would fail in the same way
    crash     it could not start for another reason, or it crashed
    hang      in the front's process, a step does not end, so no other core can replace it; never encoded
    silence   it has sent nothing for too long, which no request causes; never encoded
    """

    message: str
    kind: Literal["config", "crash", "hang", "silence"] = "crash"


class Asleep(msgspec.Struct, frozen=True):
    """The core has freed its memory, or could not wake up because of `error` and is still asleep."""

    error: str | None = None


class WakeUp(msgspec.Struct, frozen=True):
    """Allocate the memory again."""


class Heartbeat(msgspec.Struct, frozen=True):
    """Sent every HEARTBEAT_S, from the first message on."""

    runtime: dict[str, str | int] = {}  # as in CoreReady


class Challenge(msgspec.Struct, frozen=True):
    """First message on a TCP connection, from the server, see `handshake.py`."""

    version: int
    nonce: bytes


class Greeting(msgspec.Struct, frozen=True):
    """Reply of the client to Challenge."""

    version: int
    rank: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True):
    """Reply of the server to Greeting; `error` if it refuses the client."""

    proof: bytes = b""
    publishes_kv_events: bool = False
    error: str | None = None


class UnitRequest(msgspec.Struct, frozen=True):
    """A TcpStore asks its BlockServer. The values of a save follow the message."""

    action: Literal["match", "load", "save", "discard"]
    names: list[bytes]  # of units: hash of the layout, and key
    checksums: list[int] = []  # of a save
    unit_bytes: int = 0


class UnitReply(msgspec.Struct, frozen=True):
    """Reply to each UnitRequest. The values of a load follow the message."""

    count: int = 0  # of a match: units that are held, from the first one
    checksums: list[int | None] = []  # of a load; None: the unit is missing


# The position of a type is its code in a frame.
MESSAGE_TYPES: tuple[type, ...] = (
    *(AddRequest, AbortRequest, TakeSnapshot, ResetPrefixCache, Sleep),
    *(LoadAdapter, DropAdapter, Accepted, Refused, NewTokens, CoreStats, Reply),
    *(Configure, CoreReady, CoreFailed, Asleep, WakeUp, Heartbeat, KVEvents),
    *(Challenge, Greeting, Welcome, UnitRequest, UnitReply),
)
