"""TcpStore: a KVConnector over TCP to a BlockServer. Frames and greeting are those of `engine.cluster.remote`.

The connection is not encrypted: use a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from engine.kv_transfer_config import UNIT_TOKENS
from engine.transfer.units import Unit, UnitLayout, compute_checksum
from engine.wire.frames import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    make_proof,
    pack_frame,
    read_header,
    unpack_body,
)
from engine.wire.link_messages import (
    PROTOCOL_VERSION,
    Challenge,
    Greeting,
    UnitReply,
    UnitRequest,
    Welcome,
)

TIMEOUT_S = 2.0  # for every read and write; then the tokens are computed instead
RETRY_S = 1.0  # after a failure, in which everything is a miss
NO_RANK = 0  # in a Greeting


class Channel:
    """Frames over a blocking socket. A lost or late connection, or a wrong frame, is an OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any, values: Sequence[memoryview | bytearray] = ()) -> None:
        self._connection.sendall(b"".join(pack_frame(message)))
        for value in values:
            self._connection.sendall(value)

    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> Any:
        length, kind = read_header(bytes(self.read(HEADER_BYTES)), max_bytes)
        return unpack_body(bytes(self.read(length)), kind)

    def read(self, count: int) -> bytearray:
        value = bytearray(count)
        self.read_into(memoryview(value))
        return value

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
        self._unit_bytes = layout.num_bytes
        self._prefix = hashlib.sha256(str(layout).encode()).digest()
        self._channel: Channel | None = None
        self._retry_at = 0.0

    def get_num_new_matched_tokens(self, keys: Sequence[bytes]) -> int:
        return self._call("match", keys).count * UNIT_TOKENS

    def start_load_kv(self, units: Sequence[Unit]) -> list[bool]:
        checksums = self._call("load", [key for key, _ in units], loads=units).checksums
        return [
            checksum is not None and compute_checksum(*unit) == checksum
            for unit, checksum in zip(units, checksums or [None] * len(units), strict=True)
        ]

    def save_kv(self, units: Sequence[Unit]) -> None:
        self._call("save", [key for key, _ in units], saves=units)

    def discard_kv(self, keys: Sequence[bytes]) -> None:
        self._call("discard", keys)

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _call(
        self, action: Any, keys: Sequence[bytes], saves: Sequence[Unit] = (), loads: Sequence[Unit] = ()
    ) -> UnitReply:
        """Return the server's reply; an empty one shortly after a failure.

        Raises:
            OSError: the connection failed.
        """
        if time.monotonic() < self._retry_at:
            return UnitReply()
        checksums = [compute_checksum(*unit) for unit in saves]
        request = UnitRequest(action, [self._prefix + key for key in keys], checksums, self._unit_bytes)
        try:
            if self._channel is None:
                self._channel = self._connect()
            self._channel.send(request, [part.data for _, parts in saves for part in parts])
            reply = self._channel.receive()
            if not isinstance(reply, UnitReply) or len(reply.checksums) != len(loads):
                raise ConnectionError("a reply to another request")
            for (_, parts), checksum in zip(loads, reply.checksums, strict=True):
                for part in parts if checksum is not None else ():
                    self._channel.read_into(part.data)
        except OSError:
            self.shutdown()
            self._retry_at = time.monotonic() + RETRY_S
            raise
        return reply

    def _connect(self) -> Channel:
        channel = Channel(socket.create_connection(self._address, TIMEOUT_S))
        try:
            challenge = channel.receive()
            if not isinstance(challenge, Challenge) or challenge.version != PROTOCOL_VERSION:
                raise ConnectionError(f"{self._address} does not speak version {PROTOCOL_VERSION}")
            nonce = secrets.token_bytes(NONCE_BYTES)
            proof = make_proof(self._secret, b"store", challenge.nonce, nonce)
            channel.send(Greeting(PROTOCOL_VERSION, NO_RANK, nonce, proof))
            welcome = channel.receive()
            expected = make_proof(self._secret, b"server", nonce, challenge.nonce)
            if not isinstance(welcome, Welcome) or not hmac.compare_digest(welcome.proof, expected):
                raise ConnectionError(f"{self._address}: {getattr(welcome, 'error', None) or 'wrong proof'}")
        except BaseException:
            channel.close()
            raise
        return channel
