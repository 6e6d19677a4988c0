"""The server: one uvicorn, one FastAPI app with Gradio behind it, one engine, all in one event loop.

main thread   bind ─▶ answer "starting" ─▶ engine.start() ─▶ open the API ─▶ open the page ─▶ drain ─▶ close
a thread                                   import Gradio, build the page ───────▲
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from functools import partial

from fastapi import FastAPI
from starlette.routing import Mount

from app.api.application import make_api
from app.api.context import ApiContext
from app.api.job_kinds import make_answer
from app.api.model_pool import ModelPool, choose_roles
from app.config import AppConfig, UsageError
from app.listening import bind, describe_address, finish_unless, run_uvicorn, stop_on_signals
from app.space_gpu import Visitors, make_leased_engine
from app.startup_app import StartupApp
from app.store import Limits, Store, StoreError, objects, open_store
from app.timeline import Timeline
from engine import Engine, EngineConfig

logger = logging.getLogger("troupe.server")

# No data leaves this machine. Gradio reads these variables on import.
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}

# Seconds between two looks whether a full collection is due.
LOOK_S = 1.0
# Collections of the middle generation before a full one. Python's default, 10, would be reached during answers.
DUE, OVERDUE = 10, 100
DAY_S = 86400.0


async def serve(
    engine_config: EngineConfig, app_config: AppConfig, timeline: Timeline, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Serve until a signal arrives.

    Args:
        on_stop: called in the signal's handler.

    Raises:
        UsageError: the address cannot be bound, or the data folder cannot be used.
        ConfigError: the engine cannot start as configured.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    num_cut, roles = 0, choose_roles(engine_config, app_config)
    with closing(open_data(app_config)) as store, bind(app_config) as listener, stop_on_signals(on_stop) as stop:
        engine = make_leased_engine(engine_config) if app_config.zero_gpu else Engine(engine_config)
        startup_app = StartupApp(engine, is_private=bool(app_config.api_key))
        outermost = Visitors(startup_app) if app_config.zero_gpu else startup_app
        app = make_api(ApiContext(engine, app_config, store=store), roles)
        pool: ModelPool = app.state.pool
        async with run_uvicorn(outermost, listener, stop, app_config):
            try:
                page = asyncio.create_task(asyncio.to_thread(mount_page, app, pool, timeline))
                if await finish_unless(stop, start(pool, timeline)):
                    startup_app.open(app)
                    async with AsyncExitStack() as stack:
                        if await finish_unless(stop, page):
                            # Gradio's queue starts with the app's lifespan, which the running uvicorn does not start
                            await stack.enter_async_context(app.router.lifespan_context(app))
                            startup_app.open_page()
                            # exclude long-lived objects from garbage collection
                            gc.freeze()
                            gc.enable()
                            announce(engine, app_config, listener, timeline)
                            await finish_unless(stop, tend(pool))
                        num_cut = await drain(startup_app, pool, app_config.shutdown_grace_s)
                else:
                    logger.info("closing: startup cancelled")
            finally:
                startup_app.close()
                await pool.close()
                await engine.close()
    logger.info("closed%s", f": {describe_requests(num_cut, 'was', 'were')} cut off" if num_cut else "")


def open_data(app_config: AppConfig) -> Store:
    """Open the store of the data folder."""
    try:
        return open_store(app_config.data_dir, Limits(app_config.max_data_bytes, app_config.max_data_days * DAY_S))
    except StoreError as error:
        raise UsageError(f"--data-dir: {error}") from error


async def tend(pool: ModelPool) -> None:
    """Do what is to be done beside the requests."""
    context = pool.first
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(collect_when_idle(context.engine))
        tasks.create_task(drop_old(context.store))
        tasks.create_task(pool.tend())
        tasks.create_task(context.jobs.run(partial(make_answer, pool)))


async def drop_old(store: Store) -> None:
    """Delete once an hour what is too old."""
    while True:
        await store.run(objects.drop_old)
        await asyncio.sleep(3600)


async def start(pool: ModelPool, timeline: Timeline) -> None:
    """Start the engines."""
    gc.disable()
    await asyncio.gather(*(context.engine.start() for context in pool.contexts))
    for context in pool.contexts:
        await asyncio.to_thread(context.warm_up)
    timeline.extend(pool.first.engine.timeline)


def mount_page(app: FastAPI, pool: ModelPool, timeline: Timeline) -> None:
    """Import Gradio and mount the page at `/`, behind the routes of the API; runs in a thread."""
    if not pool.first.config.ui:
        return
    with timeline.phase("page", is_parallel=True):
        # by name, because Gradio's import is the slowest and needed only here
        gradio = importlib.import_module("gradio")
        ui = importlib.import_module("app.ui")
        demo = ui.make_demo(pool.find_role("extract"), pool.find_role("chat"), pool)
        gradio.mount_gradio_app(app, demo, path="/", **ui.mount_options(pool.first.config.frame_ancestor))
        # the mount takes every path without an API route: unknown paths of the page get the same error
        mount = app.routes[-1]
        assert isinstance(mount, Mount) and isinstance(mount.app, FastAPI)
        mount.app.router.default = app.router.default
        # Until it knows that its app is up, Gradio accepts any local path as an upload, so any file of this machine
        # could be read through a handler that takes files. Mounting does not set that flag.
        demo.has_launched = True


def announce(engine: Engine, app_config: AppConfig, listener: socket.socket, timeline: Timeline) -> None:
    """Print the startup times and the URLs. The server runs even if its output cannot be written."""
    worker = engine.resolved.worker
    with suppress(OSError):
        print(timeline.table(), file=sys.stderr, flush=True)
    with suppress(OSError):
        print(
            f"Troupe is ready at {describe_address(app_config, listener)} "
            f"(model {engine.model_name}, device {worker.device}, {worker.dtype})",
            flush=True,
        )
    if not app_config.is_loopback and not app_config.api_key:
        logger.warning("listening on %s without an API key: anyone who can reach it may use it", app_config.host)


async def collect_when_idle(engine: Engine) -> None:
    """Collect garbage, which stops all threads for 0.1 s, while no request is running.

    Under constant load Python collects a tenth as often as usual.
    """
    gc.set_threshold(*gc.get_threshold()[:2], OVERDUE)
    while True:
        await asyncio.sleep(LOOK_S)
        if gc.get_count()[2] >= DUE and not engine.stats().num_unfinished:
            gc.collect()


async def drain(startup_app: StartupApp, pool: ModelPool, grace_s: float) -> int:
    """Refuse new requests and wait for running ones. Returns the number of requests cut off at the end of the grace."""
    startup_app.is_draining = True
    num_left = pool.count_unfinished()
    if num_left:
        logger.info("closing: %s up to %g s", describe_requests(num_left, "gets", "get"), grace_s)
    else:
        logger.info("closing: no request is running")
    deadline = asyncio.get_running_loop().time() + grace_s
    while num_left and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
        num_left = pool.count_unfinished()
    return num_left


def describe_requests(count: int, verb: str, verb_of_many: str) -> str:
    """Return the number of running requests as a phrase."""
    return f"1 request {verb}" if count == 1 else f"{count} requests {verb_of_many}"
