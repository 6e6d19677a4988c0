"""`python -m app chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from app.cli.talk import Messages, TalkConfig, Talker, is_terminal, open_talker, plain_errors
from app.config import Failure, UsageError, add_flags
from engine import EngineConfig

HELP = "/new begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    add_flags(parser, TalkConfig)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace, start: float) -> int:
    """Read a line, print the answer, until the end of input.

    `input` runs here, outside the loop: nothing else can be asked to give up waiting for a key.
    """
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            talker = runner.run(stack.enter_async_context(open_talker(vars(arguments))))
            converse(runner, talker, arguments.system_prompt)
        finally:
            runner.run(stack.aclose())
    return 0


def converse(runner: asyncio.Runner, talker: Talker, system_prompt: str | None) -> None:
    """The conversation; a failed or stopped answer is not part of it."""
    messages = begin(system_prompt)
    if is_terminal():
        print(HELP, file=sys.stderr)
    while (line := read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = begin(system_prompt)
        elif line in ("/help", "/?"):
            print(HELP, file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                with plain_errors():
                    answer = runner.run(print_answer(talker.answer(messages)))
                messages.append({"role": "assistant", "content": answer})
            except KeyboardInterrupt:
                messages.pop()
                print("\n(stopped)", file=sys.stderr)
            except (Failure, UsageError) as error:
                if not is_terminal():
                    raise
                messages.pop()
                print(f"troupe: {error}", file=sys.stderr)


def begin(system_prompt: str | None) -> Messages:
    """An empty conversation."""
    return [{"role": "system", "content": system_prompt}] if system_prompt else []


def read_line() -> str | None:
    """The next line, None at the end of input."""
    try:
        return input("> " if is_terminal() else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not text: {error}") from error


async def print_answer(pieces: AsyncGenerator[tuple[str, str]]) -> str:
    """Print a message while it comes, its reasoning on stderr, and return its content."""
    is_reasoning = False

    async def show() -> AsyncGenerator[str]:
        nonlocal is_reasoning
        async for reasoning, content in pieces:
            if reasoning:
                print(reasoning, end="", file=sys.stderr, flush=True)
                is_reasoning = True
            if content and is_reasoning:
                print("\n", file=sys.stderr, flush=True)
                is_reasoning = False
            yield content

    return await print_pieces(show())


async def print_pieces(pieces: AsyncGenerator[str]) -> str:
    """Print a text while it comes, and return it."""
    text = ""
    async for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text
