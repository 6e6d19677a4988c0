"""Prefills: requests whose prompt a prefill replica computes, before a decode replica gets them.

    long uncached prompt ──▶ prefill replica, which saves the blocks of each chunk ──▶ end
                                                                                        │
    decode replica, which finds the blocks ◀──────── the ordinary request ◀─────────────┘

Nothing depends on it: without its blocks, the decode replica computes the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.cluster.journal import Entry
from engine.cluster.replica import Replica
from engine.cluster.router import Router
from engine.messages import AbortRequest, AddRequest, NewCompletion
from engine.sampling_params import SamplingParams


class Prefills:
    """The prefills under way. Their handles are negative, so that they are never those of completions.

    Args:
        min_tokens: fewest uncached prompt tokens for which a prefill replica is used.
    """

    def __init__(self, router: Router, min_tokens: int) -> None:
        self._router = router
        self._min_tokens = min_tokens
        self._running: dict[int, tuple[Entry, Replica]] = {}  # by handle of the prefill

    def start(self, entry: Entry, message: AddRequest, ready: Sequence[Replica]) -> bool:
        """Send a request's prompt to a prefill replica, if that pays.

        Args:
            message: the request as a decode replica would get it.
            ready: replicas, of both kinds, that accept requests.
        """
        if entry.is_prefilled or entry.num_crashes:
            return False
        params = message.params
        others = [each.index for each in ready if not each.is_prefill_only]
        able = {
            each.index: each
            for each in ready
            if each.is_prefill_only and len(message.prompt_token_ids) < each.max_model_len
        }
        if not able or not others or params.prompt_logprobs is not None or params.pooling is not None:
            return False
        if self._router.count_uncached(message, others) < self._min_tokens:
            return False
        entry.is_prefilled = True
        handle = -1 - message.completions[0].handle
        prefill = msgspec.structs.replace(
            message,
            params=SamplingParams(max_tokens=1, temperature=0.0, saves_blocks=True),
            completions=[NewCompletion(handle, 0)],
            bad_word_ids=[],
            prediction_token_ids=[],
        )
        entry.ticket = self._router.choose(prefill, list(able))
        replica = able[entry.ticket.replica]
        self._running[handle] = entry, replica
        replica.send(prefill)
        return True

    def take_ended(self, handles: Iterable[int]) -> list[Entry]:
        """Return the requests whose prefill is among these handles that have ended."""
        return [self._running.pop(handle)[0] for handle in handles if handle in self._running]

    def cancel(self, entry: Entry) -> None:
        """Abort the prefill of a request, if there is one."""
        for handle, (running, replica) in list(self._running.items()):
            if running is entry:
                del self._running[handle]
                replica.send(AbortRequest([handle]))

    def list_held(self, replica: Replica | None = None) -> list[Entry]:
        """Return the requests whose prefill this replica computes, or any one."""
        return [entry for entry, each in self._running.values() if replica in (None, each)]
