"""By hand: the simulator against the real CPU engine at several loads, with the step times that the engine had.

On a machine that other programs use, the times of one minute do not predict those of the next.

python -m tests.engine.cluster.simulator_accuracy --rates 1,2,3
"""

import argparse
import asyncio
import time
from random import Random
from statistics import mean, median

from engine import Engine, EngineConfig, SamplingParams, SimulatedRequest, Simulator, StepTable
from engine.cluster import core_host
from engine.cluster.measure_steps import RecordingWorker
from engine.core.actor_messages import StepDone, StepPlan
from engine.worker.device_link import PendingStep

IDLE_S = 0.03


def make_trace(rate: float, seconds: float, seed: int, vocab_size: int) -> list[SimulatedRequest]:
    rng, requests, now = Random(seed), [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(64, 320))]
        requests.append(SimulatedRequest(now, prompt, rng.randint(16, 80)))
    return requests


async def run_real(config: EngineConfig, trace: list[SimulatedRequest]) -> tuple[float, float]:
    """Return mean TTFT and mean ITL in seconds."""
    ttfts: list[float] = []
    itls: list[float] = []

    async def read(engine: Engine, request: SimulatedRequest, start: float) -> None:
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, output_kind="delta")
        last, num_before = start, 0
        async for output in engine.generate({"prompt_token_ids": request.prompt_token_ids}, params):
            now = time.perf_counter()
            num_new = len(output.outputs[0].token_ids)
            if num_before:
                itls.extend([(now - last) / num_new] * num_new)
            elif num_new:
                ttfts.append(now - start)
            num_before, last = num_before + num_new, now

    async with Engine(config) as engine:
        await run_wave(engine)
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for request in trace:
                await asyncio.sleep(max(0.0, begin + request.arrival_s - time.perf_counter()))
                tasks.create_task(read(engine, request, time.perf_counter()))
    return mean(ttfts), mean(itls)


async def run_wave(engine: Engine) -> None:
    """Let the native ops arrive, and warm up."""
    while engine.describe_runtime().get("native_ops") == "being built":
        await asyncio.sleep(0.1)
    for _ in range(3):
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, params):
            pass
        await asyncio.sleep(0.3)


class Recorder(RecordingWorker):
    """Records the steps of a served engine; after a longer pause it had no work."""

    def execute(self, plan: StepPlan) -> StepDone | PendingStep | None:
        self.has_idled = time.perf_counter() - self._last_end > IDLE_S
        return super().execute(plan)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = EngineConfig(
        skip_tokenizer_init=True, num_threads=1, max_num_seqs=32, max_num_batched_tokens=256, num_blocks=2048,
        max_model_len=512,
    )  # fmt: skip
    rates = [float(rate) for rate in arguments.rates.split(",")]
    ratios: dict[float, list[tuple[float, float]]] = {rate: [] for rate in rates}
    workers: list[Recorder] = []
    core_host.Worker = lambda config, _: workers.append(Recorder(config)) or workers[-1]  # type: ignore[assignment, misc]
    for number in range(arguments.rounds):
        workers.clear()
        traces = {rate: make_trace(rate, arguments.seconds, number, 1000) for rate in rates}
        real = {rate: await run_real(config, trace) for rate, trace in traces.items()}
        for rate, worker in zip(rates, workers, strict=True):
            found = simulate(config, StepTable.fit(worker.sizes, worker.seconds), traces[rate])
            ratios[rate].append((found[0] / real[rate][0], found[1] / real[rate][1]))
            shown = "; ".join(f"TTFT {a * 1e3:.1f} ITL {b * 1e3:.2f} ms" for a, b in (real[rate], found))
            print(f"{rate:g}/s real, simulated: {shown}", flush=True)
    for rate, pairs in ratios.items():
        ttft, itl = (median(values) for values in zip(*pairs, strict=True))
        print(f"{rate:g}/s: simulated over real, median: TTFT {ttft:.3f}, ITL {itl:.3f}")


def simulate(config: EngineConfig, table: StepTable, trace: list[SimulatedRequest]) -> tuple[float, float]:
    result = Simulator(config, table, 1).run(trace)
    return float(result.ttfts.mean()), float(result.itls.mean())


if __name__ == "__main__":
    asyncio.run(main())
