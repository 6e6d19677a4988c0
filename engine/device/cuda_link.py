"""CudaLink and CudaGraphRecorder: all calls to CUDA streams, events and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor


class CudaFetch:
    """Copies into pinned memory, and an event recorded after the last copy."""

    def __init__(self, event: torch.cuda.Event, hosts: list[Tensor], sources: Sequence[Tensor]) -> None:
        self._event = event
        self._hosts = hosts
        self._sources = sources  # kept alive until the copies are done

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> list[np.ndarray]:
        self._event.synchronize()
        return [host.numpy() for host in self._hosts]


class CudaLink:
    """The link to one CUDA device: forward passes on one stream, copies of results on another.

    forward stream   forward N │ sample N │ forward N+1 │ sample N+1 │
    copies stream                         └ tokens of N ─▶ pinned memory, event
    host             launch N, launch N+1, ... then read N
    """

    checks_syncs = False  # set by tests: raise if code in a launch section waits for the device

    def __init__(self, device: torch.device) -> None:
        self._forward = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device)

    def enter_thread(self) -> None:
        """Prepare the calling thread for launching steps."""
        # Work on other streams, such as loading weights, must finish first.
        torch.cuda.synchronize()
        torch.cuda.set_stream(self._forward)

    def fetch(self, tensors: Sequence[Tensor]) -> CudaFetch:
        """Start copying tensors to the host. They must not be modified afterwards."""
        computed = torch.cuda.Event()
        computed.record()
        arrived = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            arrived.record()
        return CudaFetch(arrived, hosts, tensors)

    def launch_section(self) -> AbstractContextManager[None]:
        """Return a context for code that must not wait for the device."""
        return forbid_syncs() if self.checks_syncs else nullcontext()


class CudaGraphRecorder:
    """Records CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A private stream, so that two engines can record at the same time
        self._stream = torch.cuda.Stream()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once without recording, so that first-call compilation and set-up are not recorded; then record."""
        run()
        graph = torch.cuda.CUDAGraph()
        forward = torch.cuda.current_stream()
        try:
            # thread_local: other threads may allocate pinned memory meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        finally:
            torch.cuda.set_stream(forward)  # a failed recording would not restore it
        return graph.replay


@contextmanager
def forbid_syncs() -> Iterator[None]:
    """Make torch raise on implicit synchronisation. It affects the whole process: for debugging only."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
