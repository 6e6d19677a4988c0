"""Validates TROUPE_ variables: one exists for every field of every config, whichever verb reads it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields

from app.cli.evaluate import EvaluateConfig
from app.cli.extract import ExtractConfig
from app.cli.talk import TalkConfig
from app.config import ENV_PREFIX, AppConfig, RouteConfig, UsageError
from engine import EngineConfig

# Variables that Kubernetes sets in every container beside a service named "troupe"; for TROUPE_PORT see app/config.py.
OF_A_SERVICE = re.compile(r"SERVICE_|PORT_\d")

CONFIGS: tuple[type, ...] = (
    EngineConfig, AppConfig, TalkConfig, ExtractConfig, EvaluateConfig, RouteConfig
)


def check_variables(environ: Mapping[str, str]) -> None:
    """Reject an unknown variable; an empty one counts as unset."""
    known = [item.name.upper() for config in CONFIGS for item in fields(config)]
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX) and environ[name]):
        name = variable.removeprefix(ENV_PREFIX)
        if name not in known and not OF_A_SERVICE.match(name):
            close = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {ENV_PREFIX}{close[0]}?" if close else ""
            raise UsageError(f"unknown variable {variable}{hint} (--help lists the flags they stand for)")
