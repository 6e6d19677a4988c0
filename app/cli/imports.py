"""import_large: a module whose import takes seconds."""

from __future__ import annotations

import gc
import importlib
from typing import Any


def import_large(path: str) -> Any:
    """Import a module with the garbage collector off.

    An import makes hundreds of thousands of objects and hardly any garbage; looking for it takes a fifth of the time.
    """
    gc.disable()
    try:
        return importlib.import_module(path)
    finally:
        gc.freeze()
        gc.enable()
