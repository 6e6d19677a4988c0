"""`python -m app serve`: the page at `/`, the API at `/v1`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import threading
import time

from app.cli.imports import import_large
from app.config import AppConfig, UsageError, add_flags, make_config
from app.timeline import Timeline
from engine import ConfigError, EngineConfig

# After the grace: a thread that does not end must not keep the process.
LAST_RESORT_S = 10.0
# Local time to the second.
LOG_TIME = "%Y-%m-%dT%H:%M:%S"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags from the fields of both configs."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    add_flags(parser, EngineConfig)
    add_flags(parser, AppConfig)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Serve until a signal arrives."""
    timeline = Timeline(start)
    try:
        engine_config = make_config(EngineConfig, vars(arguments))
        app_config = make_config(AppConfig, vars(arguments))
        set_up_logging(app_config.log_level)
        if engine_config.node_rank:
            # A process that a script starts in the background ignores SIGINT; SIGTERM alone would leave the ranks.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.default_int_handler)
        if app_config.headless or engine_config.node_rank:
            import_large("engine").serve_headless(engine_config)
            return 0
        # after the settings, whose errors are reported at once
        server = import_large("app.server")
        timeline.add("imports", time.perf_counter() - start)
        guard = threading.Timer(app_config.shutdown_grace_s + LAST_RESORT_S, os._exit, (1,))
        guard.daemon = True
        asyncio.run(server.serve(engine_config, app_config, timeline, on_stop=guard.start))
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return 0


def set_up_logging(level: str) -> None:
    """Our own log at the asked level, everyone else's warnings."""
    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT, datefmt=LOG_TIME)
    logging.getLogger("troupe").setLevel(level.upper())
