"""Calls: what the front asks replicas, each with an id by which they reply."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.front.replica import Replica
from engine.messages import AdapterRef, Call, LoadAdapter, Reply, ResetPrefixCache, TakeSnapshot
from engine.outputs import EngineSnapshot, RequestView


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


class Calls:
    """The calls that replicas have not all answered. A replica that ends answers none."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, replica: Replica, reply: Reply) -> None:
        if (call := self._calls.get(reply.call_id)) is not None:
            call.take(replica.index, reply)

    def note_end(self, replica: Replica) -> None:
        for call in self._calls.values():
            call.take(replica.index, None)

    def fail_all(self, error: EngineError) -> None:
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(error)

    async def take_snapshot(self, with_blocks: bool) -> EngineSnapshot:
        """Raises EngineDead if no core runs, or it ended first; so do the other calls."""
        reply = await self._call(lambda call_id: TakeSnapshot(call_id, with_blocks))
        assert reply.snapshot is not None, "it answers TakeSnapshot"
        return reply.snapshot

    async def reset_prefix_cache(self) -> bool:
        return (await self._call(ResetPrefixCache)).is_reset

    async def load_adapter(self, ref: AdapterRef) -> None:
        """Let the cores read an adapter."""
        reply = await self._call(lambda call_id: LoadAdapter(call_id, ref))
        if reply.error is not None:
            raise InvalidRequest(reply.error, "lora_path")

    async def settle(self, replica: Replica) -> None:
        """Return when the core has answered everything that was sent to it before, or has ended."""
        await self._call(lambda call_id: TakeSnapshot(call_id, with_blocks=False), [replica])

    async def _call(self, make: Callable[[int], Call], replicas: Sequence[Replica] | None = None) -> Reply:
        """Make a call to these replicas, or all running ones. Returns what they reply together."""
        called = [each for each in self._replicas if each.is_up] if replicas is None else replicas
        message = make(next(self._ids))
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
        tuple(running_first), num_blocks, parts[0].block_size, tuple(cached),
        sum(part.max_num_seqs for part in parts), sum(part.max_num_batched_tokens for part in parts),
    )
