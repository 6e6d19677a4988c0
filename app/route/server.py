"""serve_route: the router's server and its probes, until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from app.api.gate import Gate
from app.api.origins import AllowedOrigins
from app.config import AppConfig, RouteConfig, read_url
from app.listening import bind, run_uvicorn, stop_on_signals
from app.route.proxy import Proxy
from app.route.workers import Worker, watch
from engine import TextRouter

logger = logging.getLogger("troupe.route")

CONNECT_TIMEOUT_S = 5.0
WORKER_TIMEOUT_S = 600.0  # a worker that sends nothing for so long has failed
HEALTH_INTERVAL_S = 2.0  # between two probes of a worker
BACKLOG = 2048


async def serve_route(config: RouteConfig, app_config: AppConfig) -> None:
    """Route requests until SIGINT or SIGTERM.

    Raises UsageError: the address cannot be bound.
    """
    with bind(app_config) as listener, stop_on_signals(lambda: None) as stop:
        async with run_router(config, app_config, listener, stop) as proxy:
            host, port = listener.getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            print(f"Troupe routes {address} to {len(config.worker_urls)} workers by {config.policy}", flush=True)
            if not app_config.is_loopback and not app_config.api_key:
                logger.warning("listening on %s without an API key: anyone who can reach it may use it", host)
            await stop.wait()
            await proxy.drain(app_config.shutdown_grace_s)


@asynccontextmanager
async def run_router(
    config: RouteConfig, app_config: AppConfig, listener: socket.socket, stop: asyncio.Event
) -> AsyncIterator[Proxy]:
    """Probe the workers, and answer on the socket until the block ends."""
    workers = [Worker(index, read_url("--worker-urls", url)) for index, url in enumerate(config.worker_urls)]
    router = TextRouter(config.policy, len(workers))
    key = config.worker_api_key
    async with aiohttp.ClientSession(
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=WORKER_TIMEOUT_S),
        auto_decompress=False,
    ) as session:
        proxy = Proxy(workers, router, session, forwards_keys=key is None and not app_config.api_key)
        names = (app_config.host, *app_config.allowed_host)
        gate = Gate(
            proxy, app_config.api_key, app_config.max_body_bytes, app_config.max_requests_per_key,
            AllowedOrigins(names, checks_host=app_config.is_loopback and not app_config.api_key),
        )
        async with asyncio.TaskGroup() as tasks:
            probes = [
                tasks.create_task(watch(worker, session, HEALTH_INTERVAL_S, router.forget)) for worker in workers
            ]
            try:
                listener.listen(BACKLOG)  # uvicorn does it later, so early clients wait
                async with run_uvicorn(gate, listener, stop, app_config):
                    yield proxy
            finally:
                for probe in probes:
                    probe.cancel()
