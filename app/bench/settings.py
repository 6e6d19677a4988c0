"""Flags shared by all offline benchmarks: model, shape, engine settings, and output file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from app import __version__
from app.bench.shapes import SHAPES, write_shape
from app.config import UsageError, add_flags, make_config
from engine import EngineConfig, inspect_model


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--shape`, `--output-json` and every field of EngineConfig."""
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights in the shape of this model")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there, too")
    add_flags(parser, EngineConfig)


@contextmanager
def engine_settings(arguments: argparse.Namespace, **defaults: Any) -> Iterator[EngineConfig]:
    """Yield the engine's configuration; a `--shape` gets a temporary folder for the duration of the block.

    Args:
        defaults: used unless a flag or variable sets another value.
    """
    given = vars(arguments)
    known = {name for name in defaults if name in given or f"TROUPE_{name.upper()}" in os.environ}
    given = given | {name: value for name, value in defaults.items() if name not in known}
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as folder:
        if arguments.shape is not None:
            shape = write_shape(arguments.shape, Path(folder))
            has_tokenizer = given.get("tokenizer") is not None
            given |= {"model": str(shape), "load_format": "dummy", "skip_tokenizer_init": not has_tokenizer}
        yield make_config(EngineConfig, given)


def as_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the fields of a configuration that differ from their defaults, as `LLM` takes them."""
    return {
        item.name: getattr(config, item.name) for item in fields(config) if getattr(config, item.name) != item.default
    }


def read_model_config(config: EngineConfig) -> dict[str, Any]:
    path = Path(config.model) / "config.json"
    if not path.is_file():
        raise UsageError(f"--model {config.model}: a benchmark needs a folder with a config.json, or --shape")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def fit(config: EngineConfig, num_requests: int, num_tokens: int, longest: int) -> EngineConfig:
    """Make queue and cache large enough for the work, unless the user set them."""
    changes: dict[str, Any] = {"max_num_waiting": max(config.max_num_waiting, num_requests)}
    if config.max_model_len is None:
        changes["max_model_len"] = longest
    if config.num_blocks is None and config.memory_share is None and config.device != "cuda":
        num_groups = inspect_model(config.model, config.model_impl).num_groups
        changes["num_blocks"] = num_groups * (num_tokens // config.block_size + 2 * num_requests + 64)
    return replace(config, **changes)


def describe_machine() -> dict[str, Any]:
    """Return where and when a figure was measured."""
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "troupe": __version__,
        "python": platform.python_version(), "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if has_cuda else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def write_json(path: Path | None, config: EngineConfig | None, figures: dict[str, Any]) -> None:
    """Write figures with the machine and the configuration."""
    if path is not None:
        described = {"machine": describe_machine(), "engine": None if config is None else asdict(config)}
        path.write_text(json.dumps(described | figures, indent=2) + "\n", encoding="utf-8")
