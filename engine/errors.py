"""The errors that the engine raises.

EngineError
├── ConfigError        a setting or a checkpoint that does not work (also a ValueError)
├── InvalidRequest     the request is at fault: HTTP 400 (also a ValueError)
│   └── PromptTooLong  the prompt leaves no room for an output token
├── EngineOverloaded   the waiting queue is full: HTTP 503 with Retry-After
├── EngineSleeping     the engine sleeps, is falling asleep or is waking up: HTTP 503
├── LeaseRefused       no device is lent to the request: HTTP 429
├── RequestTimeout     the request's deadline passed: HTTP 504
└── EngineDead         the engine stopped or crashed: HTTP 500 for accepted requests, 503 for new ones
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised by the engine."""


class ConfigError(EngineError, ValueError):
    """A setting or a checkpoint that does not work; the message names field, value and allowed range."""


class InvalidRequest(EngineError, ValueError):
    """A request that cannot be served.

    Attributes:
        param: the offending field, as in the OpenAI error body; None if no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an output token; the message names its length and the limit."""


class EngineOverloaded(EngineError):
    """The waiting queue is full.

    Attributes:
        retry_after_s: seconds after which the client may retry.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineSleeping(EngineError):
    """The engine sleeps, is falling asleep or is waking up."""


class LeaseRefused(EngineError):
    """Nobody lends a device to this request, such as a visitor without quota."""


class RequestTimeout(EngineError):
    """The request's deadline passed before it finished."""


class EngineDead(EngineError):
    """The engine crashed or was closed before the request finished."""
