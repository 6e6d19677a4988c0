"""TcpStore: a KVConnector over TCP to a BlockServer. Both sides prove that they know a shared secret.

    server ──Challenge(nonce)──▶ client          frame: length of the body (uint32, little endian), body in MessagePack
    server ◀──Hello(nonce, proof, layout)──      values follow Save and Loaded without frames
    server ──Ready(proof)──▶ client              then one reply for each request

The connection is not encrypted: use a private network.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from engine.cluster.frames import NONCE_BYTES, make_proof
from engine.transfer.units import UNIT_TOKENS, Unit, UnitLayout, compute_checksum

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 2**24
VERSION = 1
TIMEOUT_S = 2.0  # for every read and write; then the tokens are computed instead
RETRY_S = 1.0  # after a failure, in which everything is a miss


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """First message of the server."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Reply of the client."""

    nonce: bytes
    proof: bytes
    layout: str
    unit_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Reply of the server to Hello; `error` if it refuses the client."""

    proof: bytes = b""
    error: str | None = None


class Match(msgspec.Struct, frozen=True, tag=True):
    """How many of these units, from the first one, does the server hold?"""

    keys: list[bytes]


class Matched(msgspec.Struct, frozen=True, tag=True):
    """Reply to Match."""

    count: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """Send these units."""

    keys: list[bytes]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Reply to Load: a checksum for each unit, None for those missing. The values of the others follow."""

    checksums: list[int | None]


class Save(msgspec.Struct, frozen=True, tag=True):
    """Keep the units that follow."""

    keys: list[bytes]
    checksums: list[int]


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Forget these units."""

    keys: list[bytes]


class Done(msgspec.Struct, frozen=True, tag=True):
    """Reply to Save and Discard."""


Message = Challenge | Hello | Ready | Match | Matched | Load | Loaded | Save | Discard | Done
_MESSAGES = msgspec.msgpack.Decoder(Message)


class Channel:
    """One connection, with blocking reads and writes.

    Raises:
        OSError: from all methods; the connection is lost, late, or its bytes are no message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, values: Sequence[memoryview | bytearray] = ()) -> None:
        """Send a message and what follows it."""
        body = msgspec.msgpack.encode(message)
        self._connection.sendall(_LENGTH.pack(len(body)) + body)
        for value in values:
            self._connection.sendall(value)

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
        """Return the next message."""
        header = bytearray(_LENGTH.size)
        self.read_into(memoryview(header))
        (length,) = _LENGTH.unpack(header)
        if length > max_bytes:
            raise ConnectionError(f"a message of {length} bytes; at most {max_bytes} are allowed")
        body = bytearray(length)
        self.read_into(memoryview(body))
        try:
            message: Message = _MESSAGES.decode(body)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"a malformed message: {error}") from error
        return message

    def read_into(self, value: memoryview) -> None:
        """Fill memory with the next bytes."""
        while value:
            count = self._connection.recv_into(value)
            if not count:
                raise ConnectionError("the connection was closed")
            value = value[count:]

    def close(self) -> None:
        self._connection.close()


class TcpStore:
    """A client. It connects when it is used, and again after a failure."""

    def __init__(self, address: tuple[str, int], secret: str, layout: UnitLayout) -> None:
        self._address = address
        self._secret = secret.encode()
        self._layout = layout
        self._channel: Channel | None = None
        self._retry_at = 0.0

    def get_num_new_matched_tokens(self, keys: Sequence[bytes]) -> int:
        """As KVConnector."""
        reply = self._call(Match(list(keys)))
        return reply.count * UNIT_TOKENS if isinstance(reply, Matched) else 0

    def start_load_kv(self, units: Sequence[Unit]) -> list[bool]:
        """As KVConnector."""
        reply = self._call(Load([key for key, _ in units]), loads=units)
        if not isinstance(reply, Loaded):
            return [False] * len(units)
        return [
            checksum is not None and compute_checksum(key, parts) == checksum
            for (key, parts), checksum in zip(units, reply.checksums, strict=True)
        ]

    def save_kv(self, units: Sequence[Unit]) -> None:
        """As KVConnector."""
        keys, checksums = [key for key, _ in units], [compute_checksum(*unit) for unit in units]
        self._call(Save(keys, checksums), [part.data for _, parts in units for part in parts])

    def discard_kv(self, keys: Sequence[bytes]) -> None:
        """As KVConnector."""
        self._call(Discard(list(keys)))

    def shutdown(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _call(
        self, message: Message, values: Sequence[memoryview] = (), loads: Sequence[Unit] = ()
    ) -> Message | None:
        """Send a request and return the reply; None shortly after a failure.

        Raises:
            OSError: the connection failed.
        """
        if time.monotonic() < self._retry_at:
            return None
        try:
            if self._channel is None:
                self._channel = self._connect()
            self._channel.send(message, values)
            reply = self._channel.receive()
            if isinstance(reply, Loaded):
                if len(reply.checksums) != len(loads):
                    raise ConnectionError("a reply to another request")
                for (_, parts), checksum in zip(loads, reply.checksums, strict=True):
                    for part in parts if checksum is not None else ():
                        self._channel.read_into(part.data)
            return reply
        except OSError:
            self.shutdown()
            self._retry_at = time.monotonic() + RETRY_S
            raise

    def _connect(self) -> Channel:
        channel = Channel(socket.create_connection(self._address, TIMEOUT_S))
        try:
            challenge = channel.receive()
            if not isinstance(challenge, Challenge) or challenge.version != VERSION:
                raise ConnectionError(f"{self._address} is no block server of version {VERSION}")
            nonce = secrets.token_bytes(NONCE_BYTES)
            proof = make_proof(self._secret, b"client", challenge.nonce, nonce)
            channel.send(Hello(nonce, proof, str(self._layout), self._layout.num_bytes))
            ready = channel.receive()
            expected = make_proof(self._secret, b"server", nonce, challenge.nonce)
            if not isinstance(ready, Ready) or ready.error or not hmac.compare_digest(ready.proof, expected):
                reason = (
                    ready.error if isinstance(ready, Ready) and ready.error else "it does not know the key"
                )
                raise ConnectionError(f"the block server {self._address} refuses or is refused: {reason}")
        except BaseException:
            channel.close()
            raise
        return channel
