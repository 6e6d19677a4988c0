"""Opens the worker's device: the link to it and, on a GPU, the measurement of its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from engine.device.cuda_link import CudaLink
from engine.resolved_config import WorkerConfig


class DeviceMemory:
    """The memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty_cache(self) -> None:
        """Free the memory that torch caches, which the driver counts as used."""
        gc.collect()
        torch.cuda.empty_cache()

    def measure(self) -> tuple[int, int]:
        """Return (total, free) bytes."""
        self.empty_cache()  # of unpacked weights, or of another engine
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def measure_peak(self, run: Callable[[], None]) -> int:
        """Return the peak of the additional bytes that `run` allocates."""
        self.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        # Reserved rather than allocated bytes, because nothing else can use the gaps between allocations.
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def open_device(config: WorkerConfig) -> tuple[torch.device, CudaLink | None, DeviceMemory | None]:
    """Prepare the device for the calling thread. CPU and MPS have no link, and their memory is estimated."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return device, None, None
    # Otherwise cuBLAS may reduce in 16 bits, and results would depend more on the batch size.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    link = CudaLink(device)
    link.enter_thread()
    return device, link, DeviceMemory(device)
