"""Opener: prepares requests before the scheduler sees them. It encodes their images and has their grammars compiled.

A request reaches the scheduler with features and matchers, so a step never waits for an image or a grammar.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from engine.actors.grammar_actor import GrammarActor
from engine.actors.lane import Lane
from engine.core.grammar_manager import is_fault
from engine.errors import EngineError
from engine.messages import Accepted, AddRequest, Detail, ImagePart, NewTokens, Refused
from engine.thread_priority import lower_priority
from engine.worker.executor import Encoder

logger = logging.getLogger("troupe.engine")


class EncoderCache:
    """At most `max_bytes` of features. Requests keep the arrays that they use, whatever the cache evicts."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._features: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def find(self, digest: bytes) -> np.ndarray | None:
        features = self._features.get(digest)
        if features is not None:
            self._features.move_to_end(digest)
        return features

    def add(self, digest: bytes, features: np.ndarray) -> None:
        self._features[digest] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._features.popitem(last=False)[1].nbytes


class Opener:
    """Opens each request in a task of its own; one thread encodes images, one after another.

    Args:
        encoder: None: the model does not see images.
        cache_gb: GiB of features to keep.
    """

    def __init__(
        self, grammar: GrammarActor, encoder: Encoder | None, cache_gb: float,
        tell_scheduler: Callable[[AddRequest], None],
        deliver: Callable[[Accepted | Refused | NewTokens], None],
    ) -> None:
        self._grammar = grammar
        self._encoder = encoder
        self._cache = EncoderCache(int(cache_gb * 2**30))
        self._lane = Lane("troupe-encoder", lower_priority)
        self._tell_scheduler = tell_scheduler
        self._deliver = deliver
        # Keys are the handles of the requests' first completions.
        self._opening: dict[int, tuple[AddRequest, asyncio.Task[None]]] = {}

    def add(self, message: AddRequest) -> None:
        """Pass the request on to the scheduler when it is prepared, or refuse it."""
        handle = message.completions[0].handle
        task = asyncio.get_running_loop().create_task(self._open(message), name="open")
        self._opening[handle] = (message, task)
        task.add_done_callback(lambda _: self._opening.pop(handle, None))

    def abort(self, handles: Sequence[int]) -> None:
        """End those of the requests that are not prepared yet."""
        for handle in self._opening.keys() & set(handles):
            message, task = self._opening.pop(handle)
            task.cancel()
            self._deliver(Accepted(handle))
            ends = [Detail(each.handle, finish_reason="abort") for each in message.completions]
            self._deliver(NewTokens(details=ends))

    async def run(self) -> None:
        """Wait until cancelled, then for the image at hand."""
        try:
            await self._lane.run()
        finally:
            for _, task in self._opening.values():
                task.cancel()

    async def _open(self, message: AddRequest) -> None:
        handle, info = message.completions[0].handle, None
        try:
            if message.images:
                message = await self._encode(message)
            if message.params.grammar is not None:
                info = await self._grammar.open(message, message.params.grammar)
        except BaseException as error:  # also a panic of a library; it ends this request only
            if not is_fault(error):
                raise
            self._deliver(Refused.make(handle, error))
            return
        self._deliver(Accepted(handle, info))
        self._tell_scheduler(message)

    async def _encode(self, message: AddRequest) -> AddRequest:
        """Return the request with the features of its images."""
        start = time.monotonic()
        try:
            images = [await self._lane.call(partial(self._encode_image, each)) for each in message.images]
        except Exception as error:  # the border of the request: its images must not end the core
            logger.error("request %s: images cannot be encoded", message.request_id, exc_info=error)
            raise EngineError(f"an image could not be encoded: {error!r}") from error
        age_s = message.age_s + time.monotonic() - start
        return msgspec.structs.replace(message, images=images, age_s=age_s)

    def _encode_image(self, image: ImagePart) -> ImagePart:
        features = self._cache.find(image.digest)
        if features is None:
            assert self._encoder is not None and image.pixels is not None, "the front refuses images otherwise"
            features = self._encoder.encode(image.pixels, image.grid)
            self._cache.add(image.digest, features)
        return msgspec.structs.replace(image, pixels=None, features=features)
