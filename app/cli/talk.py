"""Talkers: the same two verbs, chat and complete, from an engine in this process or from a server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from app.cli.failure import Failure
from app.config import UsageError, check_key, make_config, read_url
from engine import ConfigError, Engine, EngineConfig, EngineError, InvalidRequest, SamplingParams
from grammar import GrammarError

Messages = list[dict[str, str]]
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class TalkConfig:
    """Flags of chat and complete beside the engine's.

    Raises:
        UsageError: no header can carry the key.
    """

    url: str | None = field(
        default=None,
        metadata={"help": "server to talk to, such as http://127.0.0.1:7860; default: an engine of its own"},
    )
    api_key: str | None = field(default=None, metadata={"help": "key of that server"})
    max_tokens: int | None = field(
        default=None,
        metadata={"help": "longest answer; default: the model's limit, 256 for complete with --url"},
    )
    temperature: float | None = field(default=None, metadata={"help": "0 is greedy; default: 1"})
    top_p: float | None = field(
        default=None, metadata={"help": "share of probability to draw from; default: 1"}
    )
    sampling_seed: int | None = field(default=None, metadata={"help": "equal seeds give equal texts"})

    def __post_init__(self) -> None:
        if self.api_key:
            check_key("api_key", self.api_key)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling fields that were given, under their names in the API."""
        values = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.sampling_seed,
        }
        return {name: value for name, value in values.items() if value is not None}


class Talker(Protocol):
    """Streams pieces of text."""

    def chat(self, messages: Messages) -> AsyncGenerator[str]: ...

    def complete(self, prompt: str) -> AsyncGenerator[str]: ...


class LocalTalker:
    """Talks to an engine in this process."""

    def __init__(self, engine: Engine, sampling: Mapping[str, Any]) -> None:
        self.engine = engine
        self.sampling = {"max_tokens": None} | dict(sampling)

    async def chat(self, messages: Messages) -> AsyncGenerator[str]:
        """Stream the next message of a conversation."""
        async for text in self._stream(await self.engine.render_chat(messages)):
            yield text

    async def complete(self, prompt: str) -> AsyncGenerator[str]:
        """Stream the continuation of a text."""
        async for text in self._stream(prompt):
            yield text

    async def _stream(self, prompt: str | list[int]) -> AsyncGenerator[str]:
        params = SamplingParams(**self.sampling, output_kind="delta")
        async with aclosing(self.engine.generate(prompt, params)) as outputs:
            async for output in outputs:
                for choice in output.outputs:
                    if choice.error is not None:
                        raise Failure(choice.error)
                    yield choice.text


class RemoteTalker:
    """Talks to a server with the OpenAI API."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, sampling: Mapping[str, Any]
    ) -> None:
        self.session = session
        self.url = url
        self.model = model
        self.sampling = dict(sampling)

    async def chat(self, messages: Messages) -> AsyncGenerator[str]:
        """Stream the next message of a conversation."""
        async for choice in self._stream("/v1/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    async def complete(self, prompt: str) -> AsyncGenerator[str]:
        """Stream the continuation of a text."""
        async for choice in self._stream("/v1/completions", {"max_tokens": 256, "prompt": prompt}):
            yield choice["text"]

    async def _stream(self, path: str, fields: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        body = {"model": self.model, "stream": True} | fields | self.sampling
        async with self.session.post(self.url + path, json=body) as response:
            await check_status(response)
            async for line in response.content:
                data = line.decode().strip()
                if not data.startswith("data:"):
                    continue
                data = data.removeprefix("data:").strip()
                if data == DONE:
                    return
                event = json.loads(data)
                if "error" in event:
                    raise Failure(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice
        raise Failure("the server hung up before the answer was complete")


async def check_status(response: aiohttp.ClientResponse) -> None:
    """Raise what the server says against the request."""
    if response.status == 200:
        return
    text = await response.text()
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    raise Failure(f"the server answered {response.status}: {message}")


@asynccontextmanager
async def open_talker(given: Mapping[str, Any]) -> AsyncIterator[Talker]:
    """The talker that the flags ask for.

    Raises:
        UsageError, Failure: it cannot be had; the message says why.
    """
    talk = make_config(TalkConfig, given)
    with plain_errors():
        # checks the sampling before anything slow happens
        SamplingParams(**({"max_tokens": None} | talk.sampling))
        if talk.url is None:
            async with local_engine(given) as engine:
                yield LocalTalker(engine, talk.sampling)
            return
        # serve takes several keys, and reads the same variable
        key = (talk.api_key or "").partition(",")[0].strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = read_url("--url", talk.url)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            model = given.get("model") or await find_model(session, url)
            yield RemoteTalker(session, url, model, talk.sampling)


@asynccontextmanager
async def local_engine(given: Mapping[str, Any]) -> AsyncIterator[Engine]:
    """An engine of our own, with one line on stderr while it loads."""
    with plain_errors():
        config = make_config(EngineConfig, given)
        print(f"loading {config.model_name} ...", file=sys.stderr)
        async with Engine(config) as engine:
            yield engine


async def find_model(session: aiohttp.ClientSession, url: str) -> str:
    """The name of the model that a server serves."""
    async with session.get(url + "/v1/models") as response:
        await check_status(response)
        reply = await response.text()
    try:
        return str(json.loads(reply)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Failure(f"the server names no model ({reply[:200]}); name it with --model") from error


@contextmanager
def plain_errors() -> Iterator[None]:
    """Translate what engine, grammar and network raise into one line for the user."""
    try:
        yield
    except (ConfigError, InvalidRequest, GrammarError) as error:
        raise UsageError(str(error)) from error
    except EngineError as error:
        raise Failure(str(error)) from error
    except aiohttp.InvalidURL as error:
        raise UsageError(f"--url: {error} is no URL") from error
    except aiohttp.ClientConnectorError as error:
        place, reason = f"{error.host}:{error.port}", error.os_error.strerror or error.os_error
        raise Failure(
            f"no server answers at {place} ({reason}); start one with `python -m app`, or leave --url out"
        ) from error
    except aiohttp.ClientError as error:
        raise Failure(f"the server does not answer: {error}") from error


def is_terminal() -> bool:
    """Whether a person reads and types."""
    return os.isatty(0) and os.isatty(1)
