"""Router: chooses the replica of each request from its load and its prefix cache.

Under "prefix_aware" the cost of a replica is, in tokens,

    uncached prompt tokens + queued prefill + BLOCK_WEIGHT x KV blocks in use

The router counts queues and blocks itself. Prefix knowledge is exact: replicas report every block that enters or leaves
their cache. Blocks of a prompt count as cached as soon as it is sent to a replica, so a burst of one prefix finds them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config_fields import RouterPolicy
from engine.core.block_hash import extend_block_hashes, list_extra_keys, list_image_keys
from engine.messages import AddRequest, KVEvents

# Prompt tokens that delay a replica's requests as much as one more block in use, which every later step reads.
BLOCK_WEIGHT = 2.0


@dataclass(eq=False, slots=True)
class Ticket:
    """The load that one request puts on a replica."""

    replica: int
    num_uncached: int  # prompt tokens to compute; 0 after the first token
    num_blocks: int
    hashes: list[bytes]
    num_completions: int = 1


@dataclass(slots=True)
class _Load:
    """The router's view of one replica."""

    cached: set[bytes] = field(default_factory=set)  # as reported
    expected: Counter[bytes] = field(default_factory=Counter)  # of prompts that the replica holds
    num_requests: int = 0
    num_completions: int = 0
    num_prefill_tokens: int = 0
    num_blocks: int = 0

    @property
    def cost(self) -> float:
        return self.num_prefill_tokens + BLOCK_WEIGHT * self.num_blocks

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        for index, block_hash in enumerate(hashes):
            if block_hash not in self.cached and block_hash not in self.expected:
                return index
        return len(hashes)


class Router:
    """Replicas are identified by number. Create a ticket with `choose`, and end it with `end`."""

    def __init__(self, policy: RouterPolicy, block_size: int) -> None:
        self._policy = policy
        self._block_size = block_size
        self._loads: dict[int, _Load] = {}
        self._num_chosen = 0

    def reset(self, replica: int) -> None:
        """Forget a replica's cache and load, because it starts anew."""
        self._loads[replica] = _Load()

    def choose(self, request: AddRequest, candidates: Sequence[int]) -> Ticket:
        """Choose one of the candidates, at least one, and add the request to its load."""
        hashes, replica = [], candidates[0]
        if len(self._loads) > 1:
            hashes = self._hash_prompt(request)
            replica = self._pick(request, hashes, candidates)
        load = self._loads[replica]
        num_tokens = len(request.prompt_token_ids) + max(
            [len(each.generated_token_ids) for each in request.completions]
        )
        num_uncached = max(1, num_tokens - (load.count_cached(hashes) if hashes else 0) * self._block_size)
        ticket = Ticket(replica, num_uncached, -(-num_tokens // self._block_size), hashes, len(request.completions))
        load.num_requests += 1
        load.num_completions += ticket.num_completions
        load.num_prefill_tokens += ticket.num_uncached
        load.num_blocks += ticket.num_blocks
        load.expected.update(hashes)
        self._num_chosen += 1
        return ticket

    def count_uncached(self, request: AddRequest, candidates: Sequence[int]) -> int:
        """Return how many prompt tokens that candidate would compute which has most of them in its cache."""
        hashes = self._hash_prompt(request)
        num_cached = max(self._loads[replica].count_cached(hashes) for replica in candidates)
        return len(request.prompt_token_ids) - num_cached * self._block_size

    def note_first_token(self, ticket: Ticket) -> None:
        self._loads[ticket.replica].num_prefill_tokens -= ticket.num_uncached
        ticket.num_uncached = 0

    def end(self, ticket: Ticket) -> None:
        """Take the request from the replica's load. Call it before `reset` of the replica."""
        load = self._loads[ticket.replica]
        load.num_requests -= 1
        load.num_completions -= ticket.num_completions
        load.num_prefill_tokens -= ticket.num_uncached
        load.num_blocks -= ticket.num_blocks
        load.expected.subtract(ticket.hashes)
        for block_hash in ticket.hashes:
            if load.expected[block_hash] <= 0:
                del load.expected[block_hash]

    def note_events(self, replica: int, events: KVEvents) -> None:
        cached = self._loads[replica].cached
        cached.update(events.stored)
        cached.difference_update(events.removed)

    def count_requests(self, replica: int) -> int:
        return self._loads[replica].num_requests

    def count_completions(self, replica: int) -> int:
        """Return the completions of these requests, with those that have ended before the others."""
        return self._loads[replica].num_completions

    def _hash_prompt(self, request: AddRequest) -> list[bytes]:
        """Return the hashes of the prompt's blocks that a prefix cache may contain."""
        if self._policy == "round_robin":
            return []
        hashes: list[bytes] = []
        keys = list_extra_keys(request.cache_salt, request.adapter)
        prompt = request.prompt_token_ids
        image_keys = list_image_keys(request.images, self._block_size)
        extend_block_hashes(hashes, prompt, len(prompt) - 1, self._block_size, keys, image_keys)
        return hashes

    def _pick(self, request: AddRequest, hashes: list[bytes], candidates: Sequence[int]) -> int:
        if self._policy == "round_robin":
            return sorted(candidates)[self._num_chosen % len(candidates)]

        # Requests with one salt, or one first block, prefer the same replicas.
        key = hashes[0] if hashes else request.request_id.encode()
        if request.cache_salt is not None:
            key = request.cache_salt.encode()

        def find_cost(replica: int) -> tuple[float, bytes]:
            load = self._loads[replica]
            cost = load.cost - load.count_cached(hashes) * self._block_size
            return cost, rank(key, replica)

        return min(candidates, key=find_cost)


def rank(key: bytes, replica: int) -> bytes:
    """Return the rank of a replica for a key: it stays the same when others leave (rendezvous hashing)."""
    return hashlib.sha256(key + replica.to_bytes(4, "little")).digest()
