"""Times sums over two ranks, shared memory against gloo in turn: `python -m tests.engine.parallel.compare_comms`."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engine.parallel.comm import TorchComm
from engine.parallel.shared_memory import SharedMemoryComm, make_memory, make_pipes

NUM_NUMBERS = 16_384  # 64 KiB
NUM_ROUNDS, NUM_SUMS = 5, 300


def measure(run: Callable[[], object]) -> float:
    """Return the microseconds of one call."""
    start = time.perf_counter()
    for _ in range(NUM_SUMS):
        run()
    return (time.perf_counter() - start) / NUM_SUMS * 1e6


def run_rank(rank: int, shared: SharedMemoryComm, port: int) -> None:
    torch.set_num_threads(1)
    gloo = TorchComm(dist.TCPStore("127.0.0.1", port, 2, rank == 0), rank, 2, torch.device("cpu"))
    part = torch.randn(NUM_NUMBERS)
    for _ in range(NUM_ROUNDS):
        ours, theirs = measure(lambda: shared.sum(part)), measure(lambda: dist.all_reduce(part))
        if rank == 0:
            print(f"shared memory {ours:.0f} us, gloo's all_reduce {theirs:.0f} us: {ours / theirs:.2f}")
    gloo.close()


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    memory, (sending, receiving) = make_memory(2), make_pipes(2)
    comms = [SharedMemoryComm(r, 2, os.dup(memory), sending[r], receiving[r]) for r in range(2)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(r, comm, port)) for r, comm in enumerate(comms)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
