"""A core process: `python -m engine.cluster.core_process FD`, where FD is a connected socket of the front."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from functools import partial

from engine.cluster.core_host import CoreHost, load_tokenizer
from engine.wire.frames import Link
from engine.wire.link_messages import Configure, CoreFailed

logger = logging.getLogger("troupe.engine")


async def serve_link(host: CoreHost, link: Link, publishes_kv_events: bool) -> None:
    """Serve the front at the other end of the link until the connection is lost.

    Raises:
        Exception: the core could not start, or it crashed; the front has been informed.
    """
    serving = asyncio.ensure_future(host.serve(link.send, partial(exit_hung, link), publishes_kv_events))
    serving.add_done_callback(lambda _: link.close())
    try:
        while True:
            host.handle(await link.receive())
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the front is gone, or the core has ended and closed the link
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    if not serving.cancelled():
        serving.result()


def exit_hung(link: Link, error: TimeoutError) -> None:
    """End the process: a thread that hangs in a step cannot be stopped."""
    link.send(CoreFailed(f"TimeoutError: {error}"))
    link.close()
    os._exit(1)


async def run(connection: socket.socket) -> None:
    """Serve the front that is connected by this socket until it closes it."""
    link = Link(*await asyncio.open_connection(sock=connection))
    configure: Configure = await link.receive()
    host = CoreHost(configure.config, partial(load_tokenizer, configure.config))
    try:
        await serve_link(host, link, configure.publishes_kv_events)
    finally:
        host.close()


def main() -> int:
    # Ctrl+C in a terminal reaches all processes; the front decides when a core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="core process %(process)d: %(levelname)s: %(message)s")
    try:
        asyncio.run(run(socket.socket(fileno=int(sys.argv[1]))))
    except Exception as error:  # the border of the process: the front has been informed
        logger.error("ended: %r", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
