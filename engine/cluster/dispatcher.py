"""Dispatcher: gives requests to replicas, and moves them when a replica ends.

    CoreClient ──send──▶ Dispatcher ──Router──▶ Replica
        ▲                   │ Journal             │
        └──────deliver──────┴──────receive────────┘

A request that makes cores crash would take one replica after another with it. So requests that were running in a core
when it crashed run again one per replica until they produce a token; if the core crashes then, that request fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from engine.cluster.frames import MessageTooLarge
from engine.cluster.journal import NOWHERE, Entry, Journal
from engine.cluster.journal_file import JournalFile
from engine.cluster.prefills import Prefills
from engine.cluster.replica import Replica
from engine.cluster.router import Router
from engine.core_client import CoreClient
from engine.errors import EngineDead, EngineError
from engine.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    Call,
    CoreInbox,
    CoreStats,
    Detail,
    DropAdapter,
    KVEvents,
    LoadAdapter,
    NewTokens,
    Refused,
    Reply,
    ResetPrefixCache,
    Sleep,
    TakeSnapshot,
)
from engine.metrics import CORE_COUNTERS, CORE_GAUGES, Metrics, add_counts, add_fields
from engine.outputs import EngineSnapshot, FinishReason, RequestView

logger = logging.getLogger("troupe.engine")


class Dispatcher:
    """Connects one CoreClient with several replicas."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, metrics: Metrics, prefills: Prefills
    ) -> None:
        self.client: CoreClient  # of the running front
        self.router = router
        self.journal_file: JournalFile | None = None
        self._replicas = replicas
        self._metrics = metrics
        self._journal = Journal()
        self._prefills = prefills
        self._waiting: deque[Entry] = deque()  # requests that no replica holds, without suspects
        # Requests that a core held when it crashed: those that wait, and by replica the one that runs again there.
        self._suspects: deque[Entry] = deque()
        self._tried: dict[int, Entry] = {}
        self._calls: dict[int, _Call] = {}  # by id; those that replicas have not all answered
        self._call_ids = itertools.count()

    def send(self, message: CoreInbox) -> None:
        """Pass a message of the front to the replicas that it concerns."""
        match message:
            case AddRequest():
                self._place(self._journal.add(message))
            case AbortRequest(handles=handles):
                self._abort(message, handles)
            case DropAdapter():
                for replica in self._replicas:
                    replica.send(message)
            case TakeSnapshot() | ResetPrefixCache() | LoadAdapter() | Sleep():
                raise AssertionError("calls are made by `call`, and sleep goes to the replicas directly")

    def note_ready(self, replica: Replica) -> None:
        """Give waiting requests to a core that has started."""
        self.router.reset(replica.index)
        self.place_waiting()

    def note_down(self, replica: Replica, cause: str, is_crash: bool) -> None:
        """Move the requests of a core that has ended.

        Args:
            is_crash: one of the requests may have caused it.
        """
        self.note_end(replica)
        entries = self._list_held(replica)
        self._move(replica, self._blame(entries, cause) if is_crash else entries)

    def empty(self, replica: Replica) -> None:
        """Move the requests of a running core."""
        entries = self._list_held(replica)
        replica.send(AbortRequest([handle for entry in entries for handle in entry.token_ids]))
        self._move(replica, entries)

    def _list_held(self, replica: Replica) -> list[Entry]:
        return self._journal.list_held(replica.index) + self._prefills.list_held(replica)

    def note_end(self, replica: Replica) -> None:
        """Keep the counters of a core that has ended or sleeps. Its gauges are gone, and it answers no call."""
        for call in self._calls.values():
            call.take(replica.index, None)
        self._metrics.note_core_end(replica.stats)
        replica.stats = CoreStats()
        self.client.deliver(self._sum_stats(replica.stats))

    def fail_all(self, error: EngineError) -> None:
        """End all requests and calls of the front with this error."""
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(error)
        waiting = [*self._waiting, *self._suspects, *self._prefills.list_held()]
        self._waiting.clear()
        self._suspects.clear()
        for replica in self._replicas:
            held = [handle for entry in self._journal.list_held(replica.index) for handle in entry.token_ids]
            if held:
                replica.send(AbortRequest(held))
                self._remove(dict.fromkeys(held, "error"))
        self._remove({handle: "error" for entry in waiting for handle in entry.token_ids})
        self.client.fail_all(error)

    def _blame(self, entries: list[Entry], cause: str) -> list[Entry]:
        """Count a crash against the requests of the core. Returns those that may run again."""
        suspects = [entry for entry in entries if entry.num_crashes]
        if not suspects:
            for entry in entries:
                entry.num_crashes = 1
            return entries
        for entry in suspects:
            logger.error("request %s fails: two cores crashed on it", entry.message.request_id)
            error = f"the engine crashed twice while it ran this request: {cause}"
            self._end(entry, list(entry.token_ids), "error", error)
        return [entry for entry in entries if entry not in suspects]

    def _move(self, replica: Replica, entries: list[Entry]) -> None:
        """Take requests from a replica and give them to others."""
        self.client.detokenizer.forget(replica.index)
        for entry in entries:
            self._release(entry)
            if entry.aborted:
                self._end(entry, list(entry.aborted), "abort")
        for entry in reversed(entries):
            (self._suspects if entry.num_crashes else self._waiting).appendleft(entry)
        self.place_waiting()

    def place_waiting(self) -> None:
        """Place what waits, as far as replicas are ready; of the suspects one on each."""
        for _ in range(len(self._waiting)):
            if (entry := self._waiting.popleft()).token_ids:
                self._place(entry)
        while self._suspects and (not self._suspects[0].token_ids or self._list_ready(self._suspects[0])):
            if (entry := self._suspects.popleft()).token_ids:
                self._place(entry)

    def _list_ready(self, entry: Entry) -> list[Replica]:
        """Return the replicas that may get this request now. Their contexts may differ, see `max_model_len`."""
        taken = self._tried if entry.num_crashes else {}
        ready = [each for each in self._replicas if each.state == "ready" and each.index not in taken]
        return [each for each in ready if entry.min_context <= each.max_model_len]

    def _place(self, entry: Entry) -> None:
        """Give a request to a replica; without one it waits. One that does not fit into a message fails."""
        try:
            self._send(entry)
        except MessageTooLarge as error:
            self._refuse(entry, Refused(next(iter(entry.token_ids)), "invalid_request", str(error)))

    def _send(self, entry: Entry) -> None:
        ready = self._list_ready(entry)
        longest = max((each.max_model_len for each in self._replicas if each.state != "dead"), default=0)
        if longest and entry.min_context > longest:
            text = f"the request has {entry.num_tokens} tokens; the context of the replicas that run now has {longest}"
            self._refuse(entry, Refused(next(iter(entry.token_ids)), "invalid_request", text))
            return
        if not ready:
            (self._suspects if entry.num_crashes else self._waiting).append(entry)
            return
        message = entry.make_message()
        if self._prefills.start(entry, message, ready):
            self._metrics.num_prefills += 1
            return
        others = [each.index for each in ready if not each.is_prefill_only]
        entry.ticket = self.router.choose(message, others or [each.index for each in ready])
        replica = self._replicas[entry.ticket.replica]
        if entry.fingerprint is not None:
            self._metrics.num_resumed += 1
            self._metrics.num_resumed_inexact += entry.fingerprint != replica.fingerprint
        entry.fingerprint = replica.fingerprint
        self._journal.assign(entry, replica.index)
        if entry.num_crashes:
            self._tried[replica.index] = entry
        replica.send(message)

    def _release(self, entry: Entry) -> None:
        """Take a request from its replica's load."""
        self._prefills.cancel(entry)
        if self._tried.get(entry.replica) is entry:
            del self._tried[entry.replica]
        if entry.ticket is not None:
            self.router.end(entry.ticket)
            entry.ticket = None
        if entry.replica != NOWHERE:
            self._journal.assign(entry, NOWHERE)

    def _end(self, entry: Entry, handles: list[int], reason: FinishReason, error: str | None = None) -> None:
        """End completions without an answer of a replica."""
        if not entry.is_accepted:
            self._accept(entry, Accepted(entry.message.completions[0].handle))
        ends = [Detail(handle, finish_reason=reason, error=error) for handle in handles]
        self.client.deliver(NewTokens(details=ends, source=NOWHERE))
        self._remove(dict.fromkeys(handles, reason))

    def _accept(self, entry: Entry, message: Accepted) -> None:
        entry.is_accepted = True
        if self.journal_file is not None:
            self.journal_file.add(entry.message)
        self.client.deliver(message)

    def _remove(self, handles: dict[int, FinishReason]) -> None:
        """Remove completions that have ended, with their reasons, from the journal."""
        if self.journal_file is not None:
            for handle, reason in handles.items():
                if (entry := self._journal.find(handle)) is not None and entry.is_accepted:
                    self.journal_file.end(handle, entry.token_ids[handle], reason)
        is_suspect_gone = False
        for entry in self._journal.remove(handles):
            is_suspect_gone |= entry.num_crashes > 0
            self._release(entry)
        if is_suspect_gone:
            self.place_waiting()

    def _abort(self, message: AbortRequest, handles: Sequence[int]) -> None:
        by_replica: dict[int, list[int]] = {}
        for handle in handles:
            if (entry := self._journal.find(handle)) is not None:
                entry.aborted.add(handle)
                by_replica.setdefault(entry.replica, []).append(handle)
        for handle in by_replica.pop(NOWHERE, []):
            entry = self._journal.find(handle)
            assert entry is not None
            self._end(entry, [handle], message.finish_reason, message.error)
        for index, held in by_replica.items():
            self._replicas[index].send(AbortRequest(held, message.finish_reason, message.error))

    def receive(self, replica: Replica, message: Any) -> None:
        """Handle a message of a core."""
        match message:
            case NewTokens():
                self._pass_tokens(replica, message)
            case CoreStats():
                self.client.deliver(self._sum_stats(message))
            case KVEvents():
                self.router.note_events(replica.index, message)
            case Accepted(handle=handle):
                entry = self._journal.find(handle)
                if entry is not None and entry.replica == replica.index and not entry.is_accepted:
                    self._accept(entry, message)
            case Refused(handle=handle):
                self._take_prefilled([handle])
                entry = self._journal.find(handle)
                if entry is not None and entry.replica == replica.index:
                    self._refuse(entry, message)
            case Reply(call_id=call_id):
                if (call := self._calls.get(call_id)) is not None:
                    call.take(replica.index, message)

    def _take_prefilled(self, handles: Sequence[int]) -> None:
        """Give requests whose prefill has ended, or was refused, to a decode replica."""
        for prefilled in self._prefills.take_ended(handles):
            self._release(prefilled)
            self._place(prefilled)

    def _pass_tokens(self, replica: Replica, message: NewTokens) -> None:
        self._take_prefilled([each.handle for each in message.details if each.finish_reason is not None])
        message = self._journal.record(message, replica.index)
        self.client.deliver(message)
        if not message.details:
            return
        ended: dict[int, FinishReason] = {}
        for detail in message.details:
            if detail.finish_reason is not None:
                ended[detail.handle] = detail.finish_reason
            elif detail.queue_time_s is not None:
                entry = self._journal.find(detail.handle)
                assert entry is not None and entry.ticket is not None
                self.router.note_first_token(entry.ticket)
                if entry.num_crashes:
                    entry.num_crashes = 0
                    del self._tried[entry.replica]
                    self.place_waiting()
        self._remove(ended)

    def _refuse(self, entry: Entry, message: Refused) -> None:
        handles = list(entry.token_ids)
        if entry.is_accepted:  # an earlier replica had accepted it
            self._end(entry, handles, "error", message.message)
        else:
            self.client.deliver(message)
            self._remove(dict.fromkeys(handles, "error"))

    def _sum_stats(self, latest: CoreStats) -> CoreStats:
        """Return the sums over the running cores, with what the latest message measured."""
        if len(self._replicas) == 1:
            return latest
        stats = [replica.stats for replica in self._replicas]
        sums = add_fields(stats, (*CORE_COUNTERS, *CORE_GAUGES, "num_open_steps"))
        drafts = reduce(add_counts, (each.drafts for each in stats))
        return CoreStats(
            **sums, step_gaps_s=latest.step_gaps_s, mask_times_s=latest.mask_times_s, drafts=drafts
        )

    async def call(
        self, make: Callable[[int], Call], replicas: Sequence[Replica] | None = None
    ) -> Reply:
        """Make a call to these replicas, or all running ones. Returns what they reply together.

        Raises:
            EngineDead: no replica runs, or all of them ended first.
        """
        called = [each for each in self._replicas if each.is_up] if replicas is None else replicas
        message = make(next(self._call_ids))
        call = _Call({each.index for each in called})
        self._calls[message.call_id] = call
        try:
            for replica in called:
                replica.send(message)
            if called:
                await call.done
        finally:
            del self._calls[message.call_id]
        if not call.replies:
            raise EngineDead("no replica is running; try again later")
        snapshots = [reply.snapshot for reply in call.replies if reply.snapshot is not None]
        return Reply(
            message.call_id,
            merge_snapshots(snapshots) if snapshots else None,
            all(reply.is_reset for reply in call.replies),
            next((reply.error for reply in call.replies if reply.error is not None), None),
        )

    async def settle(self, replica: Replica) -> None:
        """Return when the core has answered everything that was sent to it before, or has ended."""
        with suppress(EngineDead):
            await self.call(lambda call_id: TakeSnapshot(call_id, with_blocks=False), [replica])


@dataclass(slots=True)
class _Call:
    """A call of the front to several replicas."""

    waits_for: set[int]  # replicas that have neither replied nor ended
    replies: list[Reply] = field(default_factory=list)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def take(self, index: int, reply: Reply | None) -> None:
        """Take the reply of a replica, or None if it has ended."""
        if index not in self.waits_for:
            return
        self.waits_for.discard(index)
        if reply is not None:
            self.replies.append(reply)
        if not self.waits_for and not self.done.done():
            self.done.set_result(None)


def merge_snapshots(parts: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Return one snapshot of several caches; block ids are numbered through, cache after cache."""
    requests: list[RequestView] = []
    cached: list[int] = []
    num_blocks = 0
    for part in parts:
        offset = num_blocks
        requests += [
            replace(view, block_ids=tuple(block_id + offset for block_id in view.block_ids))
            for view in part.requests
        ]
        cached += [block_id + offset for block_id in part.cached_block_ids]
        num_blocks += part.num_blocks
    running_first = sorted(requests, key=lambda view: view.phase not in ("prefill", "decode"))
    return EngineSnapshot(
        tuple(running_first),
        num_blocks,
        parts[0].block_size,
        tuple(cached),
        sum(part.max_num_seqs for part in parts),
        sum(part.max_num_batched_tokens for part in parts),
    )
