"""`python -m app route --worker-urls URL ...`: serves several OpenAI-compatible servers at one address."""

from __future__ import annotations

import argparse
import asyncio

from app.cli.imports import import_large
from app.cli.serve import set_up_logging
from app.config import AppConfig, RouteConfig, add_flags, make_config

# Server settings that the router shares.
SERVER_FIELDS = (
    *("host", "port", "api_key", "allowed_host", "max_requests_per_key", "log_level", "max_body_bytes"),
    "shutdown_grace_s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the workers, and the settings of a server."""
    add_flags(parser, RouteConfig)
    add_flags(parser, AppConfig, SERVER_FIELDS)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Run the router until a signal arrives.

    Raises UsageError: the configuration cannot work.
    """
    config = make_config(RouteConfig, vars(arguments))
    app_config = make_config(AppConfig, vars(arguments))
    set_up_logging(app_config.log_level)
    asyncio.run(import_large("app.route.server").serve_route(config, app_config))
    return 0
