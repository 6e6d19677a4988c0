"""Four mock replicas: how soon their end is noticed, how long readers pause, and the CPU time of idle ones.

python -m tests.engine.cluster.measure_replicas
"""

import asyncio
import json
import resource
import signal
import time
from pathlib import Path

from engine import Engine, EngineConfig, SamplingParams
from tests.engine.cluster.fault_run import find_busy, find_pid, send_signal
from tests.waiting import wait_until

NUM_STREAMS = 64
IDLE_S = 20.0
LONG = SamplingParams(max_tokens=100_000, ignore_eos=True, output_kind="delta")


def read_cpu_s(pid: int) -> float:
    """CPU seconds of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def measure_idle(engine: Engine) -> float:
    """Return the share of one core that front and replicas need together while there are no requests."""
    pids = [find_pid(engine, index) for index in range(4)]

    def read() -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return own.ru_utime + own.ru_stime + sum(read_cpu_s(pid) for pid in pids)

    before = read()
    await asyncio.sleep(IDLE_S)
    return (read() - before) / IDLE_S


async def measure_fault(engine: Engine, number: int) -> tuple[float, float]:
    """Return after how many seconds a signal was noticed, and the longest gap of a reader whose replica got it."""
    gaps: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    async def read(index: int) -> None:
        last = 0.0
        async for _ in engine.generate([index + 5] * 40, LONG):
            now = time.monotonic()
            gaps[index].append(now - (last or now))
            last = now

    readers = [asyncio.ensure_future(read(index)) for index in range(NUM_STREAMS)]
    await wait_until(lambda: all(len(each) > 20 for each in gaps))
    for each in gaps:
        each.clear()
    victim = find_busy(engine)[0]
    start = time.monotonic()
    send_signal(engine, victim, number)
    await wait_until(lambda: engine.describe_replicas()[victim].state != "ready")
    noticed_s = time.monotonic() - start
    await wait_until(lambda: all(len(each) > 20 for each in gaps))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await wait_until(lambda: all(each.state == "ready" for each in engine.describe_replicas()), 300)
    return noticed_s, sorted(max(each) for each in gaps)[int(NUM_STREAMS * 0.99)]


async def run() -> None:
    config = EngineConfig(
        mock_step_ms=10.0, data_parallel_size=4, num_blocks=20000, max_num_waiting=1000, heartbeat_timeout_s=2.0
    )
    async with Engine(config) as engine:
        found: dict[str, object] = {"idle_cpu_share": round(await measure_idle(engine), 4)}
        for name, number in (("sigkill", signal.SIGKILL), ("sigstop", signal.SIGSTOP)):
            pairs = [await measure_fault(engine, number) for _ in range(5)]
            found[f"{name}_noticed_s"] = sorted(round(noticed, 3) for noticed, _ in pairs)
            found[f"{name}_pause_p99_s"] = sorted(round(pause, 3) for _, pause in pairs)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(run())
