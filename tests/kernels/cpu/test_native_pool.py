"""The pool of threads: every tile once, whatever sleeps, from several callers and engines."""

import gc
import os
import threading

import pytest
import torch

from kernels import cpu
from kernels.cpu.library import ThreadPool, count_cores
from kernels.cpu.native_ops import NativeOps
from tests.kernels.cpu.conftest import require_library
from tests.waiting import wait_until


def make_work(ops: NativeOps) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, a matrix, and their product as one thread computes it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 64, generator=generator), torch.randn(1000, 64, generator=generator)
    return x, weight, ops.linear(x, ops.pack_linear(weight, None, None), None)


def list_threads() -> set[str]:
    """The ids of this process's threads. Compare sets: threads of earlier tests may end meanwhile."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("num_threads", [2, 16])
def test_thousands_of_short_loops_lose_no_tile(num_threads: int) -> None:
    """Shorter than a worker's sleep takes to end, so that late workers meet newer loops."""
    alone = NativeOps(require_library(), 1)
    x, weight, expected = make_work(alone)
    ops = NativeOps(require_library(), num_threads)
    packed = ops.pack_linear(weight, None, None)
    assert all(torch.equal(ops.linear(x, packed, None), expected) for _ in range(3000))


def test_two_threads_may_call_one_pool_and_two_engines_have_their_own() -> None:
    shared = NativeOps(require_library(), 2)
    x, weight, expected = make_work(shared)
    results: list[bool] = []

    def work(ops: NativeOps) -> None:
        packed = ops.pack_linear(weight, None, None)
        results.append(all(torch.equal(ops.linear(x, packed, None), expected) for _ in range(500)))

    engines = (shared, shared, NativeOps(require_library(), 2), NativeOps(require_library(), 3))
    threads = [threading.Thread(target=work, args=(ops,)) for ops in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


async def test_a_pool_that_is_dropped_ends_its_threads() -> None:
    library = require_library()
    before = list_threads()
    pool = ThreadPool(library, 9)
    started = list_threads() - before
    assert len(started) == 8
    del pool
    gc.collect()
    await wait_until(lambda: not started & list_threads())


@pytest.mark.parametrize("num_threads", [0, -1, 257])
def test_a_senseless_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads={num_threads} must be between 1 and 256"):
        NativeOps(require_library(), num_threads)


@pytest.mark.parametrize("num_threads", [None, 1024])
def test_more_cores_than_a_pool_takes_are_no_error(monkeypatch: pytest.MonkeyPatch, num_threads: int | None) -> None:
    monkeypatch.setattr(cpu, "MAX_THREADS", 3)
    monkeypatch.setattr(cpu, "count_cores", lambda: 384)
    library = require_library()
    before = list_threads()
    ops = cpu.make_native_ops(library, num_threads)
    assert (ops.name, len(list_threads() - before)) == ("native", 2)


def test_there_is_at_least_one_core() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
