"""WaitingRequests: how the request that makes cores crash is found. Replicas are names, and requests are numbers."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.front.router import Router
from engine.front.waiting_requests import WaitingRequests


class Cores:
    """Replicas that crash in the step that follows a placement of `bad`."""

    def __init__(self, num_replicas: int, num_requests: int, bad: int) -> None:
        self.replicas = [
            SimpleNamespace(index=index, state="ready", ready=None, max_model_len=9, max_num_seqs=256)
            for index in range(num_replicas)
        ]
        self.running: dict[int, list[Any]] = {each.index: [] for each in self.replicas}
        self.waiting = WaitingRequests(self.replicas, Router("round_robin", 16), self.place)  # type: ignore[arg-type]
        entries = [SimpleNamespace(name=name, group=None, open=True, min_context=5) for name in range(num_requests)]
        self.bad, self.running[0] = entries[bad], entries
        self.num_crashes = self.num_steps = 0
        self.failed: list[int] = []

    def place(self, entry: Any) -> None:
        if ready := self.waiting.list_ready(entry):
            entry.replica = ready[0]
            self.running[ready[0].index].append(entry)
            self.waiting.note_sent(entry)
        else:
            self.waiting.append(entry)

    def step(self) -> None:
        """Each replica computes what it has, or crashes."""
        self.num_steps += 1
        for replica in self.replicas:
            held, self.running[replica.index] = self.running[replica.index], []
            if self.bad not in held:
                for entry in held:
                    self.waiting.acquit(entry)
                continue
            self.num_crashes += 1
            if (guilty := self.waiting.blame(replica, held)) is not None:  # type: ignore[arg-type]
                self.failed.append(guilty.name)
                held.remove(guilty)  # type: ignore[arg-type]
                self.waiting.acquit(guilty)
            self.waiting.put_back(replica, held)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize(
    "num_requests, bad, num_crashes, max_steps",
    [(1, 0, 2, 3), (32, 20, 2, 35), (33, 32, 3, 20), (272, 0, 3, 40), (272, 271, 3, 40), (3000, 1500, 3, 140)],
)
def test_only_the_request_that_crashes_cores_fails(
    num_replicas: int, num_requests: int, bad: int, num_crashes: int, max_steps: int
) -> None:
    """Few requests are tried alone; of many, groups."""
    cores = Cores(num_replicas, num_requests, bad)
    while any(cores.running.values()):
        cores.step()
    assert (cores.failed, cores.num_crashes) == ([bad], num_crashes)
    assert cores.num_steps <= max_steps and not cores.waiting.has_suspects


def test_a_group_whose_replica_is_restarted_runs_again_together() -> None:
    cores = Cores(1, 100, 7)
    cores.step()
    (replica,) = cores.replicas
    group, cores.running[0] = cores.running[0], []
    assert len(group) == 10
    cores.waiting.put_back(replica, group)  # type: ignore[arg-type]
    assert cores.running[0] == group and not cores.failed
