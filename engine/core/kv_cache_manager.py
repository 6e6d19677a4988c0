"""KVCacheManager: allocates blocks for requests and reuses the blocks of shared prefixes.

If every layer has a sliding window, blocks outside the window are freed. The null block replaces them in the request's
list, so that the index of a block still gives its position in the sequence:

    block_ids    [ 0  0  0 | 17 5 9 ... ]          a freed block keeps its hash, so other requests may reuse it
                  freed    | within the window of the next query, or not computed yet

The worker is not informed: its tables keep the old ids, and attention does not read outside the window. A prompt gets
all its blocks at admission, including those that leave the window before its end. `max_model_len` tokens fit into the
cache anyway, and a prefill then never waits for blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.config import CacheConfig
from engine.core.block_hash import extend_block_hashes, list_extra_keys
from engine.core.block_pool import NULL_BLOCK, BlockPool
from engine.core.request import Request


class KVCacheManager:
    """Owns the block pool; allocates and frees the blocks of requests."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        (group,) = config.groups
        self._window = group.spec.window
        self._last_hashed: Request | None = None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def admit(self, request: Request) -> int | None:
        """Allocate blocks for all known tokens of a request, reusing its cached prefix.

        Returns the number of cached tokens, less than the number of tokens; None, without a change, if too few blocks
        are free.
        """
        num_cached, cached = self._find_prefix(request)
        num_new = -(-request.num_tokens // self.block_size) - num_cached
        if num_new + self.pool.num_free_among(cached) > self.pool.num_free:
            return None
        self.pool.share(cached)
        fresh = self.pool.allocate(num_new)
        assert fresh is not None, "enough blocks were free"
        request.block_ids = [NULL_BLOCK] * (num_cached - len(cached)) + cached + fresh
        request.num_committed_blocks = num_cached
        num_cached_tokens = num_cached * self.block_size
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def would_fit(self, request: Request, victims: Sequence[Request]) -> bool:
        """Whether the request could be admitted if the victims' blocks were freed."""
        num_cached, cached = self._find_prefix(request)
        num_new = -(-request.num_tokens // self.block_size) - num_cached
        # Cheap upper bound: counts shared blocks and the null block once per occurrence.
        if num_new > self.pool.num_free + sum(len(victim.block_ids) for victim in victims):
            return False
        held = Counter(block_id for victim in victims for block_id in victim.block_ids)
        freed = self.pool.find_freed(held)
        num_revived = self.pool.num_free_among(cached) + sum(block_id in freed for block_id in cached)
        return num_new + num_revived <= self.pool.num_free + len(freed)

    def count_uncached(self, request: Request) -> int:
        """Return the number of tokens to compute if the request were admitted now."""
        return request.num_tokens - self._find_prefix(request)[0] * self.block_size

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Append blocks until `num_tokens` tokens fit. Returns the new block ids; None if too few blocks are free."""
        self._release_window(request)
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if missing <= 0:
            return []
        fresh = self.pool.allocate(missing)
        if fresh is not None:
            request.block_ids += fresh
        return fresh

    def grow_each(self, requests: Sequence[Request]) -> list[int] | None:
        """Append one block to each request. Returns their ids; None, without a change, if too few blocks are free."""
        for request in requests:
            self._release_window(request)
        fresh = self.pool.allocate(len(requests))
        if fresh is not None:
            for request, block_id in zip(requests, fresh, strict=True):
                request.block_ids.append(block_id)
        return fresh

    def commit(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks among the first `num_tokens` tokens to the prefix cache.

        The caller guarantees that these tokens are known and that their KV is written before a later step reads it.
        """
        self._cache_blocks(request, num_tokens // self.block_size)
        self._release_window(request)

    def forget(self, request: Request) -> None:
        """Remove a failed request's blocks from the prefix cache, and add no more of them."""
        self.pool.forget(request.block_hashes)
        request.num_committed_blocks = len(request.block_ids)

    def free(self, request: Request) -> None:
        self.pool.free([block_id for block_id in request.block_ids if block_id != NULL_BLOCK])
        request.block_ids = []
        request.num_committed_blocks = 0

    def _find_prefix(self, request: Request) -> tuple[int, list[int]]:
        """Return the number of blocks of the cached prefix, and the ids of those that later queries attend to."""
        if not self.config.enable_prefix_caching or request.needs_all_tokens:
            return 0, []
        usable = request.num_tokens - 1
        self._extend_hashes(request, usable)
        hashes = request.block_hashes[: usable // self.block_size]
        if self._window is not None:
            return self.pool.find_run(hashes, max(1, -(-(self._window - 1) // self.block_size)))
        found = self.pool.find(hashes)
        return len(found), found

    def _cache_blocks(self, request: Request, num_full: int) -> None:
        """Add the first `num_full` blocks to the prefix cache."""
        if not self.config.enable_prefix_caching or num_full <= request.num_committed_blocks:
            return
        self._extend_hashes(request, num_full * self.block_size)
        for index in range(request.num_committed_blocks, num_full):
            self.pool.commit(request.block_ids[index], request.block_hashes[index])
        request.num_committed_blocks = num_full

    def _release_window(self, request: Request) -> None:
        """Free the blocks outside the window of the request's next query; they stay in the prefix cache until evicted.

        The next query is at most the last known token, because a run in flight may be skipped and planned again.
        """
        if self._window is None:
            return
        next_query = min(request.num_computed_tokens, request.num_tokens - 1)
        end = max(0, next_query + 1 - self._window) // self.block_size
        start = end
        while start > 0 and request.block_ids[start - 1] != NULL_BLOCK:
            start -= 1
        if start == end:
            return
        self._cache_blocks(request, end)
        self.pool.free(request.block_ids[start:end])
        request.block_ids[start:end] = [NULL_BLOCK] * (end - start)

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        sibling, self._last_hashed = self._last_hashed, request
        if not request.block_hashes and sibling is not None and is_same_prompt(sibling, request):
            request.block_hashes = sibling.block_hashes[: request.num_prompt_tokens // self.block_size]
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            num_tokens,
            self.block_size,
            list_extra_keys(request.salt, request.adapter),
        )


def is_same_prompt(one: Request, other: Request) -> bool:
    """Whether two requests have the same prompt block hashes."""
    return one.prompt is other.prompt and one.salt == other.salt and one.adapter == other.adapter
