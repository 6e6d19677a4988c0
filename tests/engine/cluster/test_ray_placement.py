"""Ray as the one who starts replicas: what it is asked for. The real one: tests.engine.cluster.ray_nodes, by hand."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine import ConfigError, Engine, EngineConfig
from engine.cluster.placement import place_cores
from engine.cluster.ray_placement import HeadlessActor, RayPlacement

KEY = "a key of all nodes"


class FakeRay:
    """Notes the actors that are created, and starts none."""

    def __init__(self, **resources: float) -> None:
        self.resources = resources
        self.options: list[dict[str, Any]] = []
        self.configs: list[EngineConfig] = []
        self.killed: list[Any] = []
        self.is_up = False

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **options: Any) -> None:
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def remote(self, actor_class: type) -> Any:
        assert actor_class is HeadlessActor
        return SimpleNamespace(options=self._make_options)

    def _make_options(self, **options: Any) -> Any:
        self.options.append(options)
        run = SimpleNamespace(remote=self.configs.append)
        return SimpleNamespace(remote=lambda: SimpleNamespace(run=run))

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


async def place(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, **settings: Any) -> int:
    """Start and close what places the actors of a config. Returns the port on which the front listened."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    placement = place_cores(EngineConfig(**settings)).listener
    assert isinstance(placement, RayPlacement)
    await placement.start()
    port = 0 if placement._listener is None else placement._listener.port
    placement.close()
    assert len(ray.killed) == len(ray.configs) and not ray.is_up
    return port


@pytest.mark.parametrize("tensor_parallel_size", [1, 4])
async def test_each_replica_becomes_an_actor_that_ray_starts_again(
    monkeypatch: pytest.MonkeyPatch, tensor_parallel_size: int
) -> None:
    ray = FakeRay(CPU=8.0, GPU=16.0)
    settings = {"data_parallel_size": 3, "data_parallel_backend": "ray", "num_threads": 2}
    port = await place(monkeypatch, ray, **settings, tensor_parallel_size=tensor_parallel_size)
    assert [config.data_parallel_rank for config in ray.configs] == [0, 1, 2]
    assert all(config.data_parallel_rpc_port == port > 0 for config in ray.configs)
    assert {config.data_parallel_backend for config in ray.configs} == {"mp"}
    assert len({config.data_parallel_key for config in ray.configs}) == 1
    (options,) = ray.options
    assert (options["max_restarts"], options["num_cpus"]) == (-1, max(2, tensor_parallel_size))
    assert options["num_gpus"] == tensor_parallel_size


async def test_each_other_node_of_a_model_becomes_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(CPU=8.0, GPU=8.0)
    settings = {"tensor_parallel_size": 8, "nnodes": 4, "distributed_executor_backend": "ray"}
    await place(monkeypatch, ray, **settings, data_parallel_key=KEY)
    assert [config.node_rank for config in ray.configs] == [1, 2, 3]
    assert {config.distributed_executor_backend for config in ray.configs} == {"mp"}
    (options,) = ray.options
    assert (options["num_cpus"], options["num_gpus"]) == (2, 2)


async def test_a_missing_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(data_parallel_backend="ray", mock_step_ms=0.0))
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r"data_parallel_backend=ray needs Ray: pip install ray"):
        await engine.start()
    await engine.close()


def test_settings_that_contradict_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size_local"):
        EngineConfig(data_parallel_backend="ray", data_parallel_size_local=1)
    with pytest.raises(ConfigError, match="distributed_executor_backend=ray needs nnodes above 1"):
        EngineConfig(distributed_executor_backend="ray")
