"""BlockServer: keeps units in RAM for the TcpStores of any number of cores. It runs in threads of the front.

The least recently used units are dropped when `num_bytes` are full. Units of different layouts are kept apart.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
from collections import OrderedDict
from contextlib import suppress
from threading import Lock, Thread

from engine.cluster.frames import NONCE_BYTES, make_proof
from engine.errors import ConfigError
from engine.transfer.tcp_store import (
    TIMEOUT_S,
    VERSION,
    Challenge,
    Channel,
    Discard,
    Done,
    Hello,
    Load,
    Loaded,
    Match,
    Matched,
    Ready,
    Save,
)

logger = logging.getLogger("troupe.engine")

GREETING_BYTES = 4096  # largest frame of a peer that has proved nothing
MAX_UNIT_BYTES = 2**28


class BlockServer:
    """Listens from its creation to `close`.

    Attributes:
        port: on which it listens; the system chooses it if 0 is asked for.

    Raises:
        ConfigError: the address is in use, or not one of this machine.
    """

    def __init__(self, address: str, port: int, secret: str, num_bytes: int) -> None:
        self._secret = secret.encode()
        self._num_free = num_bytes
        self._units: OrderedDict[bytes, tuple[int, bytearray]] = (
            OrderedDict()
        )  # checksum, value; last used last
        self._lock = Lock()  # guards units, free bytes and connections
        self._connections: set[socket.socket] = set()
        try:
            self._listener = socket.create_server((address, port))
        except OSError as error:
            raise ConfigError(f"kv_transfer_config: kv_ip={address!r}, kv_port={port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        Thread(target=self._accept, name="troupe-blocks", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        # shutdown wakes the threads that wait; close alone does not.
        with self._lock:
            for connection in (self._listener, *self._connections):
                with suppress(OSError):  # the peer has closed it
                    connection.shutdown(socket.SHUT_RDWR)
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
            hello = self._greet(connection)
            if hello is not None:
                self._answer(Channel(connection), hello)
        except OSError as error:
            logger.info("the connection of %s to the blocks ended: %s", peer, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> Hello | None:
        """Exchange proofs. Returns None if the peer is refused."""
        connection.settimeout(TIMEOUT_S)
        channel, nonce = Channel(connection), secrets.token_bytes(NONCE_BYTES)
        channel.send(Challenge(VERSION, nonce))
        hello = channel.receive(GREETING_BYTES)
        if not isinstance(hello, Hello) or not hmac.compare_digest(
            hello.proof, make_proof(self._secret, b"client", nonce, hello.nonce)
        ):
            channel.send(Ready(error="data_parallel_key differs from that of the front"))
            return None
        if not 0 < hello.unit_bytes <= MAX_UNIT_BYTES:
            channel.send(Ready(error=f"unit_bytes={hello.unit_bytes} must be from 1 to {MAX_UNIT_BYTES}"))
            return None
        channel.send(Ready(make_proof(self._secret, b"server", hello.nonce, nonce)))
        connection.settimeout(None)
        return hello

    def _answer(self, channel: Channel, hello: Hello) -> None:
        """Answer requests until the peer closes the connection."""
        layout = hello.layout.encode()
        while True:
            match channel.receive():
                case Match(keys=keys):
                    with self._lock:
                        held = (at for at, key in enumerate(keys) if layout + key not in self._units)
                        count = next(held, len(keys))
                    channel.send(Matched(count))
                case Load(keys=keys):
                    found = [self._find(layout + key) for key in keys]
                    checksums = [None if unit is None else unit[0] for unit in found]
                    channel.send(Loaded(checksums), [unit[1] for unit in found if unit is not None])
                case Save(keys=keys, checksums=checksums):
                    for key, checksum in zip(keys, checksums, strict=True):
                        value = bytearray(hello.unit_bytes)
                        channel.read_into(memoryview(value))
                        self._keep(layout + key, checksum, value)
                    channel.send(Done())
                case Discard(keys=keys):
                    for key in keys:
                        self._drop(layout + key)
                    channel.send(Done())
                case message:
                    raise ConnectionError(f"{type(message).__name__} is no request")

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
