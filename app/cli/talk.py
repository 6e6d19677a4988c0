"""Talker: chats and completes with an engine in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from app.config import Failure, UsageError, make_config
from app.reasoning import make_splitter, prepare_prompt
from app.template_facts import TemplateFacts, read_template
from engine import (
    ConfigError,
    Engine,
    EngineConfig,
    EngineError,
    InvalidRequest,
    SamplingParams,
    read_sampling_defaults,
)
from grammar import GrammarError

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TalkConfig:
    """Flags of chat and complete beside the engine's."""

    max_tokens: Annotated[int | None, "longest answer; default: the model's limit"] = None
    temperature: Annotated[float | None, "0 is greedy; default: the model's"] = None
    top_p: Annotated[float | None, "draw from the most likely tokens, up to this share; default: the model's"] = None
    sampling_seed: Annotated[int | None, "equal seeds give equal texts"] = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling fields that were given, under their names in the API."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.sampling_seed}
        values["max_tokens"] = self.max_tokens
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Talker:
    """Talks to an engine in this process."""

    engine: Engine
    params: SamplingParams
    template: TemplateFacts

    async def complete(self, prompt: str) -> AsyncGenerator[str]:
        """Stream the continuation of a text."""
        async for text in self._generate(prompt, self.params):
            yield text

    async def answer(self, messages: Messages) -> AsyncGenerator[tuple[str, str]]:
        """Stream the next message of a conversation: further reasoning and further content."""
        params = self.params
        prompt, thinking = await prepare_prompt(self.engine, self.template.supports_reasoning, messages)
        if thinking is None:
            async for text in self._generate(prompt, params):
                yield "", text
            return
        if self.template.hides_reasoning or thinking.has_channels:
            params = replace(params, skip_special_tokens=False)
        splitter = make_splitter(thinking)
        async for text in self._generate(prompt, params):
            yield splitter.feed(text)
        yield splitter.close()

    async def _generate(self, prompt: str | list[int], params: SamplingParams) -> AsyncGenerator[str]:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        async with aclosing(self.engine.generate(given, params)) as outputs:
            async for output in outputs:
                for choice in output.outputs:
                    if choice.error is not None:
                        raise Failure(choice.error)
                    yield choice.text


@asynccontextmanager
async def open_talker(given: Mapping[str, Any]) -> AsyncIterator[Talker]:
    """Start an engine and talk to it.

    Raises UsageError, Failure: the flags or the model cannot be used; the message says why.
    """
    talk = make_config(TalkConfig, given)
    with plain_errors():
        SamplingParams(**({"max_tokens": None} | talk.sampling))  # refused before the model loads
        async with local_engine(given) as engine:
            config = engine.config
            defaults = await asyncio.to_thread(read_sampling_defaults, config.model, config.generation_config)
            params = SamplingParams(**({"max_tokens": None} | defaults | talk.sampling), output_kind="delta")
            yield Talker(engine, params, await asyncio.to_thread(read_template, engine.tokenizer, None))


@asynccontextmanager
async def local_engine(given: Mapping[str, Any]) -> AsyncIterator[Engine]:
    """An engine of our own, with one line on stderr while it loads."""
    with plain_errors():
        config = make_config(EngineConfig, given)
        print(f"loading {config.model_name} ...", file=sys.stderr)
        async with Engine(config) as engine:
            yield engine


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of engine and grammar into one line for the user."""
    try:
        yield
    except (ConfigError, InvalidRequest, GrammarError) as error:
        raise UsageError(str(error)) from error
    except EngineError as error:
        raise Failure(str(error)) from error


def is_terminal() -> bool:
    """Return whether a person reads and types."""
    return os.isatty(0) and os.isatty(1)
