"""By hand: two local Ray nodes. One is killed under 50 streams, and half-way through an extraction of 2,000 rows.

python -m tests.engine.cluster.ray_nodes serve
python -m tests.engine.cluster.ray_nodes extract 2000
"""

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from pyarrow import parquet
from ray.cluster_utils import Cluster

from app.cli.main import main as main_of_app
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


def extract(cluster: Cluster, second: Any, num_rows: int) -> None:
    """Remove the second node when half of the parts are there; every row has one record in the end."""
    folder = Path(tempfile.mkdtemp())
    ids = [f"row-{number:05}" for number in range(num_rows)]
    texts = [f"Order {number} of {number % 9 + 1} chairs" for number in range(num_rows)]
    parquet.write_table(pa.table({"id": ids, "text": texts}), folder / "in.parquet", row_group_size=100)
    schema = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 9}}, "required": ["count"]}
    (folder / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    out = folder / "out"
    num_parts = -(-num_rows // 50)

    def kill_node() -> None:
        while len(list(out.glob("part-*.parquet"))) < num_parts // 2:
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)
        print("a node was removed", flush=True)

    killer = threading.Thread(target=kill_node)
    killer.start()
    command = [
        *("extract", "--executor", "ray", "--schema", str(folder / "schema.json"), str(folder / "in.parquet")),
        *("-o", out.as_uri(), "--part-rows", "50", "--num-threads", "1", "--no-enable-native-ops"),
    ]
    start = time.monotonic()
    print("exit code", main_of_app(command), f"after {time.monotonic() - start:.0f} s")
    killer.join()
    rows = [row for part in sorted(out.glob("part-*.parquet")) for row in parquet.read_table(part).to_pylist()]
    found = [json.loads(row["row"])["id"] for row in rows]
    num_valid = sum(row["valid"] for row in rows)
    print(f"{len(found)} records of {num_rows} rows, {len(set(found))} different, {num_valid} valid")
    assert found == ids
    start = time.monotonic()
    print("again: exit code", main_of_app(command), f"after {time.monotonic() - start:.0f} s")


def main() -> None:
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    second = cluster.add_node(num_cpus=2)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        if sys.argv[1] == "serve":
            asyncio.run(serve(cluster, second))
        else:
            extract(cluster, second, int(sys.argv[2]))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
