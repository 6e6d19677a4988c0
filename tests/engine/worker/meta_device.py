"""Stands in for a GPU with torch's meta device: what Triton would launch, and what the host would wait for."""

import re
import sys
import traceback
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.upload import upload_tensor

META = torch.device("meta")


class Launches:
    """Stands in for the launch of every Triton kernel."""

    def __init__(self) -> None:
        self.variants: set[tuple[Any, ...]] = set()
        self.names: list[str] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(isinstance(size, int) for size in grid), "a grid is made on the host"
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        found = [(name, self._classify(kernel, name, value)) for name, value in sorted(given.items())]
        self.variants.add((kernel.__name__, *found))
        self.names.append(kernel.__name__)

    def _classify(self, kernel: Any, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            offset = value.storage_offset() * value.element_size()
            return value.dtype, offset % 16 == 0
        if name.isupper() or name not in kernel.arg_names or value is None:
            return value
        if isinstance(value, float):
            return "float"
        free = {each.name for each in kernel.params if each.do_not_specialize}
        return "int" if name in free else ("int", value == 1, value % 16 == 0)


class Waits(TorchFunctionMode):
    """Notes the copies to the device for which the host would wait: all but those of `upload`.

    Reads of a value raise by themselves.
    """

    MAKERS = ("tensor", "as_tensor", "asarray", "new_tensor")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
        if self._is_wait(name, result, args):
            ours = [each for each in traceback.extract_stack() if re.search("/(engine|kernels)/", each.filename)]
            self.found.add(f"{name} in {ours[-2].filename}:{ours[-2].lineno}")
        return result

    def _is_wait(self, name: str, result: Any, args: Any) -> bool:
        target = args[0] if name in ("copy_", "__getitem__", "__setitem__") else result
        if not isinstance(target, Tensor) or not target.is_meta:
            return False
        if name in ("to", "copy_", "meta"):
            source = args[1] if name == "copy_" else args[0]
            return source.device.type == "cpu" and sys._getframe(2).f_code is not upload_tensor.__code__
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(map(_is_on_host, (*index, *args[2:])))
        return name in self.MAKERS


def _is_on_host(part: Any) -> bool:
    return isinstance(part, list | np.ndarray) or (isinstance(part, Tensor) and part.device.type == "cpu")


class NoFetch:
    """Results that are never read."""

    def is_done(self) -> bool:
        return False

    def wait(self) -> list[np.ndarray]:
        raise AssertionError("there are no values")


class MetaLink:
    """A link whose launch sections note what the host waits for."""

    def __init__(self) -> None:
        self.waits = Waits()

    def fetch(self, tensors: Any) -> NoFetch:
        return NoFetch()

    def launch_section(self) -> Any:
        return self.waits
