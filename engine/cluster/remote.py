"""Replicas on other machines: they connect to the front by TCP, and both sides prove that they know a shared key.

After the handshake of `engine.wire.handshake` the messages are those of a core process, but without Configure.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from engine.cluster.connection import LinkConnection
from engine.cluster.core_host import CoreHost, load_tokenizer
from engine.cluster.core_process import serve_link
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.wire import handshake
from engine.wire.frames import Link
from engine.wire.link_messages import Welcome

logger = logging.getLogger("troupe.engine")

RETRY_S = 0.5


class RemoteListener:
    """Accepts the cores of other machines, and gives each to the connector of its rank."""

    def __init__(
        self, address: str, port: int, key: str, publishes_kv_events: bool, heartbeat_timeout_s: float
    ) -> None:
        self._address = address
        self.port = port  # 0: the system chooses one
        self.key = key
        self._publishes_kv_events = publishes_kv_events
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._arrivals: dict[int, asyncio.Queue[Link]] = {}
        self._server: asyncio.Server | None = None

    def make_connector(self, rank: int) -> RemoteConnector:
        self._arrivals[rank] = asyncio.Queue()
        return RemoteConnector(self._arrivals[rank], self._heartbeat_timeout_s)

    async def start(self) -> None:
        """Listen."""
        try:
            self._server = await asyncio.start_server(self._greet, self._address, self.port)
        except OSError as error:
            raise ConfigError(
                f"data_parallel_address={self._address!r}, data_parallel_rpc_port={self.port}: {error}"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        logger.info("waiting for replicas %s on %s:%d", sorted(self._arrivals), self._address, self.port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        peer = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(handshake.TIMEOUT_S):
                error = await self._authenticate(link)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as failure:
            logger.warning("the connection of %s ended before its greeting: %r", peer, failure)
            link.abort()
            return
        if error is not None:
            logger.warning("refused a replica at %s: %s", peer, error)
            link.close()

    async def _authenticate(self, link: Link) -> str | None:
        """Exchange proofs and hand the link over. Returns why the peer is refused; None if it is accepted."""
        challenge = handshake.make_challenge()
        link.send(challenge)
        greeting = await link.receive(handshake.MAX_BYTES)
        welcome = handshake.verify(greeting, challenge, "replica", self.key)
        if welcome.error is None and greeting.rank not in self._arrivals:
            welcome = Welcome(error=f"data_parallel_rank={greeting.rank} must be one of {sorted(self._arrivals)}")
        link.send(msgspec.structs.replace(welcome, publishes_kv_events=self._publishes_kv_events))
        if welcome.error is None:
            self._arrivals[greeting.rank].put_nowait(link)
        return welcome.error


class RemoteConnector:
    """Waits for the core of one rank to connect."""

    def __init__(self, arrivals: asyncio.Queue[Link], heartbeat_timeout_s: float) -> None:
        self._arrivals = arrivals
        self._heartbeat_timeout_s = heartbeat_timeout_s

    async def connect(self) -> LinkConnection:
        return LinkConnection(await self._arrivals.get(), self._heartbeat_timeout_s)

    def close(self) -> None:
        """Do nothing: the listener owns the socket."""


async def serve_replica(config: EngineConfig) -> None:
    """Run one core for a front on another machine. Connects again whenever the connection is lost.

    Raises:
        ConfigError: the front refuses this replica, or the core does not accept the config.
        Exception: the core crashed.
    """
    if config.data_parallel_key is None or config.data_parallel_rank is None:
        raise ConfigError("a headless replica needs data_parallel_key and data_parallel_rank")
    address, port = config.data_parallel_address, config.data_parallel_rpc_port
    host = CoreHost(config, partial(load_tokenizer, config))
    try:
        while True:
            try:
                link = Link(*await asyncio.open_connection(address, port))
            except OSError as error:
                logger.info("no front at %s:%d yet: %s", address, port, error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await serve_front(host, link, config.data_parallel_key, config.data_parallel_rank)
                logger.warning("the connection to the front was lost")
            except handshake.PeerRefused as error:
                raise ConfigError(str(error)) from error
            except (ConnectionError, TimeoutError, asyncio.IncompleteReadError) as error:
                logger.warning("the front at %s:%d ended the greeting: %r", address, port, error)
                await asyncio.sleep(RETRY_S)
            finally:
                link.abort()
    finally:
        host.close()


async def serve_front(host: CoreHost, link: Link, key: str, rank: int) -> None:
    """Serve one connection to a front until it is lost.

    Raises:
        PeerRefused: one of them does not know the key, or has another version.
        ConnectionError, TimeoutError, asyncio.IncompleteReadError: the handshake failed.
    """
    async with asyncio.timeout(handshake.TIMEOUT_S):
        welcome = await _introduce(link, key, rank)
    await serve_link(host, link, welcome.publishes_kv_events)


async def _introduce(link: Link, key: str, rank: int) -> Welcome:
    challenge = await link.receive(handshake.MAX_BYTES)
    greeting = handshake.answer(challenge, "replica", key, rank)
    link.send(greeting)
    return handshake.check(await link.receive(handshake.MAX_BYTES), challenge, greeting, "replica", key)
