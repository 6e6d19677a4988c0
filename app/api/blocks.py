"""BlockWriter: a reply that consists of blocks (text, reasoning, calls), whole or as events while it grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any, ClassVar

from app.api.call import Call, Choice, Delta
from app.api.errors import ApiError
from app.api.sse import Emit, drop, frame_named
from engine import RequestOutput

Json = dict[str, Any]


class BlockWriter(ABC):
    """Writes one reply of one choice; a dialect says what blocks and events look like.

    Attributes:
        TYPES: kind of a piece -> the dialect's type of such a block.
    """

    TYPES: ClassVar[dict[str, str]]

    def __init__(self, call: Call) -> None:
        self.call = call
        self.blocks: list[Json] = []
        self._pieces: list[str] = []  # text of the open block
        self._events: list[bytes] = []
        self._is_open = False
        self._is_begun = False

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == self.TYPES["function"] for block in self.blocks)

    async def finish(self) -> Json:
        """Run the request to its end and return the reply, as a stream would build it."""
        return await self.stream(drop)

    async def stream(self, emit: Emit) -> Json:
        """Emit the events and return the reply."""
        reply: Json = {}
        async with aclosing(self.call.stream()) as steps:
            async for (delta,) in steps:
                if not self._is_begun:
                    self._is_begun = True
                    self.begin(delta.choice.output)
                self.add_delta(delta)
                if delta.gained.is_finished:
                    reply = self.end(delta.choice)
                if data := self._take():
                    await emit(data)
        return reply

    def keep_alive(self) -> bytes:
        """Return events for a client that has waited: first those before the first token, then pings.

        They do not come at once, so that a request that the engine refuses gets a plain reply with its own status.
        """
        if self._is_begun:
            self.ping()
        else:
            self._is_begun = True
            self.begin(None)
        return self._take()

    @abstractmethod
    def begin(self, output: RequestOutput | None) -> None:
        """Add the events before the first token."""

    @abstractmethod
    def ping(self) -> None:
        """Add an event without content, which keeps the connection open."""

    @abstractmethod
    def end(self, choice: Choice) -> Json:
        """Close the blocks, add the last events, and return the reply."""

    @abstractmethod
    def frame_error(self, error: ApiError) -> bytes:
        """Return an error after the first event."""

    @abstractmethod
    def make_block(self, kind: str, call_id: str, name: str) -> Json:
        """Return an empty block; id and name are those of a call."""

    @abstractmethod
    def add_open(self, block: Json) -> None:
        """Add the events of a new block."""

    @abstractmethod
    def add_growth(self, kind: str, text: str) -> None:
        """Add more text of the open block."""

    @abstractmethod
    def add_end(self, block: Json, text: str, status: str) -> None:
        """Put the whole text into the block and add the event of its end."""

    def close(self, status: str = "completed") -> None:
        if self._is_open:
            self.add_end(self.blocks[-1], "".join(self._pieces), status)
            self._pieces, self._is_open = [], False

    def open(self, kind: str, call_id: str = "", name: str = "") -> None:
        """Open a block and close the one before."""
        self.close()
        self.blocks.append(self.make_block(kind, call_id, name))
        self._is_open = True
        self.add_open(self.blocks[-1])

    def add_event(self, kind: str, **fields: Any) -> None:
        """Add an event, which is named after its type."""
        if self.call.body.stream:
            self._events.append(frame_named(kind, fields))

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def add_delta(self, delta: Delta) -> None:
        """Add the events of new text, calls and reasoning."""
        for piece in delta.pieces:
            kind = self.TYPES[piece.kind]
            if piece.call_id or (piece.call < 0 and not (self._is_open and self.blocks[-1]["type"] == kind)):
                self.open(kind, piece.call_id, piece.name)
            if piece.text:
                self._pieces.append(piece.text)
                self.add_growth(kind, piece.text)
