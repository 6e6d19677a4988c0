"""Every error the engine raises on purpose.

EngineError
├── ConfigError        a setting or a checkpoint that cannot work (also a ValueError)
├── InvalidRequest     the request's own fault: HTTP 400 (also a ValueError)
│   └── PromptTooLong  the prompt leaves the model no room for an answer
├── EngineOverloaded   the waiting queue is full: HTTP 503 with Retry-After
├── EngineSleeping     the engine was put to sleep, or is on its way there or back: HTTP 503
├── RequestTimeout     the request's deadline passed: HTTP 504
└── EngineDead         the engine stopped or crashed while the request was in it: HTTP 500, or 503 at the door
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised by the engine."""


class ConfigError(EngineError, ValueError):
    """A setting or a checkpoint that cannot work; the message names field, value and allowed range."""


class InvalidRequest(EngineError, ValueError):
    """A request that cannot be served as asked.

    Attributes:
        param: name of the offending field, as in the OpenAI error body; None when no single field is at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt leaves the model no room for an answer; the message has both numbers."""


class EngineOverloaded(EngineError):
    """The waiting queue is full.

    Attributes:
        retry_after_s: a hint for the client, in seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineSleeping(EngineError):
    """The engine was put to sleep and has not been woken up."""


class RequestTimeout(EngineError):
    """The request's deadline passed before it was finished."""


class EngineDead(EngineError):
    """The engine crashed or was closed while this request was in it, or before it came."""
