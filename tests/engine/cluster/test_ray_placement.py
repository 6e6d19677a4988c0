"""Ray as the one who starts replicas: what it is asked for. The real one: tests.engine.cluster.ray_nodes, by hand."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine import ConfigError, Engine, EngineConfig
from engine.cluster.ray_placement import HeadlessActor, RayListener
from engine.parallel.nodes import NodeActor, place_nodes

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
        assert actor_class in (HeadlessActor, NodeActor)
        return SimpleNamespace(options=self._make_options)

    def _make_options(self, **options: Any) -> Any:
        self.options.append(options)
        run = SimpleNamespace(remote=self.configs.append)
        return SimpleNamespace(remote=lambda: SimpleNamespace(run=run))

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


async def test_each_rank_becomes_an_actor_that_ray_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(CPU=8.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    listener = RayListener(EngineConfig(data_parallel_size=3, data_parallel_backend="ray", num_threads=2))
    await listener.start()
    assert [config.data_parallel_rank for config in ray.configs] == [0, 1, 2]
    assert all(config.data_parallel_rpc_port == listener.port > 0 for config in ray.configs)
    assert len({config.data_parallel_key for config in ray.configs}) == 1
    assert all(
        each["max_restarts"] == -1 and each["num_cpus"] == 2 and not each["num_gpus"] for each in ray.options
    )
    listener.close()
    assert len(ray.killed) == 3 and not ray.is_up


def test_each_other_node_of_a_model_becomes_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(CPU=8.0, GPU=8.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    actors = place_nodes(
        EngineConfig(
            tensor_parallel_size=8, nnodes=4, distributed_executor_backend="ray", data_parallel_key=KEY
        )
    )
    assert [config.node_rank for config in ray.configs] == [1, 2, 3]
    assert {config.distributed_executor_backend for config in ray.configs} == {"mp"}
    assert all((each["num_cpus"], each["num_gpus"]) == (2, 2) for each in ray.options)
    actors.close()
    assert len(ray.killed) == 3 and not ray.is_up


async def test_a_missing_ray_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(EngineConfig(data_parallel_backend="ray", mock_step_ms=0.0))
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r"data_parallel_backend=ray needs Ray: pip install 'ray\[data\]'"):
        await engine.start()
    await engine.close()


def test_settings_that_contradict_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size_local"):
        EngineConfig(data_parallel_backend="ray", data_parallel_size_local=1)
    with pytest.raises(ConfigError, match="distributed_executor_backend=ray needs nnodes above 1"):
        EngineConfig(distributed_executor_backend="ray")
