"""BlockWriter: a reply that consists of blocks (text, reasoning, calls), whole or as events while it grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any, ClassVar

from app.api.call import Call
from app.api.errors import ApiError
from app.api.own_names import own_names
from app.api.replies import is_own_end
from app.api.sse import Emit, frame_named
from app.api.tools.styled_calls import CALL_TEXTS, form_of
from engine import CompletionOutput, RequestOutput

Json = dict[str, Any]


class BlockWriter(ABC):
    """Writes one reply of one choice; a dialect says what blocks and events look like.

    Attributes:
        TYPES: field of a delta, or kind of a call -> the dialect's type of such a block; the calls are last.
        RENAMED: name in a chat request -> the dialect's name, for errors.
    """

    TYPES: ClassVar[dict[str, str]]
    RENAMED: ClassVar[dict[str, str]]

    def __init__(self, call: Call) -> None:
        self.call = call
        self.blocks: list[Json] = []
        self._parser = call.make_reader()
        self._pieces: list[str] = []  # text of the open block
        self._events: list[bytes] = []
        self._is_open = False
        self._is_begun = False

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == self.TYPES["function"] for block in self.blocks)

    async def finish(self) -> Json:
        """Run the request to its end and return the reply."""
        with own_names(self.RENAMED):
            output = await self.call.finish()
        return self.whole(output)

    def whole(self, output: RequestOutput) -> Json:
        """Return the reply of a finished request."""
        choice = output.outputs[0]
        self._feed(choice)
        return self._end(output, choice, len(choice.token_ids))

    async def stream(self, emit: Emit) -> Json:
        """Emit the events and return the reply."""
        num_tokens = 0
        reply: Json = {}
        with own_names(self.RENAMED):
            async with aclosing(self.call.generate()) as outputs:
                async for output in outputs:
                    choice = output.outputs[0]
                    num_tokens += len(choice.token_ids)
                    if not self._is_begun:
                        self._is_begun = True
                        self.begin(output)
                    self._feed(choice)
                    if choice.is_finished:
                        reply = self._end(output, choice, num_tokens)
                    if data := self._take():
                        await emit(data)
        return reply

    def keep_alive(self) -> bytes:
        """Return events for a client that has waited: those before the first token, then what shows that we live.

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
        """Tell the events before the first token; the output has it, if it is there already."""

    @abstractmethod
    def ping(self) -> None:
        """Tell an event that says nothing new."""

    @abstractmethod
    def end(self, output: RequestOutput, choice: CompletionOutput, num_tokens: int) -> Json:
        """Close the blocks, tell the last events, and return the reply."""

    @abstractmethod
    def frame_error(self, error: ApiError) -> bytes:
        """Return an error after the first event."""

    @abstractmethod
    def make_block(self, kind: str, call_id: str, name: str) -> Json:
        """Return an empty block; id and name are those of a call."""

    @abstractmethod
    def add_open(self, block: Json) -> None:
        """Tell the events of a new block."""

    @abstractmethod
    def add_growth(self, kind: str, text: str) -> None:
        """Tell more text of the open block."""

    @abstractmethod
    def add_end(self, block: Json, text: str, status: str) -> None:
        """Put the whole text into the block and tell its end."""

    def close(self, status: str = "completed") -> None:
        """Close the open block."""
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
        self._events.append(frame_named(kind, fields))

    def _take(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def _feed(self, choice: CompletionOutput) -> None:
        if text := choice.text:
            self._add({"content": text} if self._parser is None else self._parser.feed(text))

    def _end(self, output: RequestOutput, choice: CompletionOutput, num_tokens: int) -> Json:
        if self._parser is not None:
            self._add(self._parser.close(not is_own_end(choice)))
        return self.end(output, choice, num_tokens)

    def _add(self, delta: Json) -> None:
        for name, kind in self.TYPES.items():
            if name not in CALL_TEXTS and delta.get(name):
                if not self._is_open or self.blocks[-1]["type"] != kind:
                    self.open(kind)
                self._grow(kind, delta[name])
        for part in delta.get("tool_calls", ()):
            form = form_of(part)
            kind, text = self.TYPES[form], part[form][CALL_TEXTS[form]]
            if "id" in part:
                self.open(kind, part["id"], part[form]["name"])
            if text:
                self._grow(kind, text)

    def _grow(self, kind: str, text: str) -> None:
        self._pieces.append(text)
        self.add_growth(kind, text)
