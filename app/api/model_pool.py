"""ModelPool: several models behind one port, each an engine with cores of its own.

    not loaded ──request──▶ loading ─▶ ready ──idle──▶ sleeping ──idle 10 times as long──▶ not loaded
                                         ▲                │
                                         └────request─────┘

The model that the server was started with stays. Of the others the one that was used longest ago makes room for the
next: it finishes its requests, while new ones for it wait until it is loaded again. One model loads at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import Depends, Request

from app.api.context import ApiContext
from app.api.errors import CLOSING, RETRY_AFTER_S, ApiError, scrub
from app.config import AppConfig, UsageError
from engine import (
    Catalogue,
    CatalogueEntry,
    ConfigError,
    Engine,
    EngineConfig,
    EngineError,
    measure_host_memory,
)

logger = logging.getLogger("troupe.models")

LOOK_S = 5.0  # at most between two looks which models are idle
POLL_S = 0.02  # between two looks whether a model has become idle or ready
RUNTIME_BYTES = 300 * 2**20  # of a core's process beside its weights
IDLE_FACTOR = 10  # of the idle time after which a model that sleeps is ended
# Settings that belong to the first model or to its address; the other models have the defaults.
OWN_SETTINGS = (
    *("tokenizer", "hf_overrides", "generation_config", "max_model_len", "load_format", "quantization", "dtype"),
    *("speculative_config", "enable_lora", "lora_modules", "lora_root", "journal", "kv_transfer_config"),
    *("data_parallel_size", "data_parallel_size_local", "data_parallel_backend", "data_parallel_rank"),
    *("nnodes", "node_rank", "distributed_executor_backend"),
)


Role = Literal["chat", "extract"]


@dataclass(eq=False)
class Slot:
    """A model that is loaded, or is being loaded.

    Attributes:
        loading: ends when the model is loaded or has failed.
        change: held while the model falls asleep or wakes up.
        num_users: requests that use it or wait for it.
        is_leaving: it ends when its requests have; new ones wait for another slot.
        began, phase: when its loading began, and what is done now.
    """

    entry: CatalogueEntry
    loading: asyncio.Task[ApiContext] = field(init=False)
    context: ApiContext | None = None
    change: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0
    last_used: float = field(default_factory=time.monotonic)
    is_leaving: bool = False
    began: float = field(default_factory=time.monotonic)
    phase: str = "waiting until another model is loaded"

    @property
    def is_gone(self) -> bool:
        """Whether new requests need another slot."""
        return self.is_leaving or (self.context is not None and self.context.engine.state in ("dead", "closed"))

    @property
    def is_busy(self) -> bool:
        """Whether a request uses the model or waits for it."""
        return self.num_users > 0 or (self.context is not None and self.context.engine.stats().num_unfinished > 0)


class ModelPool:
    """Loads models on demand.

    Args:
        first: the context of the model that the server was started with.
        make_engine: makes the engine of a further model.
    """

    def __init__(self, first: ApiContext, make_engine: Callable[[EngineConfig], Engine] = Engine) -> None:
        self.first = first
        self.make_engine = make_engine
        self.roles: dict[Role, CatalogueEntry] = {}
        self.kept: dict[str, ApiContext] = {}  # of the models that have a role, by what `EngineConfig` takes
        self.slots: dict[str, Slot] = {}  # by the same
        self._loaded: list[ApiContext] = []  # of all slots, also of those that are leaving
        self._is_closed = False
        self._lock = asyncio.Lock()  # held while a model is loaded or ended

    @property
    def serves_several(self) -> bool:
        """Whether requests may name further models."""
        return self._lists_all or bool(self.kept)

    @property
    def _lists_all(self) -> bool:
        config = self.first.config
        return config.models_dir is not None or bool(config.model_alias)

    @property
    def is_open(self) -> bool:
        """Whether the page may fetch and load models: only this machine's people can open it."""
        return self.first.config.is_loopback and not self.first.config.api_key

    def keep(self, role: Role, entry: CatalogueEntry) -> None:
        """Give a model the requests of a role that name none. Its engine is started and stays as the first one does."""
        self.roles[role] = entry
        self.kept[entry.model] = self._make_context(entry, [entry.name])

    def find_role(self, role: Role) -> ApiContext:
        """Return the context that answers requests without a model."""
        entry = self.roles.get(role)
        return self.first if entry is None else self.kept[entry.model]

    def find_loaded(self, entry: CatalogueEntry) -> ApiContext | None:
        """Return the context of a further model that is loaded."""
        slot = self.slots.get(entry.model)
        return self.kept.get(entry.model) or (None if slot is None else slot.context)

    @cached_property
    def catalogue(self) -> Catalogue:
        """The models that this server may load or fetch."""
        return Catalogue(self.first.config.models_dir, self.first.config.read_aliases())

    @property
    def contexts(self) -> list[ApiContext]:
        """The contexts of all models that are loaded."""
        return [self.first, *self.kept.values(), *self._loaded]

    @property
    def engines(self) -> list[Engine]:
        """The engines of all models that are loaded."""
        return [each.engine for each in self.contexts]

    @property
    def loaded(self) -> dict[str, ApiContext]:
        """The contexts of the models that are loaded and take new requests, by their names."""
        slots = [slot.context for slot in self.slots.values() if slot.context is not None and not slot.is_gone]
        return {each.engine.model_name: each for each in (self.first, *self.kept.values(), *slots)}

    def can_answer(self, name: str) -> bool:
        """Return whether a job may use a model: it is loaded, or would be."""
        return self.serves_several or name in self.first.model_names or name in self.loaded

    async def list_entries(self) -> dict[str, CatalogueEntry]:
        """Return the further models that can be loaded, by each of their names."""
        if not self._lists_all:
            return {each.name: each for each in self.roles.values()}
        return {name: each for name, each in (await self._list_all()).items() if each.is_here}

    async def list_choices(self) -> dict[str, CatalogueEntry]:
        """Return the further models that the page offers, by their names; some may have to be fetched first."""
        return await (self._list_all() if self.is_open else self.list_entries())

    async def _list_all(self) -> dict[str, CatalogueEntry]:
        def read() -> list[CatalogueEntry | None]:
            return [*self.catalogue.list(), *map(self.catalogue.find, self.catalogue.aliases)]

        names, model = self.first.model_names, self.first.engine.config.model
        found = [each for each in await asyncio.to_thread(read) if each is not None]
        return {each.name: each for each in found if each.name not in names and each.model != model}

    async def find(self, name: str | None, role: Role = "chat") -> CatalogueEntry | None:
        """Return the further model of a name, or of a role; None for the first model and its adapters.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            return self.roles.get(role)
        if name in self.first.model_names:
            return None
        for slot in self.slots.values():
            if slot.context is not None and name in slot.context.served_names:
                return slot.entry
        if not self.serves_several:
            return None
        entries = await self.list_entries()
        short = name.removesuffix(":latest")  # a tag that Ollama's clients add
        if short in self.first.model_names:
            return None
        if (entry := entries.get(name) or entries.get(short)) is None:
            served = ", ".join(map(repr, [*self.first.model_names, *entries]))
            message = f"the model {name[:200]!r} does not exist; this server has {served}"
            raise ApiError(404, message, "model", "model_not_found")
        return entry

    @asynccontextmanager
    async def hold(self, entry: CatalogueEntry | None) -> AsyncIterator[ApiContext]:
        """Load a model if it is not loaded, and keep it for as long as the block runs.

        Raises:
            ApiError: it cannot be loaded; says why.
        """
        if entry is None:
            await self._wait_restarted(self.first)
            yield self.first
            return
        if (kept := self.kept.get(entry.model)) is not None:
            await self._wait_restarted(kept)
            yield kept
            return
        closing = ApiError(503, "the server is closing", code=CLOSING, retry_after_s=RETRY_AFTER_S)
        if self._is_closed:
            raise closing
        slot = self.slots.get(entry.model)
        if slot is None or slot.is_gone:
            slot = self.slots[entry.model] = self._begin(entry, slot)
        slot.num_users += 1
        try:
            await asyncio.wait([slot.loading])
            if slot.loading.cancelled():
                raise closing
            context = slot.loading.result()
            await self._wake(slot, context)
            yield context
        finally:
            slot.num_users -= 1
            slot.last_used = time.monotonic()

    def _begin(self, entry: CatalogueEntry, before: Slot | None) -> Slot:
        slot = Slot(entry)
        slot.loading = asyncio.create_task(self._load(slot, before), name=f"load {entry.name}")
        # Every waiter gets the error; there may be none any more.
        slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot

    async def _load(self, slot: Slot, before: Slot | None) -> ApiContext:
        start, model = time.monotonic(), slot.entry.model
        async with self._lock:
            if before is not None and not before.is_leaving:
                await self._end(before)  # its engine is dead
            try:
                if slot.entry.problem:
                    raise ConfigError(slot.entry.problem)
                slot.phase = "making room in memory"
                await self._make_room(slot.entry)
                slot.phase = f"loading {slot.entry.num_bytes / 2**20:,.0f} MiB"
                slot.context = await self._start(slot.entry)
            except (ConfigError, EngineError) as error:
                logger.warning("the model %s could not be loaded: %s", slot.entry.name, error)
                message = f"the model {slot.entry.name!r} could not be loaded: {scrub(str(error))}"
                raise ApiError(500, message, "model", "model_load_failed") from error
            finally:
                if slot.context is None and self.slots.get(model) is slot:
                    del self.slots[model]
        logger.info("the model %s is loaded in %.1f s", slot.entry.name, time.monotonic() - start)
        return slot.context

    async def _start(self, entry: CatalogueEntry) -> ApiContext:
        names = [name for name, each in (await self.list_entries()).items() if each.model == entry.model]
        context = self._make_context(entry, names)
        try:
            await context.engine.start()
            await asyncio.to_thread(context.warm_up)
        except BaseException:
            await context.engine.close()
            raise
        self._loaded.append(context)
        return context

    def _make_context(self, entry: CatalogueEntry, names: list[str]) -> ApiContext:
        first = self.first
        engine = self.make_engine(configure(first.engine.config, entry, names))
        context = ApiContext(engine, first.config, first.created, first.open_requests, first.store)
        # One work on jobs, and one list of stored responses, for all models.
        context.__dict__.update(jobs=first.jobs, responses=first.responses)
        return context

    async def _make_room(self, entry: CatalogueEntry) -> None:
        """End models until this one fits; those that nothing uses first, then those used longest ago."""
        needed = RUNTIME_BYTES + entry.num_bytes * 5 // 4
        while True:
            loaded = [slot for slot in self.slots.values() if slot.context is not None]
            free, limit = measure_host_memory()[1], self.first.config.max_loaded_models
            if len(loaded) + len(self.kept) + 2 <= limit and needed <= free:
                return
            if not loaded:
                message = (
                    f"the model {entry.name!r} needs about {needed} bytes of memory, and {free} are free; "
                    f"max_loaded_models={limit}"
                )
                raise ApiError(503, message, "model", "model_does_not_fit", RETRY_AFTER_S)
            await self._end(min(loaded, key=lambda slot: (slot.is_busy, slot.last_used)))

    async def _end(self, slot: Slot) -> None:
        """End a model when its requests have ended. The lock is held."""
        slot.is_leaving = True
        while slot.is_busy:  # noqa: ASYNC110  requests end in many places
            await asyncio.sleep(POLL_S)
        assert slot.context is not None, "it was loaded"
        await slot.context.engine.close()
        self._loaded.remove(slot.context)
        if self.slots.get(slot.entry.model) is slot:
            del self.slots[slot.entry.model]
        logger.info("the model %s is ended", slot.entry.name)

    async def _wake(self, slot: Slot, context: ApiContext) -> None:
        """Wait until the model takes requests; wake it up if it sleeps."""
        if context.engine.state != "ready":
            async with slot.change:
                if context.engine.state == "sleeping":
                    await context.engine.wake_up()
            await self._wait_restarted(context)

    async def _wait_restarted(self, context: ApiContext) -> None:
        """Wait while a core that was lost starts again."""
        while context.engine.state == "restarting":  # noqa: ASYNC110  as above
            await asyncio.sleep(POLL_S)

    def count_unfinished(self) -> int:
        """Return how many requests run or wait, over all models."""
        return sum(context.engine.stats().num_unfinished for context in self.contexts)

    async def abort(self, request_id: str) -> None:
        """End a request, whichever model answers it."""
        for context in self.contexts:
            await context.engine.abort(request_id)

    async def unload(self, entry: CatalogueEntry) -> bool:
        """End a model when its requests have ended; returns False if it is not loaded."""
        async with self._lock:
            slot = self.slots.get(entry.model)
            if slot is None or slot.context is None or slot.is_leaving:
                return False
            await self._end(slot)
        return True

    async def tend(self) -> None:
        """Put models to sleep that nothing has used for a while, and end them later, until cancelled."""
        while True:
            await asyncio.sleep(min(self.first.config.model_idle_s / 4, LOOK_S))
            for slot in list(self.slots.values()):
                if slot.context is not None and not slot.is_busy and not slot.is_gone:
                    await self._settle(slot, slot.context.engine)

    async def _settle(self, slot: Slot, engine: Engine) -> None:
        """Put a model to sleep, or end it, if nothing has used it for long enough."""
        unused_s, idle_s = time.monotonic() - slot.last_used, self.first.config.model_idle_s
        if unused_s > idle_s * IDLE_FACTOR:
            async with self._lock:
                if not slot.is_busy and not slot.is_gone:
                    await self._end(slot)
        elif unused_s > idle_s and engine.state == "ready":
            # Nothing else may hold the lock now, so no request can come between the look and the sleep.
            async with slot.change:
                with suppress(EngineError):  # its core ends at this moment
                    await engine.sleep(1)

    async def close(self) -> None:
        """End all further models."""
        self._is_closed, slots = True, list(self.slots.values())
        self.slots.clear()
        for slot in slots:
            slot.loading.cancel()
        await asyncio.gather(*(slot.loading for slot in slots), return_exceptions=True)
        await asyncio.gather(*(context.engine.close() for context in self.contexts[1:]))


def configure(first: EngineConfig, entry: CatalogueEntry, names: list[str]) -> EngineConfig:
    """Return the settings of a further model: those of the first one that do not belong to it, in a core process."""
    defaults: Any = EngineConfig()
    reset = {name: getattr(defaults, name) for name in OWN_SETTINGS}
    core = "process" if first.core == "auto" and first.mock_step_ms is None else first.core
    served = tuple(dict.fromkeys([*names, entry.name]))
    return replace(first, **reset, model=entry.model, served_model_name=served, core=core)


def choose_roles(first: EngineConfig, config: AppConfig) -> dict[Role, CatalogueEntry]:
    """Return the models that answer requests without a model in place of the first one.

    By default the embedded model extracts, and smollm2, if it is here, answers everything else, where one of them is
    the first: the figures are in app/README.md.
    """
    catalogue = Catalogue(config.models_dir, config.read_aliases())
    embedded, smollm2 = (catalogue.find(name) for name in ("demo_model", "smollm2"))
    assert embedded is not None and smollm2 is not None, "they are always listed"
    given: dict[Role, str] = {"chat": config.chat_model, "extract": config.extract_model}
    if given["chat"] == "auto" and first.model == embedded.model and first.mock_step_ms is None and smollm2.is_here:
        given["chat"] = smollm2.name
    if given["extract"] == "auto" and first.model == smollm2.model:
        given["extract"] = embedded.name
    roles = {}
    for role, name in given.items():
        if name in ("auto", "none", *first.served_names):
            continue
        if (entry := catalogue.find(name)) is None or not entry.is_here:
            raise UsageError(f"{role}_model={name!r} is not here; `troupe models` lists those that are")
        roles[role] = entry
    return roles


def pool_of(request: Request) -> ModelPool:
    """The dependency by which a route gets the pool."""
    pool = request.app.state.pool
    assert isinstance(pool, ModelPool)
    return pool


Pool = Annotated[ModelPool, Depends(pool_of)]
