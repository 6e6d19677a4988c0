"""CoreClient: sends requests to the cores and passes their results to the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, assert_never

from engine.actors.detokenizer import DetokenizerActor
from engine.core.detokenizer import Detokenizer
from engine.errors import EngineError, InvalidRequest
from engine.input.tokenizer import Tokenizer
from engine.messages import (
    AbortRequest,
    Accepted,
    AdapterRef,
    AddRequest,
    Call,
    CoreInbox,
    CoreOutput,
    CoreStats,
    KVEvents,
    LoadAdapter,
    NewTokens,
    Refused,
    Reply,
    ResetPrefixCache,
    TakeSnapshot,
)
from engine.metrics import EngineStats, Metrics
from engine.output_stream import OutputStream
from engine.outputs import EngineSnapshot, GrammarInfo


class CoreClient:
    """The front's side of the cores. Messages go out through `send` and come back through `deliver`."""

    def __init__(
        self,
        send: Callable[[CoreInbox], None],
        call: Callable[[Callable[[int], Call]], Awaitable[Reply]],
        tokenizer: Tokenizer | None,
        metrics: Metrics,
    ) -> None:
        self.streams: dict[int, tuple[OutputStream, int]] = {}  # handle -> (stream, index); unfinished ones
        self.stats = CoreStats()
        self.send = send
        self._call = call  # gets what makes the call from its id, and returns the reply
        self._metrics = metrics
        self._requests: dict[str, OutputStream] = {}  # request_id -> stream, while it has a reader
        self._opening: dict[int, tuple[AddRequest, asyncio.Future[GrammarInfo | None]]] = {}
        self.detokenizer = DetokenizerActor(Detokenizer(tokenizer), self.streams, metrics, send_abort=send)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, including those whose grammar is being compiled."""
        return not self.streams

    @property
    def num_opening(self) -> int:
        """Number of completions whose grammar is being compiled."""
        return sum(len(message.completions) for message, _ in self._opening.values())

    async def open(self, message: AddRequest, stream: OutputStream) -> GrammarInfo | None:
        """Send a request to the core. Once it is accepted, its stream ends exactly once.

        Raises:
            InvalidRequest, GrammarError: the grammar cannot be enforced, or the request_id is in use.
            EngineDead: the core ended first.
        """
        known = self._requests.get(stream.request_id)
        if known is not None and not known.is_finished:
            raise InvalidRequest(
                f"request_id {stream.request_id!r} is in use by a running request", "request_id"
            )
        stream.handles = [completion.handle for completion in message.completions]
        self._requests[stream.request_id] = stream
        self.streams |= {handle: (stream, index) for index, handle in enumerate(stream.handles)}
        answer = asyncio.get_running_loop().create_future()
        self._opening[stream.handles[0]] = (message, answer)
        self.send(message)
        try:
            return await answer
        except BaseException as error:
            self._opening.pop(stream.handles[0], None)
            if isinstance(error, asyncio.CancelledError):
                self.abort(stream.handles)
            for handle in stream.handles:
                self.streams.pop(handle, None)
            self.close_stream(stream)
            raise

    def close_stream(self, stream: OutputStream) -> None:
        """Abort the unfinished completions of a stream without a reader, and free its request_id."""
        self.abort(stream.handles)
        if self._requests.get(stream.request_id) is stream:
            del self._requests[stream.request_id]

    def abort_request(self, request_id: str) -> None:
        """Abort a request. Unknown ids are ignored."""
        if request_id in self._requests:
            self.abort(self._requests[request_id].handles)

    def abort(self, handles: Iterable[int]) -> None:
        """Abort completions. Finished ones are ignored."""
        live = [handle for handle in handles if handle in self.streams]
        if live:
            self.send(AbortRequest(live))

    async def take_snapshot(self, with_blocks: bool) -> EngineSnapshot:
        """Raises EngineDead if no core runs, or it ended first; so do the other calls."""
        reply = await self._call(lambda call_id: TakeSnapshot(call_id, with_blocks))
        assert reply.snapshot is not None, "it answers TakeSnapshot"
        return reply.snapshot

    async def reset_prefix_cache(self) -> bool:
        return (await self._call(ResetPrefixCache)).is_reset

    async def load_adapter(self, ref: AdapterRef) -> None:
        """Let the core read an adapter.

        Raises:
            InvalidRequest: the adapter cannot be used.
        """
        reply = await self._call(lambda call_id: LoadAdapter(call_id, ref))
        if reply.error is not None:
            raise InvalidRequest(reply.error, "lora_path")

    def deliver(self, message: CoreOutput) -> None:
        """Handle a message of the core. Called on the event loop."""
        match message:
            case NewTokens():
                self.detokenizer.tell(message)
            case CoreStats():
                self.stats = message
                self._metrics.observe_core(message)
            case Accepted(handle=handle, grammar=grammar):
                if handle in self._opening:
                    self._accept(*self._opening.pop(handle), grammar)
            case Refused(handle=handle):
                if handle in self._opening:
                    _resolve(self._opening.pop(handle)[1], message.to_error())
            case KVEvents():
                pass  # for routers
            case Reply():
                raise AssertionError("the dispatcher knows who waits for it")
            case _:
                assert_never(message)

    def fail_all(self, error: EngineError) -> None:
        """End all streams with this error."""
        for stream, _ in self.streams.values():
            stream.fail(error)
        self.streams.clear()
        for _, answer in self._opening.values():
            _resolve(answer, error)

    def make_stats(self) -> EngineStats:
        """Return the current gauges, and the counters summed over this core and earlier ones."""
        num_waiting = len(self.streams) - self.num_opening - self.stats.num_running
        # A stop string ends a stream before the scheduler is informed, so num_running may exceed the streams.
        return self._metrics.make_stats(self.stats, max(0, num_waiting), self.num_opening)

    def _accept(
        self, message: AddRequest, answer: asyncio.Future[GrammarInfo | None], grammar: GrammarInfo | None
    ) -> None:
        if grammar is not None:
            self._metrics.grammar_compile.observe(grammar.compile_time_s)
        self._metrics.prompt_tokens += len(message.prompt_token_ids)
        self.detokenizer.tell(message)
        _resolve(answer, grammar)


def _resolve(answer: asyncio.Future[Any], value: object) -> None:
    if answer.done():  # cancelled by the caller
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
    else:
        answer.set_result(value)
