"""BlockTransfers: decides which blocks are loaded from the store of several cores, and which are saved there.

    waiting request ──match──▶ store ──load──▶ slots of the HostTier ──▶ request admitted
    chunk planned ──copied to slots after its step──▶ save ──▶ store

A request is held while its blocks are loaded, and finds them in the tier when it is admitted. Blocks that did not come
are computed. A step's blocks are saved when it has ended, from slots that are pinned meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

import msgspec

from engine.core.actor_messages import BlockCopy, StateSave
from engine.core.block_hash import (
    extend_block_hashes,
    is_state_key,
    list_extra_keys,
    list_image_keys,
    list_keys,
    list_state_keys,
)
from engine.core.block_pool import NULL_BLOCK
from engine.core.host_tier import HostTier
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request, RequestTransfer
from engine.kv_transfer_config import UNIT_TOKENS
from engine.messages import NewTokens

Result = TypeVar("Result")
TakeAnswer = Callable[[Result], list[Request]]  # processes an answer, and returns requests that may run
# Where layers have states: number of tokens and keys of the state after them, the longest first.
States = list[tuple[int, list[bytes]]]


class BlockStore(Protocol):
    """The store of several cores. A thread does what these calls ask, in their order."""

    def match(self, unit_keys: Sequence[bytes], states: States | None, take: TakeAnswer[int]) -> None:
        """Find how many tokens can be loaded: the longest prefix of these units, with a state if there are any."""

    def load(self, blocks: Sequence[BlockCopy], take: TakeAnswer[list[bool]]) -> None:
        """Load these blocks. The answer says of each whether it came; others are missing or damaged."""

    def save(self, blocks: Sequence[BlockCopy], take: TakeAnswer[int]) -> None:
        """Save these blocks. The answer is the number of tokens that were saved."""

    def discard(self, unit_keys: Sequence[bytes]) -> None:
        """Remove these units."""

    def follow(self, act: Callable[[], object]) -> None:
        """Call this on the event loop when all earlier calls are done."""


@dataclass(slots=True)
class _Load:
    """A search or load under way, for one request and those that wait for the same blocks."""

    request: Request
    blocks: list[BlockCopy] = field(default_factory=list)
    others: list[Request] = field(default_factory=list)


class BlockTransfers:
    """One per core."""

    def __init__(self, kv_cache: KVCacheManager, tier: HostTier, store: BlockStore, saves: bool) -> None:
        self._store = store
        self._kv_cache = kv_cache
        self._tier = tier
        self._saves = saves
        self._num_units = kv_cache.block_size // UNIT_TOKENS
        self._loading: dict[bytes, _Load] = {}  # by key
        self._planned: list[BlockCopy] = []  # saves of the step that is being planned
        self._by_step: dict[int, list[BlockCopy]] = {}
        self._reporting: set[int] = set()  # handles whose end is reported when their blocks are saved
        self.num_received_tokens = self.num_saved_tokens = 0

    def may_run(self, request: Request) -> bool:
        """Whether nothing is left to load for the request. If not, a method below returns it when it may run."""
        if request.transfer is None:
            request.transfer = RequestTransfer()
            self._find(request, request.transfer)
        return request.transfer.is_settled

    def report_end(self, handle: int) -> None:
        """Report the end of this completion only when its blocks are saved."""
        self._reporting.add(handle)

    def _take_saved(self, slots: Sequence[int], num_tokens: int) -> list[Request]:
        self.num_saved_tokens += num_tokens
        for slot in slots:
            self._tier.unpin(slot)
        return []

    def _take_matched(self, load: _Load, num_tokens: int) -> list[Request]:
        """Load what the store holds."""
        request, transfer = load.request, load.request.transfer
        assert transfer is not None, "it was looked for"
        num_blocks = num_tokens // self._kv_cache.block_size
        if self._saves:
            transfer.num_saved = num_blocks
        if not request.is_finished:
            load.blocks = self._reserve(request, num_blocks)
        if not load.blocks:
            return self._settle(load)
        self._loading |= {block.key: load for block in load.blocks}
        self._store.load(load.blocks, partial(self._take_loaded, load))
        return []

    def _take_loaded(self, load: _Load, is_loaded: Sequence[bool]) -> list[Request]:
        """Index the blocks that came."""
        pool = self._kv_cache.pool
        for block, has_come in zip(load.blocks, is_loaded, strict=True):
            self._loading.pop(block.key, None)
            if has_come:
                if not is_state_key(block.key):
                    self.num_received_tokens += len(block.unit_keys) * UNIT_TOKENS
                self._tier.add(block.key, block.slot)
                pool.note_change(block.key, True)
            else:
                self._tier.give_back(block.slot)
        if not all(is_loaded) and load.request.transfer is not None:
            load.request.transfer.num_saved = 0  # save the damaged ones again
        return self._settle(load)

    def save(self, request: Request) -> None:
        """Save the blocks that the next step completes, and those before them that the store has not."""
        transfer = request.transfer
        num_full = request.num_committed_blocks
        if not self._saves or transfer is None or transfer.num_saved >= num_full:
            return
        size = self._kv_cache.num_groups
        units = self._list_units(request, num_full * self._kv_cache.block_size)
        for place in range(transfer.num_saved, num_full):
            for group in range(size):
                block_id = request.block_ids[place * size + group]
                if block_id == NULL_BLOCK:
                    continue  # outside the window
                (key,) = list_keys(request.block_hashes[place : place + 1], group)
                slot, replaced = self._tier.save(key, block_id)
                self._kv_cache.pool.note_replaced(replaced)
                if slot is None:
                    return
                self._planned.append(self._make_copy(slot, key, units, place, group))
            transfer.num_saved = place + 1

    def save_states(self, requests: Sequence[Request], saves: Sequence[StateSave]) -> None:
        """Save the states that the next step keeps of prompts."""
        states = self._kv_cache.states
        if not self._saves or states is None or states.tier is None:
            return
        by_row = {request.row: request for request in requests}
        for save in saves:
            request = by_row[save.row]
            if request.transfer is None or save.position >= request.num_prompt_tokens:
                continue
            key = self._find_hash(request, save.position)
            units = self._split_state(request, save.position)
            for (part_key, part_id), unit_keys in zip(
                states.tier.name_parts(key, save.slot), units, strict=True
            ):
                slot, replaced = self._tier.save(part_key, part_id)
                self._kv_cache.pool.note_replaced(replaced)
                if slot is None:
                    return
                self._planned.append(BlockCopy(slot, part_key, unit_keys))
            request.transfer.states.append(save.position)

    def forget(self, request: Request) -> None:
        """Remove a failed request's blocks from the store: their values may have caused the failure."""
        if request.transfer is not None:
            units = self._list_units(request, len(request.block_hashes) * self._kv_cache.block_size)
            keys = [key for group in range(self._kv_cache.num_groups) for key in list_keys(units, group)]
            for position in request.transfer.states:
                keys += chain(*self._split_state(request, position))
            self._store.discard(keys)

    def note_plan(self, step_id: int) -> None:
        """Tie the planned saves to a step."""
        if self._planned:
            self._by_step[step_id], self._planned = self._planned, []

    def end_step(self, step_id: int) -> None:
        """Save the blocks of a step that has ended."""
        if blocks := self._by_step.pop(step_id, None):
            self._store.save(blocks, partial(self._take_saved, [block.slot for block in blocks]))

    def hold_ends(self, news: NewTokens, deliver: Callable[[NewTokens], None]) -> NewTokens:
        """Return the message without the ends that are delivered when the blocks before them are saved."""
        if not self._reporting:
            return news
        kept, held = [], []
        for detail in news.details:
            if detail.finish_reason is None or detail.handle not in self._reporting:
                kept.append(detail)
                continue
            self._reporting.remove(detail.handle)
            kept.append(
                msgspec.structs.replace(detail, finish_reason=None, stop_reason=None, error=None, drafts={})
            )
            held.append(
                msgspec.structs.replace(
                    detail, logprobs=None, prompt_logprobs=None, queue_time_s=None, pooled=None
                )
            )
        if held:
            self._store.follow(partial(deliver, NewTokens(details=held)))
        return msgspec.structs.replace(news, details=kept)

    def _find(self, request: Request, transfer: RequestTransfer) -> None:
        """Ask the store for the blocks that the cache has not, unless they are being loaded."""
        size = self._kv_cache.block_size
        num_uncached = self._kv_cache.count_uncached(request)
        num_full = (request.num_tokens - 1) // size
        num_cached = (request.num_tokens - num_uncached) // size
        transfer.num_saved = num_cached
        states = None if request.needs_all_tokens else self._list_states(request, num_cached * size)
        has_more = num_cached < num_full and states != []
        if request.needs_all_tokens or not (has_more or request.handle in self._reporting):
            transfer.is_settled = True
            return
        running = self._loading.get(request.block_hashes[num_cached]) if num_cached < num_full else None
        if running is not None:
            running.others.append(request)
            return
        units = self._list_units(request, num_full * size)
        self._store.match(units, states, partial(self._take_matched, _Load(request)))

    def _reserve(self, request: Request, num_blocks: int) -> list[BlockCopy]:
        """Reserve slots for the blocks of this prefix that neither the cache nor the tier has."""
        pool = self._kv_cache.pool
        found: list[BlockCopy] = []
        units = self._list_units(request, num_blocks * self._kv_cache.block_size)
        for place in range(num_blocks):
            for group, key in enumerate(self._kv_cache.list_block_keys(request, place, num_blocks)):
                if key is None or pool.find([key]) or key in self._loading:
                    continue
                slot, replaced = self._tier.reserve()
                pool.note_replaced(replaced)
                if slot is None:
                    return found
                found.append(self._make_copy(slot, key, units, place, group))
        return found + self._reserve_state(request, num_blocks * self._kv_cache.block_size)

    def _reserve_state(self, request: Request, num_tokens: int) -> list[BlockCopy]:
        """Reserve slots for the state after so many tokens, unless the cache or the tier has it."""
        states = self._kv_cache.states
        if states is None or not num_tokens or states.find([key := self._find_hash(request, num_tokens)]):
            return []
        assert request.transfer is not None, "it was looked for"
        request.transfer.states.append(num_tokens)
        found: list[BlockCopy] = []
        units = self._split_state(request, num_tokens)
        for part_key, unit_keys in zip(list_state_keys(key, len(units)), units, strict=True):
            if part_key in self._tier or part_key in self._loading:
                continue
            slot, replaced = self._tier.reserve()
            self._kv_cache.pool.note_replaced(replaced)
            if slot is None:
                break
            found.append(BlockCopy(slot, part_key, unit_keys))
        return found

    def _settle(self, load: _Load) -> list[Request]:
        """Let the request of a load run. Those that waited for it are looked at again."""
        assert load.request.transfer is not None, "it was looked for"
        load.request.transfer.is_settled = True
        for request in load.others:
            request.transfer = None
        return [load.request, *load.others]

    def _make_copy(self, slot: int, key: bytes, units: Sequence[bytes], place: int, group: int) -> BlockCopy:
        first = place * self._num_units
        return BlockCopy(slot, key, list_keys(list(units[first : first + self._num_units]), group))

    def _find_hash(self, request: Request, num_tokens: int) -> bytes:
        """Return the hash of the block that ends after so many tokens."""
        return request.block_hashes[num_tokens // self._kv_cache.block_size - 1]

    def _list_states(self, request: Request, start: int) -> States | None:
        """Return where after `start` the store may have a state, and its keys, the longest first; None: no states."""
        if self._kv_cache.states is None:
            return None
        points = self._kv_cache.states.list_points(request, start)
        return [(point, list(chain(*self._split_state(request, point)))) for point in reversed(points)]

    def _split_state(self, request: Request, num_tokens: int) -> list[list[bytes]]:
        """Return the keys of the units in each part of the state after so many tokens."""
        last = self._list_units(request, num_tokens)[-1]
        keys, size = list_state_keys(last, self._kv_cache.config.num_state_units), self._num_units
        return [keys[at : at + size] for at in range(0, len(keys), size)]

    def _list_units(self, request: Request, num_tokens: int) -> list[bytes]:
        """Return the hashes of the units within the first `num_tokens` tokens."""
        if self._num_units == 1:
            return request.block_hashes[: num_tokens // UNIT_TOKENS]
        assert request.transfer is not None, "only requests that were looked for are copied"
        hashes, keys = request.transfer.unit_hashes, list_extra_keys(request.salt, request.adapter)
        images = list_image_keys(request.images, UNIT_TOKENS) if request.images else None
        extend_block_hashes(hashes, request.token_ids, num_tokens, UNIT_TOKENS, keys, images)
        return hashes[: num_tokens // UNIT_TOKENS]
