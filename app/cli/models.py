"""`python -m app models [MODEL]`: the model families, or what would happen to one checkpoint, without loading it."""

from __future__ import annotations

import argparse

from app.config import Failure
from engine import ConfigError, inspect_model, list_families, list_image_models

OTHERS = (
    "Other decoder-only models run on the code of transformers over the same KV cache, with prefix caching, grammars\n"
    "and int8, if a probe finds that requests do not influence each other: python -m app models MODEL"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The checkpoint, and which code may run it."""
    parser.add_argument(
        "checkpoint", nargs="?", metavar="MODEL", help="folder or hub name; default: list the families"
    )
    parser.add_argument(
        "--model-impl", choices=("auto", "troupe", "transformers"), default="auto",
        help="code that runs the model (default: auto)",
    )


def run(arguments: argparse.Namespace, start: float) -> int:
    """Print the table or the report."""
    if arguments.checkpoint is None:
        print(write_families())
        return 0
    try:
        report = inspect_model(arguments.checkpoint, arguments.model_impl)
    except ConfigError as error:
        raise Failure(str(error)) from error
    print("\n".join(f"{name:<14}{value}" for name, value in report.list_facts()))
    return 0


def write_families() -> str:
    """The families of our decoder, the models with image encoders, and what becomes of all others."""
    families = _write_table([("ARCHITECTURE", "MODEL TYPE"), *list_families()])
    images = _write_table([("MODEL TYPE WITH IMAGES", "RUNS"), *list_image_models()])
    return f"{families}\n\n{images}\n\n{OTHERS}"


def _write_table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in rows)
