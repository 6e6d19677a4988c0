"""What a visitor sees while the engine starts: which step it is at, how long it took, how much has been downloaded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from engine import Engine

PAGE = (Path(__file__).resolve().parents[1] / "assets" / "loading.html").read_text(encoding="utf-8")
INDEX = "model.safetensors.index.json"  # of the files that the engine downloads


class Loading:
    """The progress of one start, read off the engine and the hub's cache whenever somebody asks."""

    def __init__(
        self, engine: Engine, cache: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine = engine
        self.cache = Path(HF_HUB_CACHE) if cache is None else cache
        self.clock = clock
        self.begun = clock()

    def describe(self) -> dict[str, Any]:
        """The step (tokenizer, weights, page), seconds so far, and bytes of a download with their total if known."""
        done = {name for name, _ in self.engine.timeline}
        step = "page" if self.engine.state == "ready" else "weights" if "tokenizer" in done else "tokenizer"
        found: dict[str, Any] = {"step": step, "seconds": round(self.clock() - self.begun, 1)}
        if self._is_on_hub():
            num_bytes, total = self._count_bytes()
            found |= {"downloaded_bytes": num_bytes, "total_bytes": total}
        return found

    def draw(self) -> str:
        """The page; its script asks for `describe` once a second and opens the app when it is there."""
        name = escape(self.engine.model_name)
        progress = json.dumps(self.describe()).replace("<", "\\u003c")
        return PAGE.replace("{{model}}", name).replace("{{progress}}", progress)

    def _is_on_hub(self) -> bool:
        model = self.engine.config.model
        return model.count("/") == 1 and not Path(model).exists()

    def _count_bytes(self) -> tuple[int, int | None]:
        """Bytes of this model in the cache, unfinished files too, and those of its weights, once its index is here."""
        folder = self.cache / f"models--{self.engine.config.model.replace('/', '--')}"
        sizes = [_size(path) for path in folder.glob("blobs/*")]
        total = None
        for index in folder.glob(f"snapshots/*/{INDEX}"):
            try:
                total = int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it is being written
        return sum(sizes), total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it was just renamed
