"""Client: owns the requests in flight. It gives each to a replica, and moves it when the replica ends.

    Engine ──open, abort, call──▶ Client ──Router──▶ Replica ──▶ core
      ▲                             │ handle → Entry   │
      └── OutputStream ◀────────────┴──── receive ─────┘

An Entry has everything about a request: message, tokens so far, reader, replica. WaitingRequests has those without a
replica, and says which replicas may get a request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.front.calls import Calls
from engine.front.entry import Batch, Entry
from engine.front.journal_file import JournalFile
from engine.front.replica import Replica
from engine.front.router import Router
from engine.front.streams import OutputStream, ReaderPacing
from engine.front.waiting_requests import WaitingRequests
from engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    CoreStats,
    DropAdapter,
    KVEvents,
    NewTokens,
    Refused,
    Reply,
)
from engine.metrics import CORE_COUNTERS, CORE_GAUGES, EngineStats, Metrics, add_counts, add_fields
from engine.outputs import FinishReason, GrammarInfo
from engine.wire.frames import MessageTooLarge

logger = logging.getLogger("troupe.engine")


class Client:
    """The front's side of the cores. Synchronous but for `open` and calls; runs on the event loop."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, metrics: Metrics, min_prefill: int
    ) -> None:
        self.router = router
        self.journal_file: JournalFile | None = None
        self.calls = Calls(replicas)
        self.stats = CoreStats()  # summed over the running cores
        self._replicas = replicas
        self._metrics = metrics
        self._min_prefill = min_prefill
        self._entries: dict[int, Entry] = {}  # by handle of each unfinished completion
        self._prefills: dict[int, Entry] = {}  # by handle of each prefill
        self._num_opening = 0  # completions that are not accepted yet
        self._requests: dict[str, Entry] = {}  # by request_id, while it has a reader
        self.waiting = WaitingRequests(replicas, router, self._place)
        self._newly_accepted: dict[int, list[Entry]] = {}  # by replica, since its last step
        self._inbox: deque[tuple[Replica, NewTokens]] = deque()
        self._batches: dict[int, Batch] = {}  # by replica
        self._version = 0  # changes when a completion ends or changes its replica
        self._ended: list[OutputStream] = []  # their readers have not been woken
        self._pacing = ReaderPacing()

    @property
    def num_unfinished(self) -> int:
        """Completions that have not ended, including those whose grammar is being compiled."""
        return len(self._entries)

    async def open(self, message: AddRequest, stream: OutputStream) -> GrammarInfo | None:
        """Send a request to a core. Once it is accepted, its stream ends exactly once.

        Raises:
            InvalidRequest, GrammarError: the grammar cannot be enforced, or the request_id is in use.
            EngineDead: the core ended first.
        """
        known = self._requests.get(message.request_id)
        if known is not None and not known.stream.is_finished:
            raise InvalidRequest(
                f"request_id {message.request_id!r} is in use by a running request", "request_id"
            )
        handles = [each.handle for each in message.completions]
        accepted = asyncio.get_running_loop().create_future()
        entry = Entry(message, stream, accepted, dict(zip(handles, stream.completions, strict=True)))
        self._requests[message.request_id] = entry
        self._entries |= dict.fromkeys(handles, entry)
        self._num_opening += len(handles)
        self._place(entry)
        try:
            return await accepted
        except BaseException:
            self.close_stream(stream)
            raise

    def close_stream(self, stream: OutputStream) -> None:
        """Abort the unfinished completions of a stream without a reader, and free its request_id."""
        entry = self._requests.get(stream.request_id)
        if entry is not None and entry.stream is stream:
            if entry.open:
                self._abort(entry)
            del self._requests[stream.request_id]

    def abort(self, request_id: str) -> None:
        """End the completions of a request. Unknown ids are ignored."""
        if (entry := self._requests.get(request_id)) is not None:
            self._abort(entry)

    def abort_all(self) -> None:
        for entry in dict.fromkeys(self._entries.values()):
            self._abort(entry)

    def expire(self, stream: OutputStream, error: EngineError) -> None:
        stream.fail(error)
        entry = self._requests.get(stream.request_id)
        if entry is not None and entry.stream is stream:
            self._abort(entry)

    def fail_all(self, error: EngineError) -> None:
        """End all requests and calls of the front with this error."""
        self.calls.fail_all(error)
        entries = list(dict.fromkeys(self._entries.values()))
        self._inbox.clear()
        self.waiting.clear()
        for entry in entries:
            self._send_abort(entry)
            if entry.is_accepted:
                entry.stream.fail(error)
            elif not entry.accepted.done():
                entry.accepted.set_exception(error)
            for handle in list(entry.open):
                self._remove(entry, handle, "error")

    def make_stats(self) -> EngineStats:
        """Return the current gauges, and the counters summed over the running cores and earlier ones."""
        # A core may still compute completions that have ended here.
        num_waiting = max(0, len(self._entries) - self._num_opening - self.stats.num_running)
        return self._metrics.make_stats(self.stats, num_waiting, self._num_opening)

    def receive(self, replica: Replica, message: Any) -> None:
        """Handle a message of a core. Tokens are handled in the loop's next turn, after the scheduler's next plan."""
        match message:
            case NewTokens():
                if not self._inbox:
                    asyncio.get_running_loop().call_soon(self._take_some)
                self._inbox.append((replica, message))
            case CoreStats():
                for queued in self._newly_accepted.pop(replica.index, ()):
                    queued.is_queued = queued.replica is replica
                self.stats = message if len(self._replicas) == 1 else self._sum_stats(message)
                self._metrics.observe_core(message)
            case KVEvents():
                self.router.note_events(replica.index, message)
            case Accepted(handle=handle, grammar=grammar):
                if (entry := self._find_held(handle, replica)) is not None:
                    self._newly_accepted.setdefault(replica.index, []).append(entry)
                    if not entry.is_accepted and entry.prefill is None:
                        self._accept(entry, grammar)
            case Refused(handle=handle):
                if (entry := self._find_held(handle, replica)) is not None:
                    if entry.prefill is not None:
                        self._end_prefill(entry)
                    else:
                        self._refuse(entry, message)
            case Reply():
                self.calls.take(replica, message)

    def take_tokens(self) -> None:
        """Handle all tokens that have come."""
        while self._inbox:
            self._take_some()

    def _take_some(self) -> None:
        """Handle half of the tokens that came together, so that readers get two steps as two outputs."""
        for _ in range((len(self._inbox) + 1) // 2):
            try:
                self._take(*self._inbox.popleft())
            except Exception as error:  # an error here ends the requests, and not the front
                logger.error("the front crashed: %r", error, exc_info=error)
                self.fail_all(EngineDead(f"the engine crashed: {error!r}"))
                break
        self._wake_readers()
        if self._inbox:
            asyncio.get_running_loop().call_soon(self._take_some)

    def _take(self, replica: Replica, message: NewTokens) -> None:
        now, batch = time.monotonic(), None
        if message.handles:
            batch = self._batches.get(replica.index)
            if batch is None or batch.version != self._version or batch.handles != message.handles:
                batch = Batch(message.handles, self._entries, replica, self._version)
                self._batches[replica.index] = batch
            self._metrics.generation_tokens += batch.add(message)
        if message.details:
            self._take_details(replica, message, now)
        if batch is not None:
            is_single = not message.counts
            for handle, completion in batch.with_stops:
                if is_single and completion.token_ids[-1] in completion.quiet_ids:
                    continue
                if completion.finish_reason is None and (stop := completion.find_stop()) is not None:
                    completion.end("stop", stop)
                    self._stop(handle)
            batch.note_time(now, self._metrics)
            if batch.readers:
                self._pacing.wake(batch.readers)

    def _take_details(self, replica: Replica, message: NewTokens, now: float) -> None:
        counts = dict(zip(message.handles, message.counts or itertools.repeat(1), strict=False))
        for detail in message.details:
            handle = detail.handle
            entry = self._find_held(handle, replica)
            if entry is None:
                continue
            if entry.prefill is not None:
                if detail.finish_reason is not None:
                    self._end_prefill(entry)
                continue
            completion = entry.open[handle]
            entry.stream.take(completion, detail, counts.get(handle, 0), now)
            if detail.queue_time_s is not None:
                self._note_start(entry)
            if detail.finish_reason is not None:
                self._note_end(entry, handle)
            elif completion.finish_reason is not None:
                self._stop(handle)

    def _note_start(self, entry: Entry) -> None:
        """A request has got a token: its prompt is computed."""
        assert entry.ticket is not None
        entry.has_started = True
        self.router.note_first_token(entry.ticket)
        self.waiting.acquit(entry)

    def _accept(self, entry: Entry, grammar: GrammarInfo | None) -> None:
        entry.is_accepted = True
        self._num_opening -= len(entry.open)
        if self.journal_file is not None:
            self.journal_file.add(entry.message)
        if grammar is not None:
            self._metrics.grammar_compile.observe(grammar.compile_time_s)
        self._metrics.prompt_tokens += len(entry.message.prompt_token_ids)
        if not entry.accepted.done():  # its caller may have been cancelled
            entry.accepted.set_result(grammar)

    def _refuse(self, entry: Entry, message: Refused) -> None:
        if entry.is_accepted:  # by an earlier replica
            self._end(entry, "error", message.message)
            return
        if not entry.accepted.done():
            entry.accepted.set_exception(message.to_error())
        for handle in list(entry.open):
            self._remove(entry, handle, "error")

    def _abort(self, entry: Entry) -> None:
        """End a request here; what its replica still computes is dropped."""
        self._send_abort(entry)
        self._end(entry, "abort")
        self._wake_readers()

    @staticmethod
    def _send_abort(entry: Entry) -> None:
        if entry.replica is not None:
            entry.replica.send(AbortRequest(list(entry.open) if entry.prefill is None else [entry.prefill]))

    def _stop(self, handle: int) -> None:
        """Abort a completion that ended at a stop string, which its replica does not know."""
        entry = self._entries[handle]
        assert entry.replica is not None
        entry.replica.send(AbortRequest([handle], "stop"))
        self._note_end(entry, handle)

    def _end(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        """End all completions of a request without an answer of a replica."""
        if entry.open and not entry.is_accepted:
            self._accept(entry, None)
        for handle, completion in list(entry.open.items()):
            completion.end(reason, error=error)
            self._note_end(entry, handle)

    def _note_end(self, entry: Entry, handle: int) -> None:
        entry.stream.note_end(entry.open[handle])
        self._ended.append(entry.stream)
        self._remove(entry, handle, entry.open[handle].finish_reason or "error")

    def _remove(self, entry: Entry, handle: int, reason: FinishReason) -> None:
        """Remove a completion that has ended; with the last one, the request."""
        completion = entry.open.pop(handle)
        del self._entries[handle]
        self._version += 1
        if not entry.is_accepted:
            self._num_opening -= 1
        elif self.journal_file is not None:
            self.journal_file.end(handle, completion.token_ids, reason)
        if not entry.open:
            self._release(entry)
            self.waiting.acquit(entry)

    def _wake_readers(self) -> None:
        if self._ended:
            self._pacing.wake(self._ended)
            self._ended = []

    def _find_held(self, handle: int, replica: Replica) -> Entry | None:
        entry = (self._entries if handle >= 0 else self._prefills).get(handle)
        return entry if entry is not None and entry.replica is replica else None

    def note_ready(self, replica: Replica) -> None:
        """Give waiting requests to a core that has started."""
        self.router.reset(replica.index)
        self.waiting.place_all()

    def note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        """Move the requests of a core that has ended."""
        self.note_end(replica)
        held = self._list_held(replica)
        if is_crash and (entry := self.waiting.blame(replica, held)) is not None:
            logger.error("request %s fails: two cores crashed on it", entry.message.request_id)
            self._release(entry)
            self._end(entry, "error", f"the engine crashed twice while it ran this request: {cause}")
            self._wake_readers()
        self._move(replica, held)

    def empty(self, replica: Replica) -> None:
        """Move the requests of a running core."""
        held = self._list_held(replica)
        for entry in held:
            self._send_abort(entry)
        self._move(replica, held)

    def _move(self, replica: Replica, entries: list[Entry]) -> None:
        """Take these requests from a replica, and give them to others."""
        unfinished = [entry for entry in entries if entry.open]
        for entry in unfinished:
            self._release(entry)
        self.waiting.put_back(replica, unfinished)

    def note_end(self, replica: Replica) -> None:
        """Keep the counters of a core that has ended or sleeps. Its gauges are gone, and it answers no call."""
        self.calls.note_end(replica)
        self._newly_accepted.pop(replica.index, None)
        self._metrics.note_core_end(replica.stats, replica.index)
        replica.stats = CoreStats()
        self.stats = self._sum_stats(replica.stats)

    def _list_held(self, replica: Replica) -> list[Entry]:
        """Return the requests that a replica holds, oldest first, with the tokens that it has sent."""
        self.take_tokens()
        return [entry for entry in dict.fromkeys(self._entries.values()) if entry.replica is replica]

    def _place(self, entry: Entry) -> None:
        """Give a request to a replica; without one it waits. One that does not fit into a message fails."""
        try:
            if ready := self.waiting.list_ready(entry):
                self._send(entry, ready)
                return
            if 0 < (longest := self.waiting.max_context) < entry.min_context:
                raise InvalidRequest(
                    f"the request needs {entry.min_context} tokens; the context of the replicas that run now has "
                    f"{longest}"
                )
            self.waiting.append(entry)
        except (InvalidRequest, MessageTooLarge) as error:
            self._release(entry)
            self._refuse(entry, Refused(0, "invalid_request", str(error)))
            self._wake_readers()

    def _send(self, entry: Entry, ready: Sequence[Replica]) -> None:
        message = entry.make_message()
        candidates = [each.index for each in ready if not each.is_prefill_only]
        if len(candidates) < len(ready) and (able := self._list_prefilling(entry, message, ready, candidates)):
            candidates = able
            message = entry.make_prefill(message)
            self._prefills[message.completions[0].handle] = entry
            self._metrics.num_prefills += 1
        entry.ticket = self.router.choose(message, candidates or [each.index for each in ready])
        entry.replica = replica = self._replicas[entry.ticket.replica]
        self._version += 1
        entry.is_queued = entry.has_started = False
        if entry.prefill is None:
            if entry.fingerprint is not None:
                self._metrics.num_resumed += 1
                self._metrics.num_resumed_inexact += entry.fingerprint != replica.fingerprint
            entry.fingerprint = replica.fingerprint
        self.waiting.note_sent(entry)
        replica.send(message)

    def _list_prefilling(
        self, entry: Entry, message: AddRequest, ready: Sequence[Replica], answering: Sequence[int]
    ) -> list[int]:
        """Return the replicas that may compute the prompt for another one, if that pays.

        They save its blocks, and the other replica finds them. Without blocks it computes the prompt.
        """
        if entry.is_prefilled or entry.group is not None or not answering:
            return []
        num_tokens, params = len(message.prompt_token_ids), message.params
        able = [each.index for each in ready if each.is_prefill_only and num_tokens < each.max_model_len]
        if not able or params.prompt_logprobs is not None or params.pooling is not None:
            return []
        return able if self.router.count_uncached(message, answering) >= self._min_prefill else []

    def _end_prefill(self, entry: Entry) -> None:
        """Give a request whose prompt is computed, or was refused, to the replica that answers."""
        self._release(entry)
        self._place(entry)

    def _release(self, entry: Entry) -> None:
        """Take a request from its replica."""
        if entry.prefill is not None:
            del self._prefills[entry.prefill]
            entry.prefill = None
        if entry.ticket is not None:
            self.router.end(entry.ticket)
            entry.ticket = None
        entry.replica = None
        self._version += 1

    def _sum_stats(self, latest: CoreStats) -> CoreStats:
        """Return the sums over the running cores, with what the latest message measured."""
        stats = [replica.stats for replica in self._replicas]
        sums = add_fields(stats, (*CORE_COUNTERS, *CORE_GAUGES, "num_open_steps"))
        drafts = reduce(add_counts, (each.drafts for each in stats))
        return CoreStats(
            **sums, step_gaps_s=latest.step_gaps_s, mask_times_s=latest.mask_times_s,
            step_tokens=latest.step_tokens, drafts=drafts,
        )  # fmt: skip

    def drop_adapter(self, digest: str) -> None:
        for replica in self._replicas:
            replica.send(DropAdapter(digest))
