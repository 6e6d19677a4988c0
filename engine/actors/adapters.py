"""AdapterLane: the thread that reads adapters while steps run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from engine.actors.lane import Lane
from engine.comm import RankLost
from engine.core.actor_messages import AdapterReady
from engine.errors import EngineError
from engine.messages import AdapterRef
from engine.worker.executor import AdapterMemory

logger = logging.getLogger("troupe.engine")


class AdapterLane(Lane):
    """Implements AdapterLoader. A broken adapter is reported only to the requests that need it."""

    def __init__(self, memory: AdapterMemory, tell_scheduler: Callable[[AdapterReady], None]) -> None:
        super().__init__("troupe-adapters")
        self._memory = memory
        self._tell_scheduler = tell_scheduler

    def load(self, ref: AdapterRef, take: Callable[[str | None], object], *, pins: bool = False) -> None:
        """Read an adapter. `take` gets why it cannot be used, or None."""
        self.submit(partial(self._load, ref, pins), take)

    def pin(self, ref: AdapterRef) -> None:
        self.load(ref, lambda error: self._tell_scheduler(AdapterReady(ref.digest, error)), pins=True)

    def unpin(self, digest: str) -> None:
        self.submit(partial(self._memory.unpin, digest))

    def drop(self, digest: str) -> None:
        self.submit(partial(self._memory.drop, digest))

    def _load(self, ref: AdapterRef, pins: bool) -> str | None:
        try:
            self._memory.load(ref, pins)
        except EngineError as error:
            return str(error)
        except RankLost:
            raise  # ends the core; its requests continue in another one
        except Exception as error:  # the border of the load: a file of somebody else must not end the core
            logger.error("adapter %r in %r could not be loaded", ref.name, ref.path, exc_info=error)
            return f"adapter {ref.name!r} could not be loaded: {error!r}"
        return None
