"""KVCacheManager: allocates blocks for requests and reuses the blocks of shared prefixes.

The layers form groups (`engine.kv_cache_spec`), and a request has one block of each group for every 16 tokens:

    block_ids    full   window   full   window   full   window ...
                   4       0       5      17       6       9         0: the null block

In a group with a window, blocks outside the window are freed, and the null block replaces them, so that the index of a
block still gives its position. A freed block keeps its hash, so other requests may reuse it. The worker's tables keep
the old ids, and attention does not read outside the window.

With a HostTier, a block of a cached prefix may be in host memory. It gets a new block then, and its content is copied.

A request gets the blocks of its whole prompt at admission, so a prefill rarely waits for blocks. Where groups have
windows, it gets those of one chunk, and the others in every chunk; blocks of the full groups are reserved for them.

Layers with states have no blocks. A prefix of their models counts as cached up to a snapshot (StateSnapshots).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from engine.core.actor_messages import StateSave
from engine.core.block_hash import extend_block_hashes, list_extra_keys, list_image_keys, list_keys
from engine.core.block_pool import NULL_BLOCK, BlockPool, name_slot
from engine.core.host_tier import HostTier
from engine.core.request import Request
from engine.core.state_snapshots import DraftStates, StateSnapshots, StateTier
from engine.resolved_config import CacheConfig


class KVCacheManager:
    """Owns the block pool; allocates and frees the blocks of requests."""

    def __init__(
        self, config: CacheConfig, tier: HostTier | None = None, end_ids: Iterable[int] = ()
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.tier = tier
        self.pool = BlockPool(config.num_blocks, tier)
        # (index of the group, its window)
        self._windows = [
            (index, group.window) for index, group in enumerate(config.groups) if group.window is not None
        ]
        self._num_full_groups = self.num_groups - len(self._windows)
        self.states: StateSnapshots | None = None  # for models with states
        if config.has_states and config.enable_prefix_caching:
            state_tier = None if tier is None else StateTier(self.pool, tier, config.num_state_parts)
            self.states = StateSnapshots(config.num_snapshots, self.block_size, end_ids, state_tier)
            self.pool.on_evict = self.states.evict
        self.draft_states: DraftStates | None = None  # None: drafts need none
        if config.has_states:
            slots = range(config.num_snapshots, config.num_snapshots + config.num_draft_states)
            self.draft_states = DraftStates(slots, self.block_size, self.states)
        self._last_hashed: Request | None = None
        self._last_admitted: Request | None = None  # of those with states
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_loaded_tokens = 0  # of the hits, tokens whose blocks came from the tier
        self._num_windowless = self._num_stateless = 0  # tokens like the next ones, in the last lookup
        # Tokens whose blocks the full groups had, and a group with a window no longer.
        self.num_windowless_tokens = 0
        # Tokens whose blocks were found, but no snapshot of the state behind them
        self.num_stateless_tokens = 0

    def admit(self, request: Request) -> int | None:
        """Allocate blocks for all known tokens of a request, reusing its cached prefix.

        Returns the number of cached tokens, less than the number of tokens; None, without a change, if too few blocks
        are free.
        """
        num_cached, prefix = self._find_prefix(request)
        num_new, num_reserved = self._count_new(request, num_cached)
        outside: list[int] = []  # places of blocks that are in host memory
        num_taken, num_revived = num_new + num_reserved, 0
        if prefix:
            cached = [block_id for block_id in prefix if block_id > NULL_BLOCK]
            outside = [place for place, block_id in enumerate(prefix) if block_id < NULL_BLOCK]
            num_taken, num_revived = num_taken + len(outside), self.pool.num_free_among(cached)
        if num_taken + num_revived > self.pool.num_free:
            return None
        if prefix:
            self.pool.share(cached)
        if self.tier is not None:
            slots = [name_slot(prefix[place]) for place in outside]
            if self.states is not None and num_cached:
                slots += self.states.list_outside(request.block_hashes[num_cached - 1])
            self.tier.pin(slots)
        fresh = self.pool.allocate(num_taken)
        assert fresh is not None, "enough blocks were free"
        num_cached_tokens = num_cached * self.block_size
        self.num_windowless_tokens += self._num_windowless
        if self.states is not None:
            self.num_stateless_tokens += self._num_stateless
            request.snapshot = self.states.open(request, num_cached_tokens)
            self._last_admitted = request
        if outside:
            self._load(request, prefix, outside, fresh)
            fresh = fresh[len(outside) :]
        request.block_ids = prefix + fresh[:num_new]
        request.reserved_ids = fresh[num_new:]
        request.num_committed_blocks = num_cached
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def waits_for_sibling(self, request: Request) -> bool:
        """Whether a running request will keep the state that this one, with the same prompt, can start from."""
        other, states = self._last_admitted, self.states
        return states is not None and other is not None and is_same_prompt(other, request) and states.is_expected(other)

    def would_fit(self, request: Request, victims: Sequence[Request]) -> bool:
        """Whether the request could be admitted if the victims' blocks were freed."""
        num_cached, prefix = self._find_prefix(request)
        num_new = sum(self._count_new(request, num_cached)) + sum(
            block_id < NULL_BLOCK for block_id in prefix
        )
        # Cheap upper bound: counts shared blocks and the null block once per occurrence.
        num_held = sum(len(victim.block_ids) + len(victim.reserved_ids) for victim in victims)
        if num_new > self.pool.num_free + num_held:
            return False
        held = Counter(each for victim in victims for each in (*victim.block_ids, *victim.reserved_ids))
        freed = self.pool.find_freed(held)
        cached = [block_id for block_id in prefix if block_id > NULL_BLOCK]
        num_revived = self.pool.num_free_among(cached) + sum(block_id in freed for block_id in cached)
        return num_new + num_revived <= self.pool.num_free + len(freed)

    def count_uncached(self, request: Request) -> int:
        """Return the number of tokens to compute if the request were admitted now."""
        return request.num_tokens - self._find_prefix(request)[0] * self.block_size

    def count_slots(self, request: Request) -> int:
        return len(request.block_ids) // self.num_groups * self.block_size

    def list_block_keys(self, request: Request, place: int, num_blocks: int) -> list[bytes | None]:
        """Return the keys of one block of each group; None where queries after `num_blocks` blocks do not see it."""
        keys: list[bytes | None] = []
        for index, group in enumerate(self.config.groups):
            is_seen = group.window is None or place >= num_blocks - self._count_seen(group.window)
            keys += list_keys(request.block_hashes[place : place + 1], index) if is_seen else [None]
        return keys

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Append blocks until `num_tokens` tokens fit. Returns the new block ids; None if too few blocks are free."""
        if self._windows:
            self._release_windows(request)
        num_blocks = -(-num_tokens // self.block_size) - len(request.block_ids) // self.num_groups
        if num_blocks <= 0:
            return []
        reserved = request.reserved_ids[: num_blocks * self._num_full_groups]
        fresh = self.pool.allocate(num_blocks * self.num_groups - len(reserved))
        if fresh is None:
            return None
        del request.reserved_ids[: len(reserved)]
        fresh = reserved + fresh
        request.block_ids += fresh
        return fresh

    def grow_each(self, requests: Sequence[Request]) -> list[list[int]] | None:
        """Append one block of each group to each request, which has none in reserve.

        Returns the ids for each request; None, without a change, if too few blocks are free.
        """
        if self._windows:
            for request in requests:
                self._release_windows(request)
        size, parts = self.num_groups, []
        fresh = self.pool.allocate(len(requests) * size)
        if fresh is None:
            return None
        for at, request in enumerate(requests):
            parts.append(part := fresh[at * size : (at + 1) * size])
            request.block_ids += part
        return parts

    def commit(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks among the first `num_tokens` tokens to the prefix cache.

        The caller guarantees that these tokens are known and that their KV is written before a later step reads it.
        """
        self._cache_blocks(request, num_tokens // self.block_size)
        if self._windows:
            self._release_windows(request)

    def plan_saves(
        self, requests: Sequence[Request], starts: np.ndarray, ends: np.ndarray
    ) -> list[StateSave]:
        """Return which states to keep in a step that runs the tokens [start, end) of these requests."""
        assert self.states is not None, "only then is there something to save"
        saves = []
        is_due = (starts % self.block_size == 0) | (ends - starts > 1)
        for index in np.flatnonzero(is_due).tolist():
            request, start, end = requests[index], int(starts[index]), int(ends[index])
            self._extend_hashes(request, min(end, request.num_tokens))
            found = self.states.plan(request, start, end)
            saves += [StateSave(request.row, position, slot) for position, slot in found]
        self.states.end_step()
        return saves

    def reset_cache(self) -> bool:
        """Empty the prefix cache. Returns False, without a change, while any block is owned."""
        is_reset = self.pool.reset_cache()
        if is_reset and self.states is not None:
            self.states.clear()
        return is_reset

    def forget(self, request: Request) -> None:
        """Remove a failed request's blocks from the prefix cache, and add no more of them."""
        if self.states is not None:
            self.states.forget(request.block_hashes)
            self.states.close(request, 0)
        for group in range(self.num_groups):
            self.pool.forget(list_keys(request.block_hashes, group))
        request.num_committed_blocks = len(request.block_ids) // self.num_groups

    def free(self, request: Request) -> None:
        if self.states is not None:
            self.states.close(request, request.num_committed_blocks)
        block_ids = request.block_ids
        self.pool.free([each for each in block_ids if each != NULL_BLOCK] if self._windows else block_ids)
        self.pool.free(request.reserved_ids)
        request.block_ids, request.reserved_ids = [], []
        request.num_committed_blocks = 0

    def _count_new(self, request: Request, num_cached: int) -> tuple[int, int]:
        """Return how many blocks the request needs at admission, and how many to reserve for its other chunks."""
        num_blocks = num_covered = -(-request.num_tokens // self.block_size)
        if self._windows:
            end = num_cached * self.block_size + self.config.max_chunk_len
            num_covered = min(num_blocks, -(-end // self.block_size))
        num_new = (num_covered - num_cached) * self.num_groups
        return num_new, (num_blocks - num_covered) * self._num_full_groups

    def _find_prefix(self, request: Request) -> tuple[int, list[int]]:
        """Return the number of blocks of the cached prefix, and its `block_ids`; slots of the tier are negative.

        Later queries attend to all blocks of a full group, but only to the last blocks of a group with a window. The
        others are null blocks.
        """
        self._num_windowless = self._num_stateless = 0
        if not self.config.enable_prefix_caching or request.needs_all_tokens:
            return 0, []
        usable = request.num_tokens - 1
        self._extend_hashes(request, usable)
        hashes = request.block_hashes[: usable // self.block_size]
        num_cached, runs = self._find_runs(hashes)
        if self._windows and self._num_full_groups and num_cached < len(hashes):
            full = next(index for index, group in enumerate(self.config.groups) if group.window is None)
            num_full = len(self.pool.find(list_keys(hashes, full)))
            self._num_windowless = (num_full - num_cached) * self.block_size
        if self.states is not None:
            num_found = num_cached
            while (num_kept := self.states.find(hashes[:num_cached])) < num_cached:
                num_cached, runs = self._find_runs(hashes[:num_kept])
            self._num_stateless = (num_found - num_cached) * self.block_size
        block_ids = [NULL_BLOCK] * (num_cached * self.num_groups)
        for index, run in enumerate(runs):
            block_ids[(num_cached - len(run)) * self.num_groups + index :: self.num_groups] = run
        return num_cached, block_ids

    def _find_runs(self, hashes: list[bytes]) -> tuple[int, list[list[int]]]:
        """Return the number of blocks of the longest prefix that all groups have, and what queries see of each."""
        runs: list[list[int]] = []
        num_cached, is_settled = len(hashes), False
        while not is_settled:
            is_settled, runs = True, []
            for index, group in enumerate(self.config.groups):
                keys = list_keys(hashes[:num_cached], index)
                if group.window is None:
                    run = self.pool.find(keys)
                    num_found = len(run)
                else:
                    num_found, run = self.pool.find_run(keys, self._count_seen(group.window))
                # The groups before this one must be asked again for a shorter prefix.
                is_settled = is_settled and (index == 0 or num_found == num_cached)
                num_cached = num_found
                runs.append(run)
        return num_cached, runs

    def _count_seen(self, window: int) -> int:
        """Return how many blocks before a query its window reaches."""
        return max(1, -(-(window - 1) // self.block_size))

    def _load(self, request: Request, prefix: list[int], outside: list[int], fresh: list[int]) -> None:
        """Replace the slots in a prefix, at the places `outside`, by new blocks into which they are copied."""
        assert self.tier is not None, "only a tier has slots"
        keys = [list_keys(request.block_hashes, group) for group in range(self.num_groups)]
        loaded = []
        for place, block_id in zip(outside, fresh, strict=False):
            key = keys[place % self.num_groups][place // self.num_groups]
            self.pool.commit(block_id, key)
            loaded.append((key, block_id))
            prefix[place] = block_id
        self.tier.load(loaded)
        self.num_loaded_tokens += len(outside) * self.block_size // self.num_groups

    def _cache_blocks(self, request: Request, num_full: int) -> None:
        start = request.num_committed_blocks
        if not self.config.enable_prefix_caching or num_full <= start:
            return
        self._extend_hashes(request, num_full * self.block_size)
        for group in range(self.num_groups):
            part = slice(start * self.num_groups + group, num_full * self.num_groups, self.num_groups)
            keys = list_keys(request.block_hashes[start:num_full], group)
            for block_id, key in zip(request.block_ids[part], keys, strict=True):
                self.pool.commit(block_id, key)
        request.num_committed_blocks = num_full

    def _release_windows(self, request: Request) -> None:
        """Free the blocks outside the windows of the request's next query; they stay in the prefix cache until evicted.

        The next query is at most the last known token, because a run in flight may be skipped and planned again.
        """
        next_query, size = min(request.num_computed_tokens, request.num_tokens - 1), self.num_groups
        block_ids = request.block_ids
        for group, window in self._windows:
            end = max(0, next_query + 1 - window) // self.block_size
            start = end
            while start > 0 and block_ids[(start - 1) * size + group] != NULL_BLOCK:
                start -= 1
            if start < end:
                self._cache_blocks(request, end)
                part = slice(start * size + group, end * size, size)
                self.pool.free(block_ids[part])
                block_ids[part] = [NULL_BLOCK] * (end - start)

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        sibling, self._last_hashed = self._last_hashed, request
        if not request.block_hashes and sibling is not None and is_same_prompt(sibling, request):
            request.block_hashes = sibling.block_hashes[: request.num_prompt_tokens // self.block_size]
        if request.images and request.image_keys is None:
            request.image_keys = list_image_keys(request.images, self.block_size)
        extend_block_hashes(
            request.block_hashes, request.token_ids, num_tokens, self.block_size,
            list_extra_keys(request.salt, request.adapter),
            request.image_keys,
        )


def is_same_prompt(one: Request, other: Request) -> bool:
    return one.prompt is other.prompt and one.salt == other.salt and one.adapter == other.adapter
