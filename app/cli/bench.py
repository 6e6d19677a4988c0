"""`python -m app bench KIND`: all benchmarks, each with its own flags."""

from __future__ import annotations

import argparse
import importlib

from app.cli.parser import Parser
from app.config import UsageError

# kind -> (module, summary); imported on use, because some imports take seconds
KINDS = {
    "latency": ("app.bench.latency", "one batch: prefill and decode rates, beside peers and the machine's limits"),
    "throughput": ("app.bench.throughput", "throughput of many offline requests, free or structured"),
    "serve": ("app.bench.serve", "drive an OpenAI-compatible server: TTFT, TPOT, ITL, goodput"),
    "startup": ("app.bench.startup", "from process start to the first token"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kind; the remaining arguments are its own."""
    kinds = "; ".join(f"{kind}: {summary}" for kind, (_, summary) in KINDS.items())
    parser.add_argument("kind", metavar="KIND", help=kinds)
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="its flags; KIND --help lists them")


def run(arguments: argparse.Namespace, start: float) -> int:
    """Run the benchmark."""
    if arguments.kind not in KINDS:
        raise UsageError(f"unknown benchmark {arguments.kind!r}: choose from {', '.join(KINDS)}")
    path, summary = KINDS[arguments.kind]
    module = importlib.import_module(path)
    parser = Parser(prog=f"python -m app bench {arguments.kind}", description=summary, allow_abbrev=False)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(arguments.flags), start)
    return code
