"""TransferLane: the thread that copies blocks between the host tier and a store of several cores, beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from engine.actors.lane import Lane
from engine.core.actor_messages import BlockCopy, BlocksAnswer
from engine.core.block_hash import is_state_key
from engine.core.block_transfers import States, TakeAnswer
from engine.kv_transfer_config import UNIT_TOKENS
from engine.transfer.connector import KVConnector
from engine.transfer.host_store import HostStore
from engine.transfer.units import Unit

Result = TypeVar("Result")
logger = logging.getLogger("troupe.engine")


class TransferLane(Lane):
    """Implements BlockStore. A store that fails costs time, but neither a request nor the core."""

    def __init__(
        self, memory: HostStore, connector: KVConnector | None, tell_scheduler: Callable[[BlocksAnswer], None],
    ) -> None:
        super().__init__("troupe-transfer")
        self._memory = memory
        self._connector = connector
        self._tell_scheduler = tell_scheduler
        self._has_failed = False

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            if self._connector is not None:
                self._connector.shutdown()

    def match(self, unit_keys: Sequence[bytes], states: States | None, take: TakeAnswer[int]) -> None:
        self._ask(partial(self._match, unit_keys, states), take)

    def load(self, blocks: Sequence[BlockCopy], take: TakeAnswer[list[bool]]) -> None:
        self._ask(partial(self._load, blocks), take)

    def save(self, blocks: Sequence[BlockCopy], take: TakeAnswer[int]) -> None:
        self._ask(partial(self._save, blocks), take)

    def discard(self, unit_keys: Sequence[bytes]) -> None:
        self.submit(partial(self._call, None, lambda store: store.discard_kv(unit_keys)))

    def follow(self, act: Callable[[], object]) -> None:
        self.submit(lambda: None, lambda _: act())

    def _ask(self, work: Callable[[], Result], take: TakeAnswer[Result]) -> None:
        self.submit(work, lambda result: self._tell_scheduler(BlocksAnswer(partial(take, result))))

    def _match(self, unit_keys: Sequence[bytes], states: States | None) -> int:
        def match(store: KVConnector) -> int:
            num_tokens = store.get_num_new_matched_tokens(unit_keys)
            if states is None:
                return num_tokens
            for length, keys in states:
                if length <= num_tokens and store.get_num_new_matched_tokens(keys) == len(keys) * UNIT_TOKENS:
                    return length
            return 0

        return self._call(0, match)

    def _load(self, blocks: Sequence[BlockCopy]) -> list[bool]:
        for block in blocks:
            self._memory.open_slot(block.slot)
        units = self._list_units(blocks)
        found = self._call([False] * len(units), lambda store: store.start_load_kv(units))
        ends = np.cumsum([len(block.unit_keys) for block in blocks]).tolist()
        is_loaded = [
            all(found[end - len(block.unit_keys) : end]) for block, end in zip(blocks, ends, strict=True)
        ]
        for block, is_complete in zip(blocks, is_loaded, strict=True):
            if is_complete:
                self._memory.close_slot(block.slot, block.key)
        return is_loaded

    def _save(self, blocks: Sequence[BlockCopy]) -> int:
        """Return the number of tokens that were saved."""
        self._memory.wait_copied()
        units = self._list_units(blocks)

        def save(store: KVConnector) -> int:
            store.save_kv(units)
            return sum(not is_state_key(key) for key, _ in units) * UNIT_TOKENS

        return self._call(0, save)

    def _list_units(self, blocks: Sequence[BlockCopy]) -> list[Unit]:
        return [
            (key, self._memory.list_parts(block.slot, index, is_state_key(key)))
            for block in blocks
            for index, key in enumerate(block.unit_keys)
        ]

    def _call(self, default: Result, act: Callable[[KVConnector], Result]) -> Result:
        """Return what the store returns; the default if there is none, or it fails."""
        if self._connector is None:
            return default
        try:
            result = act(self._connector)
        except Exception as error:  # the border of the store: blocks that it does not give are computed
            if not self._has_failed:
                logger.warning("the store of KV blocks failed, and blocks are computed instead: %r", error)
            self._has_failed = True
            return default
        self._has_failed = False
        return result
