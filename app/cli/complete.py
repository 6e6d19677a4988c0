"""`python -m app complete PROMPT`: continue one text."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from app.cli.chat import print_pieces
from app.cli.talk import TalkConfig, open_talker
from app.config import UsageError, add_flags
from engine import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from stdin")
    add_flags(parser, TalkConfig)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Print the continuation as it comes."""
    try:
        prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not text: {error}") from error
    if not prompt:
        raise UsageError("the prompt is empty")
    asyncio.run(complete(prompt, vars(arguments)))
    return 0


async def complete(prompt: str, given: dict[str, Any]) -> None:
    """Stream one continuation to stdout."""
    async with open_talker(given) as talker:
        await print_pieces(talker.complete(prompt))
