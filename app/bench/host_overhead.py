"""Host overhead: the Python that one decode step costs outside the forward pass.

    python -m app.bench.host_overhead --rows 256

A mock worker answers every step after a fixed time, so all that is left is the engine. What is measured is the
CPU time of the event loop's thread per step: once with readers that only wait for the end (the engine core),
once with readers that take every token (core, and the wake-up of each reader). Then all requests once more from
their start to their end, as tokens per second: by the clock, and by the CPU time of the whole process, which other
processes on the machine disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time

from engine import Engine, EngineConfig, SamplingParams

WINDOW_STEPS = 40


async def read(engine: Engine, params: SamplingParams) -> None:
    async for _ in engine.generate([5, 6, 7, 8], params):
        pass


async def measure(engine: Engine, rows: int, steps: int, kind: str) -> list[float]:
    """Loop-thread CPU seconds per step with `rows` running requests, of windows in the middle half, ascending."""
    params = SamplingParams(max_tokens=steps, ignore_eos=True, output_kind=kind)  # type: ignore[arg-type]
    readers = [asyncio.create_task(read(engine, params)) for _ in range(rows)]
    first = engine.stats().num_steps
    await _reach(engine, first + steps // 4)
    begun, windows = engine.stats(), []
    for end in range(first + steps // 4 + WINDOW_STEPS, first + 3 * steps // 4, WINDOW_STEPS):
        start, num_steps = time.thread_time(), engine.stats().num_steps
        await _reach(engine, end)
        num_steps = engine.stats().num_steps - num_steps
        if num_steps:
            windows.append((time.thread_time() - start) / num_steps)
    ended = engine.stats()
    num_rows = (ended.num_step_tokens - begun.num_step_tokens) / (ended.num_steps - begun.num_steps)
    assert num_rows == rows, f"the steps had {num_rows} rows on average, not {rows}"
    await asyncio.gather(*readers)
    return sorted(windows)


async def measure_rate(engine: Engine, rows: int, steps: int) -> tuple[float, float]:
    """Tokens per second offline, ramp-up and ends included: by the clock, and by CPU time."""
    params = SamplingParams(max_tokens=steps, ignore_eos=True, output_kind="final")
    start, cpu = time.monotonic(), time.process_time()
    await asyncio.gather(*(read(engine, params) for _ in range(rows)))
    num_tokens = rows * steps
    return num_tokens / (time.monotonic() - start), num_tokens / (time.process_time() - cpu)


async def _reach(engine: Engine, num_steps: int) -> None:
    while engine.stats().num_steps < num_steps:  # noqa: ASYNC110  the engine has no event for a count
        await asyncio.sleep(0.005)


def measure_python() -> float:
    """Nanoseconds of one turn of a plain Python loop: how fast this machine is right now."""
    start = time.thread_time()
    for _ in range(2_000_000):
        pass
    return (time.thread_time() - start) / 2_000_000 * 1e9


async def run(rows: int, steps: int, step_ms: float) -> None:
    config = EngineConfig(
        mock_step_ms=step_ms,
        max_num_seqs=rows,
        max_num_batched_tokens=max(1024, 4 * rows),
        max_num_waiting=2 * rows,
        num_blocks=rows * 140,
    )
    async with Engine(config) as engine:
        gc.collect()
        gc.freeze()  # as the server does once it is up
        for kind, name in (("final", "engine core"), ("delta", "core and readers")):
            before = measure_python()
            windows = await measure(engine, rows, steps, kind)
            turn = (before + measure_python()) / 2
            best, median = windows[0] * 1e6, windows[len(windows) // 2] * 1e6
            print(
                f"{name:<18} {median:6.0f} us of Python a step of {rows} rows, {best:.0f} us in the best window",
                end="",
            )
            print(f"   (a loop turn took {turn:.0f} ns)")
        by_clock, by_cpu = await measure_rate(engine, rows, steps)
        print(f"{'offline':<18} {by_clock:6.0f} tok/s, {by_cpu:.0f} tokens a second of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a pass; half of them are counted")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a mock step")
    args = parser.parse_args()
    asyncio.run(run(args.rows, args.steps, args.step_ms))


if __name__ == "__main__":
    main()
