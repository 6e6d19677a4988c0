"""Stop buttons: which running handlers were asked to end.

A handler that looks at its flag ends by itself, with its last update. Gradio's own way, cancelling the
event, lets an update that is already on its way overwrite what the stop button wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

# keep: show what is there; leave: the page shows something else by now, or nobody looks at it any more.
StopKind = Literal["keep", "leave"]


class Stops:
    """The flags of all sessions that run something."""

    def __init__(self) -> None:
        self._running: dict[str, StopKind | None] = {}

    @contextmanager
    def running(self, session: str) -> Iterator[None]:
        """While the block runs, this session can be stopped."""
        self._running[session] = None
        try:
            yield
        finally:
            self._running.pop(session, None)

    def ask(self, session: str, kind: StopKind = "keep") -> None:
        """Ask a session's handler to end, if one runs."""
        if session in self._running:
            self._running[session] = kind

    def asked(self, session: str) -> StopKind | None:
        """What the session was asked, None while it may go on."""
        return self._running.get(session)
