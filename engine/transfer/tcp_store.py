"""TcpStore: a KVConnector over TCP to a BlockServer. Frames and handshake are those of `engine.wire`.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from engine.kv_transfer_config import UNIT_TOKENS
from engine.transfer.units import Unit, UnitLayout, compute_checksum
from engine.wire import handshake
from engine.wire.frames import Channel
from engine.wire.link_messages import UnitReply, UnitRequest

TIMEOUT_S = 2.0  # for every read and write; then the tokens are computed instead
RETRY_S = 1.0  # after a failure, in which everything is a miss


class TcpStore:
    """A client. It connects when it is used, and again after a failure."""

    def __init__(self, address: tuple[str, int], secret: str, layout: UnitLayout) -> None:
        self._address = address
        self._secret = secret
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
        connection = socket.create_connection(self._address, TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection)
        try:
            handshake.introduce(channel, "blocks", self._secret)
        except BaseException:
            channel.close()
            raise
        return channel
