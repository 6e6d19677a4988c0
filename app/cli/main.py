"""Selects the verb, parses its flags, and prints user errors as one line on stderr."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
import time
from collections.abc import Sequence

from app import __version__
from app.cli.imports import import_large
from app.cli.parser import Parser
from app.config import ENV_PREFIX, Failure, UsageError

# verb -> (module, summary); imported on use, because some imports take seconds
VERBS = {
    "serve": ("app.cli.serve", "serve the page and the API (the default)"),
    "chat": ("app.cli.chat", "chat in the terminal"),
    "complete": ("app.cli.complete", "continue one text"),
    "extract": ("app.cli.extract", "turn text files into JSON records that fit a schema"),
    "grammar": ("app.cli.grammar", "explain how a schema is enforced, and test instances against it"),
    "bench": ("app.cli.bench", "measure latency, throughput, serving, start-up, and the machine's limits"),
    "models": ("app.cli.models", "list, show, fetch and remove models; how a checkpoint would run"),
    "route": ("app.cli.route", "route requests to several OpenAI-compatible servers"),
    "replay": ("app.cli.replay", "compute a request of a journal again, and compare the answers"),
    "run-batch": ("app.cli.run_batch", "answer the rows of an OpenAI batch file"),
}
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Run one verb and return the process's exit code."""
    start = time.perf_counter()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # write characters that stdout cannot encode, such as lone surrogates, as escapes, which JSON accepts
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = dispatch(list(argv), start)
        sys.stdout.flush()  # report a full disk here at the latest
        return code
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except Failure as error:
        complain(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILURE  # the reader of stdout has gone, so do not print a message
    except OSError as error:
        complain(f"{error.filename or 'the output'}: {error.strerror or error}")
        return EXIT_FAILURE
    finally:
        drop_broken_output()
        prepare_exit()


def prepare_exit() -> None:
    """Skip the interpreter's final garbage collection."""
    gc.freeze()
    if "triton" in sys.modules:
        # the report of uncollected objects would print hundreds of lines
        gc.unfreeze()


def drop_broken_output() -> None:
    """Suppress the interpreter's final error about output that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def dispatch(argv: list[str], start: float) -> int:
    """Select the verb, parse its flags, and run it."""
    if argv and argv[0] in ("--version", "-V"):
        print(f"troupe {__version__}")
        return 0
    verb = "serve"
    if argv and not argv[0].startswith("-"):
        verb = argv.pop(0)
        if verb not in VERBS:
            raise UsageError(f"unknown verb {verb!r}: choose from {', '.join(VERBS)}")
        is_named = True
    else:
        is_named = False
    path, summary = VERBS[verb]
    module = import_large(path)
    parser = Parser(
        prog=f"python -m app {verb}" if is_named else "python -m app",
        description=summary if is_named else list_verbs(),
        epilog=f"Flags of settings are also read from {ENV_PREFIX}<NAME>, as in {ENV_PREFIX}PORT; flags win.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if any(name.startswith(ENV_PREFIX) for name in os.environ):
        # imported here only, because it imports the settings of all verbs
        import_large("app.cli.variables").check_variables(os.environ)
    code: int = module.run(arguments, start)
    return code


def list_verbs() -> str:
    """Return the help text without a verb."""
    lines = "\n".join(f"  {verb:<9} {summary}" for verb, (_, summary) in VERBS.items())
    return f"Troupe, an LLM inference engine; --version prints its version. Verbs:\n{lines}\n\nFlags of serve:"


def complain(message: str) -> None:
    """Print one line on stderr, without the message's line breaks."""
    print("troupe: " + " ".join(message.split()), file=sys.stderr)
