"""EncoderActor: encodes the images of requests in its own thread, one image after another, while steps run.

A request reaches the scheduler with its features, so a step never waits for an image.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from engine.actors.thread_actor import ThreadActor
from engine.core.actor_messages import EncoderInbox
from engine.messages import Accepted, AddRequest, Detail, ImagePart, NewTokens, Refused
from engine.thread_priority import lower_priority
from engine.worker.executor import Encoder


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


logger = logging.getLogger("troupe.engine")


class EncoderActor(ThreadActor[EncoderInbox]):
    """Owns the cache of features.

    Args:
        cache_gb: GiB of features to keep.
        forward: gets each request with its features, on the event loop.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache_gb: float,
        forward: Callable[[AddRequest], None],
        deliver: Callable[[Accepted | Refused | NewTokens], None],
    ) -> None:
        super().__init__("troupe-encoder")
        self._encoder = encoder
        self._cache = EncoderCache(int(cache_gb * 2**30))
        self._forward = forward
        self._deliver = deliver
        # By the handle of each request's first completion; when it arrived. Threads only read it.
        self._waiting: dict[int, tuple[AddRequest, float]] = {}

    def add(self, message: AddRequest) -> None:
        """Encode the images of a request, then pass it on."""
        self._waiting[message.completions[0].handle] = (message, time.monotonic())
        self.tell(message)

    def abort(self, handles: Sequence[int]) -> None:
        """End those of the requests whose images are not encoded yet."""
        for handle in self._waiting.keys() & set(handles):
            message, _ = self._waiting.pop(handle)
            self._deliver(Accepted(handle))
            ends = [Detail(each.handle, finish_reason="abort") for each in message.completions]
            self._deliver(NewTokens(details=ends))

    def work(self) -> None:
        lower_priority()
        while (message := self._queue.get()) is not None:
            handle = message.completions[0].handle
            images: list[ImagePart] = []
            try:
                for image in message.images:
                    if self.is_ending or handle not in self._waiting:  # aborted
                        break
                    images.append(self._encode(image))
            except Exception as error:  # the border of the request: its images must not end the core
                logger.error("request %s: images cannot be encoded", message.request_id, exc_info=error)
                self.post(self._refuse, handle, error)
            else:
                self.post(self._pass_on, handle, images)

    def _encode(self, image: ImagePart) -> ImagePart:
        features = self._cache.find(image.digest)
        if features is None:
            assert image.pixels is not None, "only this actor drops pixels"
            features = self._encoder.encode(image.pixels, image.grid)
            self._cache.add(image.digest, features)
        return msgspec.structs.replace(image, pixels=None, features=features)

    def _pass_on(self, handle: int, images: list[ImagePart]) -> None:
        if handle in self._waiting:
            message, start = self._waiting.pop(handle)
            age_s = message.age_s + time.monotonic() - start
            self._forward(msgspec.structs.replace(message, images=images, age_s=age_s))

    def _refuse(self, handle: int, error: Exception) -> None:
        if self._waiting.pop(handle, None) is not None:
            self._deliver(Refused(handle, "internal", f"an image could not be encoded: {error!r}"))
