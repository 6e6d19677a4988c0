"""ImageIntake: turns the images of a prompt into pixels for the encoder, in a pool of threads beside the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.input.images.decode import check_size, decode_image, flatten, refuse
from engine.input.images.source import MediaReader, Source
from engine.input.tokenizer import Tokenizer
from engine.messages import ImagePart
from engine.model import ModelConfig
from engine.model.checkpoint import resolve_checkpoint
from engine.model.vision.encoder import PROCESSOR_FILES, read_processor
from engine.model.vision.spec import VisionSpec
from engine.thread_priority import lower_priority

# Prepared pixels of a request; with the rest of it they must fit into one message to the core, see MAX_FRAME_BYTES.
MAX_PIXEL_BYTES = 192 * 2**20
POOL_THREADS = 2
# Prepared pixels of all live requests; images of further requests wait. One request may exceed it.
MAX_LIVE_BYTES = 2**30


class Processor(Protocol):
    """The image processor of one kind of model.

    Attributes:
        slot: text that a chat template has for an image.
        whole_size: tokens of an image, if they attend to each other and one step computes all of them; else 0.
    """

    slot: str
    whole_size: int

    def prepare(self, image: Image.Image) -> tuple[np.ndarray, list[int]]: ...

    def write(self, grid: Sequence[int]) -> str: ...


class Prepared(NamedTuple):
    """One image for the encoder."""

    digest: bytes
    pixels: np.ndarray
    grid: list[int]


class ImagePrompt(list[int]):
    """Token ids of a prompt with its images."""

    def __init__(self, token_ids: Sequence[int], images: list[ImagePart]) -> None:
        super().__init__(token_ids)
        self.images = images


class ImageIntake:
    """Reads, checks and prepares images.

    Raises:
        ConfigError: the model's image processor cannot be loaded.
    """

    def __init__(
        self, path_or_name: str | Path, spec: VisionSpec, tokenizer: Tokenizer, reader: MediaReader,
        max_images: int, max_step_tokens: int,
    ) -> None:
        self._max_images, self._max_step_tokens = max_images, max_step_tokens
        folder = resolve_checkpoint(path_or_name, PROCESSOR_FILES)
        self._reader = reader
        self._tokenizer = tokenizer
        self._token_id = spec.image_token_id
        # By name, because importing transformers' models takes seconds.
        kind = importlib.import_module(f"engine.input.images.{spec.kind}")
        try:
            self._processor: Processor = kind.Processor(folder.absolute(), json.loads(spec.config))
            self._settings = json.dumps(read_processor(folder), sort_keys=True).encode()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{folder}: the image processor cannot be loaded: {error}") from error
        tokenizer.show_images(self._processor.slot)
        # Most templates write one token of a feature; Gemma's writes the one before them.
        ids = tokenizer.encode(self._processor.slot, add_special_tokens=False)
        self._slot_id = self._token_id if self._token_id in ids else ids[0]
        self._pool = ThreadPoolExecutor(POOL_THREADS, "troupe-images", initializer=lower_priority)
        self._lock = threading.Lock()
        self._num_live_bytes = 0
        self._freed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def insert(self, token_ids: list[int], sources: Sequence[Source]) -> ImagePrompt:
        """Return the prompt with each image's tokens in the place of its slot.

        Raises:
            InvalidRequest: an image cannot be used, or the prompt has another number of slots.
        """
        if len(sources) > self._max_images:
            raise refuse(f"there are {len(sources)} images; a request may have at most {self._max_images}")
        if sources and (size := self._processor.whole_size) > self._max_step_tokens:
            raise refuse(
                f"an image has {size} tokens, which one step computes; max_num_batched_tokens={self._max_step_tokens}"
            )
        slots = [place for place, token_id in enumerate(token_ids) if token_id == self._slot_id]
        if len(slots) != len(sources):
            raise refuse(
                f"the prompt has {len(slots)} places for images, and there are {len(sources)} images"
            )
        self._loop = asyncio.get_running_loop()
        while self._num_live_bytes > MAX_LIVE_BYTES:
            self._freed.clear()
            await self._freed.wait()
        prepared: list[Prepared] = []
        for source in sources:
            prepared.append(await self._prepare(source))
            if (num_bytes := sum(each.pixels.nbytes for each in prepared)) > MAX_PIXEL_BYTES:
                raise refuse(
                    f"the first {len(prepared)} of {len(sources)} images have {num_bytes / 2**20:.0f} MiB of pixels; a "
                    f"request may have at most {MAX_PIXEL_BYTES >> 20} MiB. Use fewer or smaller images"
                )
        return self._join(token_ids, slots, prepared)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, source: Source) -> Prepared:
        data = source if isinstance(source, Image.Image) else await self._reader.read(source)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._work, data)

    def _work(self, data: bytes | Image.Image) -> Prepared:
        """Decode and prepare one image, in a thread of the pool."""
        if isinstance(data, Image.Image):
            check_size(*data.size)
            image = flatten(data)
        else:
            image = decode_image(data)
        width, height = image.size
        digest = hashlib.sha256(self._settings + f"\0{width}x{height}\0".encode() + image.tobytes()).digest()
        pixels, grid = self._processor.prepare(image)
        with self._lock:
            self._num_live_bytes += pixels.nbytes
        weakref.finalize(pixels, self._release, pixels.nbytes)
        return Prepared(digest, pixels, grid)

    def _release(self, num_bytes: int) -> None:
        """Count freed pixels; any thread may free them."""
        with self._lock:
            self._num_live_bytes -= num_bytes
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._freed.set)

    def _join(self, token_ids: list[int], slots: list[int], prepared: list[Prepared]) -> ImagePrompt:
        joined: list[int] = []
        images, start = [], 0
        for slot, each in zip(slots, prepared, strict=True):
            joined += token_ids[start:slot]
            own = self._tokenizer.encode(self._processor.write(each.grid), add_special_tokens=False)
            places = np.flatnonzero(np.array(own) == self._token_id) + len(joined)
            is_whole = self._processor.whole_size > 0
            images.append(ImagePart(each.digest, places, each.grid, each.pixels, is_whole=is_whole))
            joined += own
            start = slot + 1
        return ImagePrompt(joined + token_ids[start:], images)


def make_intake(config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> ImageIntake | None:
    """Return the intake of a model that sees images; None if it does not, or cannot with this config."""
    if model.vision is None or tokenizer is None or config.num_ranks > 1:
        return None
    reader = MediaReader(config.allowed_media_domains)
    _, max_step_tokens = config.find_step_limits("cpu")
    max_images = config.read_image_limit()
    return ImageIntake(config.model, model.vision, tokenizer, reader, max_images, max_step_tokens)
