"""Which CUDA devices the core processes and their ranks see. Devices are faked by the environment."""

from typing import Any

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.cluster.placement import place_processes
from engine.parallel.commands import Start
from engine.parallel.ranks import _choose_device
from engine.resolved_config import WorkerConfig


def list_seen(monkeypatch: pytest.MonkeyPatch, given: str | None, num_devices: int, **sizes: int) -> list[list[str]]:
    """Return the devices of the ranks of each replica."""
    config, found = EngineConfig(**sizes), []  # type: ignore[arg-type]
    worker = WorkerConfig("", "auto", "bfloat16", "cuda", 1, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    for connector in place_processes(config, num_devices):
        with monkeypatch.context() as core:
            assert connector._cuda_devices
            seen = connector._cuda_devices.split(",")
            core.setenv("CUDA_VISIBLE_DEVICES", connector._cuda_devices)
            core.setattr(torch.cuda, "device_count", lambda seen=seen: len(seen))
            starts = [
                Start(config, worker, stage, rank, None, 0)
                for stage in range(config.pipeline_parallel_size)
                for rank in range(config.tensor_parallel_size)
            ]
            found.append([_choose_device(start)["CUDA_VISIBLE_DEVICES"] for start in starts])
    return found


@pytest.mark.parametrize(
    ("given", "num_devices", "sizes", "expected"),
    [
        (None, 1, {}, [["0"]]),
        (None, 2, {"tensor_parallel_size": 2}, [["0", "1"]]),
        ("4,7", 2, {"pipeline_parallel_size": 2}, [["4", "7"]]),
        (None, 4, {"data_parallel_size": 2, "tensor_parallel_size": 2}, [["0", "1"], ["2", "3"]]),
        ("GPU-a,GPU-b", 2, {"data_parallel_size": 2}, [["GPU-a"], ["GPU-b"]]),
        (None, 1, {"data_parallel_size": 2}, [["0"], ["0"]]),
    ],
)
def test_every_rank_sees_its_own_device(
    monkeypatch: pytest.MonkeyPatch, given: str | None, num_devices: int, sizes: Any, expected: list[list[str]]
) -> None:
    assert list_seen(monkeypatch, given, num_devices, **sizes) == expected


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="need 4 CUDA devices on each machine, and 2 are visible"):
        list_seen(monkeypatch, None, 2, tensor_parallel_size=4)
