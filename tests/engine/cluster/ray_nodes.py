"""By hand: two local Ray nodes, one of which is killed under 50 streams.

python -m tests.engine.cluster.ray_nodes
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.cluster_utils import Cluster

from engine import Engine, EngineConfig, SamplingParams

NUM_STREAMS = 50


async def generate(engine: Engine, on_token: Callable[[], object] = lambda: None) -> list[str]:
    async def read(number: int) -> str:
        params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=1.0, seed=number, output_kind="delta")
        text = ""
        async for output in engine.generate(f"Invoice {number}: ", params):
            text += output.outputs[0].text
            on_token()
        return text

    return await asyncio.gather(*(read(number) for number in range(NUM_STREAMS)))


async def serve(cluster: Cluster, second: Any) -> None:
    settings = {"num_threads": 1, "enable_native_ops": False}
    async with Engine(EngineConfig(**settings)) as engine:
        expected = await generate(engine)
    start = time.monotonic()
    config = EngineConfig(**settings, data_parallel_size=2, data_parallel_backend="ray")
    async with Engine(config) as engine:
        print(f"both replicas are ready after {time.monotonic() - start:.1f} s")
        num_tokens, killed = 0, []

        def count() -> None:
            nonlocal num_tokens
            num_tokens += 1
            if num_tokens == NUM_STREAMS * 20:
                killed.append(asyncio.get_running_loop().run_in_executor(None, cluster.remove_node, second, False))

        texts = await generate(engine, count)
        await asyncio.gather(*killed)
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        stats = engine.stats()
        print(
            f"{same} of {NUM_STREAMS} texts equal; resumed {stats.num_resumed}, inexact {stats.num_resumed_inexact}"
        )
        print([(each.index, each.state, each.num_restarts) for each in engine.describe_replicas()])
    assert same == NUM_STREAMS


def main() -> None:
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    second = cluster.add_node(num_cpus=2)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        asyncio.run(serve(cluster, second))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
