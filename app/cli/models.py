"""`python -m app models`: list, show, fetch and remove models, and say how one would run, without loading it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from app.cli.table import format_table
from app.config import AppConfig, Failure, UsageError, add_flags, make_config
from engine import Catalogue, CatalogueEntry, ConfigError, inspect_model, list_families, list_image_models

OTHERS = (
    "Other decoder-only models run on the code of transformers over the same KV cache, with prefix caching, grammars\n"
    "and int8, if a probe finds that requests do not influence each other: python -m app models MODEL"
)
SETTINGS = ("models_dir", "model_alias")
ACTIONS = ("list", "families", "show", "fetch", "remove")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, and the model that it is about."""
    parser.add_argument(
        "action", nargs="?", default="list", metavar="{" + ",".join(ACTIONS) + "}",
        help="default: list; a model alone means show",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name, folder, hub name or repository:file.gguf")
    parser.add_argument(
        "--model-impl", choices=("auto", "troupe", "transformers"), default="auto",
        help="code that runs the model (default: auto)",
    )
    add_flags(parser, AppConfig, SETTINGS)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Do it, and print the result."""
    action, name = arguments.action, arguments.model
    if action not in ACTIONS:
        if name is not None:
            raise UsageError(f"models takes {', '.join(ACTIONS)} or one model, not {action!r}")
        action, name = "show", action
    if (name is None) != (action in ("list", "families")):
        raise UsageError(f"models {action} takes {'no model' if name else 'the name of a model'}")
    try:
        config = make_config(AppConfig, vars(arguments))
        catalogue = Catalogue(config.models_dir, config.read_aliases())
        print(perform(action, name or "", catalogue, arguments.model_impl))
    except ConfigError as error:
        raise Failure(str(error)) from error
    return 0


def perform(action: str, name: str, catalogue: Catalogue, model_impl: str) -> str:
    """Return what is printed."""
    match action:
        case "list":
            return write_models(catalogue.list())
        case "families":
            return write_families()
        case "fetch":
            return f"{name} is here: {catalogue.fetch(name, show_progress()).model}"
        case "remove":
            return f"{name} is removed: {catalogue.remove(name) / 2**20:,.1f} MiB"
    entry = catalogue.find(name)
    facts = [] if entry is None else entry.list_facts()
    if entry is None or (entry.is_here and not entry.problem):
        model = name if entry is None else entry.model
        facts += inspect_model(model, model_impl).list_facts()  # type: ignore[arg-type]
    return "\n".join(f"{name:<14}{value}" for name, value in facts)


def show_progress() -> Callable[[int, int], None]:
    """Return a function that writes the share of a download to stderr: over itself on a terminal, else every 10 s."""
    is_terminal, written = os.isatty(2), time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal written
        if time.monotonic() - written >= (0.2 if is_terminal else 10) or (done == total and is_terminal):
            written = time.monotonic()
            text = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
            end = "" if is_terminal and done < total else "\n"
            print("\r" * is_terminal + text, end=end, file=sys.stderr, flush=True)

    return show


def write_models(entries: list[CatalogueEntry]) -> str:
    """The models as a table."""
    rows = [("MODEL", "STATE", "SIZE", "CONTEXT", "FORMAT", "LICENSE", "SOURCE")]
    rows += [
        (
            each.name, each.state, f"{each.num_bytes / 2**20:,.0f} MiB", f"{each.context_length or '-'}", each.format,
            each.license or "-", each.source,
        )
        for each in entries
    ]
    return "\n".join([format_table(rows), *(f"{each.name}: {each.problem}" for each in entries if each.problem)])


def write_families() -> str:
    """The families of our decoder, the models with image encoders, and what becomes of all others."""
    families = format_table([("ARCHITECTURE", "MODEL TYPE"), *list_families()])
    images = format_table([("MODEL TYPE WITH IMAGES", "RUNS"), *list_image_models()])
    return f"{families}\n\n{images}\n\n{OTHERS}"
