"""AdapterCatalog: the adapters of an engine by name, and which requests use them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from engine.errors import EngineError, InvalidRequest
from engine.front.client import Client
from engine.lora.adapter_files import AdapterFiles, find_adapter
from engine.messages import AdapterRef

MAX_NAME_LENGTH = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Selects the adapter of a request. Fields are vLLM's.

    Args:
        lora_int_id: not needed; adapters are identified by their content.
        lora_path: folder or hub name, loaded if there is no adapter of this name; "" if it is loaded.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


class AdapterCatalog:
    """Loads, names and unloads adapters; lives on the front's event loop.

    Args:
        base_name: the model's name, which no adapter may have.
        require_client: returns the client if a core accepts requests, or raises.
    """

    def __init__(self, is_enabled: bool, base_name: str, require_client: Callable[[], Client]) -> None:
        self._is_enabled = is_enabled
        self._base_name = base_name
        self._require_client = require_client
        self._lock = asyncio.Lock()
        self._refs: dict[str, AdapterRef] = {}
        self._num_users: Counter[str] = Counter()  # requests by digest
        self._unused: dict[str, asyncio.Event] = {}  # by digest; set when its last request ends

    @property
    def refs(self) -> list[AdapterRef]:
        """The loaded adapters, in the order in which they were loaded."""
        return list(self._refs.values())

    def find(self, name: str) -> AdapterRef | None:
        return self._refs.get(name)

    async def load(
        self, name: str, path: str, is_replaced: bool = False, roots: tuple[str, ...] | None = None
    ) -> AdapterRef:
        """Read an adapter in all cores, and give it a name.

        Args:
            is_replaced: an adapter of this name may exist; its requests finish with the old one.
            roots: folders of which one must contain the adapter; None: any folder, or a hub name.

        Raises:
            InvalidRequest: the name is taken, or the adapter cannot be used.
            EngineDead, EngineSleeping: no core is running.
        """
        self._check_name(name, is_replaced)
        folder = await asyncio.to_thread(find_adapter, path, roots)
        digest = (await asyncio.to_thread(AdapterFiles.read, folder)).digest
        ref = AdapterRef(name, str(folder), digest)
        await self._require_client().calls.load_adapter(ref)
        self._check_name(name, is_replaced)  # another load may have been faster
        old = self._refs.pop(name, None)
        self._refs[name] = ref
        if old is not None:
            self._drop_unused(old.digest)
        return ref

    def list_used(self) -> list[str]:
        return [ref.name for ref in self.refs if self._num_users[ref.digest]]

    async def unload(self, name: str) -> None:
        """Remove an adapter. The name is free at once; returns when the last request has ended.

        Raises:
            InvalidRequest: there is no adapter of this name.
        """
        ref = self._refs.pop(name, None)
        if ref is None:
            raise InvalidRequest(f"lora_name={name!r} is not loaded; {self._describe_names()}", "lora_name")
        while self._num_users[ref.digest]:
            await self._unused.setdefault(ref.digest, asyncio.Event()).wait()
        self._drop_unused(ref.digest)

    async def resolve(self, request: LoRARequest) -> AdapterRef:
        """Return the adapter of a request; it is loaded if the request has a path.

        Raises:
            InvalidRequest: there is no such adapter, or its name belongs to another path.
        """
        ref = self._refs.get(request.lora_name)
        if ref is None and request.lora_path:
            async with self._lock:  # the first of several requests loads it
                ref = self._refs.get(request.lora_name)
                if ref is None:
                    return await self.load(request.lora_name, request.lora_path)
        if ref is None:
            raise InvalidRequest(
                f"lora_request: {request.lora_name!r} is not loaded; {self._describe_names()}", "lora_request"
            )
        path = request.lora_path or ref.path
        # In a thread, because a hub name is looked up in the network.
        if path != ref.path and str(await asyncio.to_thread(find_adapter, path)) != ref.path:
            raise InvalidRequest(
                f"lora_request: {request.lora_name!r} is the adapter in {ref.path!r}; unload it first",
                "lora_request",
            )
        return ref

    @contextmanager
    def hold(self, ref: AdapterRef | None) -> Iterator[None]:
        """Count a request that uses the adapter, until the context ends."""
        if ref is None:
            yield
            return
        self._num_users[ref.digest] += 1
        try:
            yield
        finally:
            self._num_users[ref.digest] -= 1
            if not self._num_users[ref.digest]:
                del self._num_users[ref.digest]
                if (event := self._unused.pop(ref.digest, None)) is not None:
                    event.set()
                self._drop_unused(ref.digest)

    def _drop_unused(self, digest: str) -> None:
        """Free an adapter without a name and without requests."""
        if self._num_users[digest] or any(ref.digest == digest for ref in self._refs.values()):
            return
        with suppress(EngineError):  # without a core there is nothing to free
            self._require_client().drop_adapter(digest)

    def _check_name(self, name: str, is_replaced: bool) -> None:
        if not self._is_enabled:
            raise InvalidRequest("this engine serves no adapters; start it with enable_lora", "lora_name")
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidRequest(
                f"lora_name={name[:80]!r} must have 1 to {MAX_NAME_LENGTH} printable characters", "lora_name"
            )
        if name == self._base_name:
            raise InvalidRequest(f"lora_name={name!r} is the name of the model", "lora_name")
        if name in self._refs and not is_replaced:
            raise InvalidRequest(
                f"lora_name={name!r} is loaded from {self._refs[name].path!r}; unload it, or use load_inplace",
                "lora_name",
            )

    def _describe_names(self) -> str:
        return f"loaded are {', '.join(self._refs)}" if self._refs else "no adapter is loaded"
