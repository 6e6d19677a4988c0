"""Stop buttons: which running handlers were asked to end.

A handler that looks at its flag ends by itself, with its last update. Gradio's own way, cancelling the
event, lets an update that is already on its way overwrite what the stop button wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

# keep: show the results so far; leave: show nothing, because the page shows something else or was closed.
StopKind = Literal["keep", "leave"]


@dataclass(slots=True, eq=False)
class Flag:
    """Stop request for one running handler; `asked` is None while it may go on."""

    asked: StopKind | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def is_asked(self) -> bool:
        """Return whether the handler is to end."""
        return self.asked is not None


class Stops:
    """The flags of all sessions that run something; a session may run several handlers at a time."""

    def __init__(self) -> None:
        self._flags: dict[str, list[Flag]] = {}

    @contextmanager
    def running(self, session: str) -> Iterator[Flag]:
        """While the block runs, this session can be stopped; the block looks at the flag that it is given."""
        flag = Flag()
        self._flags.setdefault(session, []).append(flag)
        try:
            yield flag
        finally:
            self._flags[session].remove(flag)
            if not self._flags[session]:
                del self._flags[session]
            flag.ended.set()

    def is_running(self, session: str) -> bool:
        """Return whether a session runs any handler."""
        return session in self._flags

    def ask(self, session: str, kind: StopKind = "keep") -> None:
        """Ask all handlers of a session to end; one that is to leave does not show anything any more."""
        for flag in self._list(session):
            flag.asked = flag.asked if flag.asked == "leave" else kind

    async def end(self, session: str) -> bool:
        """Have all handlers of a session leave, and wait until they have ended; whether there were any."""
        flags = self._list(session)
        self.ask(session, "leave")
        for flag in flags:
            await flag.ended.wait()
        return bool(flags)

    def _list(self, session: str) -> list[Flag]:
        # A copy: Gradio calls handlers without await in other threads.
        return list(self._flags.get(session, ()))
