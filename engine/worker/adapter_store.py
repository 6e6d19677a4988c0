"""AdapterStore: the adapters in memory, least recently used first. Threads load them while steps run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Lock

from engine.errors import InvalidRequest
from engine.lora.adapter_files import AdapterFiles, find_adapter
from engine.lora.loader import Adapter, load_adapter
from engine.messages import AdapterRef
from engine.model.linear import Linear
from engine.model.protocol import Model
from engine.parallel.adapters import PeerAdapters

logger = logging.getLogger("troupe.worker")


class AdapterStore:
    """Adapters by digest, limited in bytes. Pinned adapters are never evicted.

    Args:
        max_bytes: memory of all adapters, on this rank.
    """

    def __init__(
        self, model: Model, max_rank: int, max_bytes: int, peers: PeerAdapters | None = None
    ) -> None:
        self._model = model
        self._max_rank = max_rank
        self._max_bytes = max_bytes
        self._peers = peers
        self._is_on_host = model.embed_tokens.device.type == "cpu"  # binding takes no memory of a device
        self._lock = Lock()
        self._adapters: dict[str, Adapter] = {}  # the least recently used first
        self._pinned: set[str] = set()

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def load(self, ref: AdapterRef, pins: bool = False) -> None:
        """Read an adapter unless it is in memory. Any thread may call it."""
        with self._lock:
            adapter = self._adapters.pop(ref.digest, None)
            if adapter is not None:
                self._keep(ref.digest, adapter, pins)
                return
        files = AdapterFiles.read(find_adapter(ref.path))
        if files.digest != ref.digest:
            raise InvalidRequest(
                f"the files of adapter {ref.name!r} in {ref.path!r} have changed since it was loaded; load it again",
                "lora_path",
            )
        peer = None if self._peers is None else self._peers.open(files)
        adapter = load_adapter(files, self._model, self._max_rank, peer)
        if adapter.num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"adapter {ref.name!r} takes {adapter.num_bytes / 2**20:.0f} MiB; max_cpu_loras and max_lora_rank "
                f"allow {self._max_bytes / 2**20:.0f} MiB for all",
                "lora_path",
            )
        if self._is_on_host:
            adapter.bind(self._model)
        if peer is not None:
            peer.finish()
        with self._lock:
            self._keep(ref.digest, adapter, pins)
        self._free_unused()

    def find(self, digest: str) -> Adapter:
        with self._lock:
            return self._adapters[digest]

    def unpin(self, digest: str) -> None:
        """Allow to evict an adapter, which no step uses any more, and free what it holds on the device."""
        with self._lock:
            self._pinned.discard(digest)
            self._unbind([digest])

    def unpin_all(self) -> None:
        with self._lock:
            self._pinned.clear()
            self._unbind(self._adapters)

    def unbind(self) -> None:
        """Free what all adapters hold on the device; they stay on the host."""
        with self._lock:
            self._unbind(self._adapters)

    def _unbind(self, digests: Iterable[str]) -> None:
        if self._is_on_host:
            return
        for adapter in [self._adapters[each] for each in digests if each in self._adapters]:
            adapter.bound = None
            if self._peers is not None and adapter.handle is not None:
                self._peers.unbind(adapter.handle.number)

    def drop(self, digest: str) -> None:
        """Free an adapter that no request uses any more."""
        with self._lock:
            if digest not in self._pinned:
                self._adapters.pop(digest, None)
        self._free_unused()

    def _free_unused(self) -> None:
        if self._peers is not None:
            self._peers.free_unused()

    def _keep(self, digest: str, adapter: Adapter, pins: bool) -> None:
        """Add the most recently used adapter, and evict others while they take too much memory."""
        self._adapters[digest] = adapter
        if pins:
            self._pinned.add(digest)
        excess = self.num_bytes - self._max_bytes
        for other in [each for each in self._adapters if each not in self._pinned and each != digest]:
            if excess <= 0:
                return
            logger.info("adapter %s is evicted from memory", other[:12])
            excess -= self._adapters.pop(other).num_bytes


def estimate_adapter_bytes(model: Model, max_rank: int) -> int:
    """Return the size of an adapter of this rank that changes every matrix of every layer."""
    sizes = 0
    for name, part in model.matrix_parts.items():
        assert isinstance(part.linear, Linear)
        sizes += 0 if name == "lm_head" else part.linear.in_features + part.num_rows
    return sizes * max_rank * model.dtype.itemsize
