"""TransferActor: the thread that copies blocks between the host tier and a store of several cores, beside the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from engine.actors.thread_actor import ThreadActor
from engine.core.actor_messages import (
    BlockCopy,
    BlocksLoaded,
    BlocksMatched,
    BlocksSaved,
    DiscardUnits,
    LoadBlocks,
    MatchBlocks,
    ReportEnds,
    SaveBlocks,
    TransferInbox,
)
from engine.core.block_hash import is_state_key
from engine.kv_transfer_config import UNIT_TOKENS
from engine.messages import NewTokens
from engine.transfer.connector import KVConnector
from engine.transfer.host_store import HostStore
from engine.transfer.units import Unit

Result = TypeVar("Result")
logger = logging.getLogger("troupe.engine")


class TransferActor(ThreadActor[TransferInbox]):
    """Serves one message after another. A store that fails costs time, but neither a request nor the core."""

    def __init__(
        self, memory: HostStore, connector: KVConnector | None,
        tell_scheduler: Callable[[BlocksMatched | BlocksLoaded | BlocksSaved], None],
        deliver: Callable[[NewTokens], None],
    ) -> None:
        super().__init__("troupe-transfer")
        self._memory = memory
        self._connector = connector
        self._tell_scheduler = tell_scheduler
        self._deliver = deliver
        self._has_failed = False

    def work(self) -> None:
        while (message := self._queue.get()) is not None:
            match message:
                case MatchBlocks(transfer_id=transfer_id):
                    self.post(self._tell_scheduler, BlocksMatched(transfer_id, self._match(message)))
                case LoadBlocks(transfer_id=transfer_id, blocks=blocks):
                    self.post(self._tell_scheduler, BlocksLoaded(transfer_id, self._load(blocks)))
                case SaveBlocks(blocks=blocks):
                    self.post(self._tell_scheduler, BlocksSaved([b.slot for b in blocks], self._save(blocks)))
                case DiscardUnits(unit_keys=keys):
                    self._discard(keys)
                case ReportEnds(news=news):
                    self.post(self._deliver, news)
        if self._connector is not None:
            self._connector.shutdown()

    def _match(self, message: MatchBlocks) -> int:
        def match(store: KVConnector) -> int:
            num_tokens = store.get_num_new_matched_tokens(message.unit_keys)
            if message.states is None:
                return num_tokens
            for length, keys in message.states:
                if length <= num_tokens and store.get_num_new_matched_tokens(keys) == len(keys) * UNIT_TOKENS:
                    return length
            return 0

        return self._call(0, match)

    def _discard(self, keys: Sequence[bytes]) -> None:
        self._call(None, lambda store: store.discard_kv(keys))

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
