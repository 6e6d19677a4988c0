"""BlockServer: keeps units in RAM for the TcpStores of any number of cores. It runs in threads of the front.

The least recently used units are dropped when `num_bytes` are full.
"""

from __future__ import annotations

import logging
import socket
from collections import OrderedDict
from contextlib import suppress
from threading import Lock, Thread

from engine.errors import ConfigError
from engine.transfer.tcp_store import TIMEOUT_S
from engine.wire import handshake
from engine.wire.frames import Channel
from engine.wire.link_messages import UnitReply, UnitRequest

logger = logging.getLogger("troupe.engine")


class BlockServer:
    """Listens from its creation to `close`.

    Raises:
        ConfigError: the address is in use, or not one of this machine.
    """

    def __init__(self, address: str, port: int, secret: str, num_bytes: int) -> None:
        self._secret = secret
        self._num_free = num_bytes
        # Checksum, value; last used last
        self._units: OrderedDict[bytes, tuple[int, bytearray]] = OrderedDict()
        self._lock = Lock()  # guards units, free bytes and connections
        self._connections: set[socket.socket] = set()
        try:
            self._listener = socket.create_server((address, port))
        except OSError as error:
            raise ConfigError(f"kv_transfer_config: kv_ip={address!r}, kv_port={port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, name="troupe-blocks", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            for connection in (self._listener, *self._connections):
                with suppress(OSError):  # the peer has closed it
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone does not
            self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                self._connections.add(connection)
            Thread(target=self._serve, args=(connection, peer), name="troupe-blocks", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            channel = Channel(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(TIMEOUT_S)
            handshake.greet(channel, "blocks", self._secret)
            connection.settimeout(None)
            while True:
                self._answer(channel, channel.receive())
        except OSError as error:
            logger.info("the connection of %s to the blocks ended: %s", peer, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, channel: Channel, request: UnitRequest) -> None:
        if not isinstance(request, UnitRequest):
            raise ConnectionError(f"{type(request).__name__} is no request")
        match request.action:
            case "match":
                with self._lock:
                    missing = (at for at, name in enumerate(request.names) if name not in self._units)
                    count = next(missing, len(request.names))
                channel.send(UnitReply(count))
            case "load":
                found = [self._find(name) for name in request.names]
                checksums = [None if unit is None else unit[0] for unit in found]
                channel.send(UnitReply(0, checksums), [unit[1] for unit in found if unit is not None])
            case "save":
                for name, checksum in zip(request.names, request.checksums, strict=False):
                    self._keep(name, checksum, channel.read(request.unit_bytes))
                channel.send(UnitReply())
            case "discard":
                for name in request.names:
                    self._drop(name)
                channel.send(UnitReply())

    def _find(self, name: bytes) -> tuple[int, bytearray] | None:
        with self._lock:
            if name in self._units:
                self._units.move_to_end(name)
            return self._units.get(name)

    def _keep(self, name: bytes, checksum: int, value: bytearray) -> None:
        """Keep a unit. The reader verifies the checksum."""
        self._drop(name)
        with self._lock:
            self._num_free -= len(value)
            self._units[name] = checksum, value
            while self._num_free < 0:
                _, (_, oldest) = self._units.popitem(last=False)
                self._num_free += len(oldest)

    def _drop(self, name: bytes) -> None:
        with self._lock:
            if (unit := self._units.pop(name, None)) is not None:
                self._num_free += len(unit[1])
