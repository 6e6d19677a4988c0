"""AdapterActor: the thread that reads adapters while steps run."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.actors.thread_actor import ThreadActor
from engine.comm import RankLost
from engine.core.actor_messages import AdapterInbox, AdapterReady, PinAdapter, UnpinAdapter
from engine.errors import EngineError
from engine.messages import AdapterRef, DropAdapter, LoadAdapter, Reply
from engine.worker.executor import AdapterMemory

logger = logging.getLogger("troupe.engine")


class AdapterActor(ThreadActor[AdapterInbox]):
    """Loads adapters one after another. A broken one is reported only to the requests that need it."""

    def __init__(
        self, memory: AdapterMemory, tell_scheduler: Callable[[AdapterReady], None],
        deliver: Callable[[Reply], None],
    ) -> None:
        super().__init__("troupe-adapters")
        self._memory = memory
        self._tell_scheduler = tell_scheduler
        self._deliver = deliver

    def work(self) -> None:
        while (message := self._queue.get()) is not None:
            match message:
                case LoadAdapter(call_id=call_id, ref=ref):
                    self.post(self._deliver, Reply(call_id, error=self._load(ref, pins=False)))
                case PinAdapter(ref=ref):
                    self.post(self._tell_scheduler, AdapterReady(ref.digest, self._load(ref, pins=True)))
                case UnpinAdapter(digest=digest):
                    self._memory.unpin(digest)
                case DropAdapter(digest=digest):
                    self._memory.drop(digest)

    def _load(self, ref: AdapterRef, pins: bool) -> str | None:
        """Return why the adapter cannot be used; None if it is loaded."""
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
