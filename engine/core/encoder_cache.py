"""EncoderCache: the features of encoded images, by digest; the least recently used ones leave first."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


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
