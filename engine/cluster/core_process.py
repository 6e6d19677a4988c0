"""A core process: `python -m engine.cluster.core_process FD`, where FD is a connected socket of the front."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

from engine.cluster.core_host import CoreHost
from engine.cluster.frames import Link
from engine.cluster.messages import Configure

logger = logging.getLogger("troupe.engine")


async def run(connection: socket.socket) -> None:
    """Serve the front that is connected by this socket until it closes it."""
    link = Link(*await asyncio.open_connection(sock=connection))
    configure: Configure = await link.receive()
    host = CoreHost(configure.config)
    try:
        await host.serve(link, configure.publishes_kv_events)
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
