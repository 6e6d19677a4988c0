"""The device that a worker runs on, the link to it and, on a GPU, the memory that counts what steps take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from engine.config import WorkerConfig
from engine.worker.cuda_link import CudaLink
from engine.worker.device_link import DeviceLink, HostLink


class DeviceMemory(Protocol):
    """The memory of a device that counts what steps take."""

    def empty_cache(self) -> None:
        """Give back what torch keeps for later, which counts as used."""

    def measure(self) -> tuple[int, int]:
        """Return (total, free) bytes."""

    def measure_peak(self, run: Callable[[], None]) -> int:
        """Return the bytes that `run` takes at most beside what is taken already."""


class CudaMemory:
    """The memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty_cache(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def measure(self) -> tuple[int, int]:
        self.empty_cache()  # of weights as they were before they were packed, or of another engine
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def measure_peak(self, run: Callable[[], None]) -> int:
        self.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        # What torch reserves, not what it hands out: no other part of the process can use the gaps.
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def open_device(config: WorkerConfig) -> tuple[torch.device, DeviceLink, DeviceMemory | None]:
    """Make the device ready for the thread that calls; the host has no memory that counts."""
    device = torch.device(config.device)
    if device.type == "cpu":
        return device, HostLink(), None
    # Else cuBLAS may add up parts of a sum in so few bits that batches of another size round visibly.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    link = CudaLink(device, config.check_syncs)
    link.enter_thread()
    return device, link, CudaMemory(device)
