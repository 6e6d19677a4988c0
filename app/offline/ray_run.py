"""run_on_ray: assigns the parts of a table to actors, each with an engine, and reassigns those of lost actors."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from app.config import ExecutorConfig, Failure, UsageError, make_config
from app.offline.jobs import Job, Row
from app.offline.tables import PartFolder, find_format, iterate_rows, split_rows
from engine import LLM, ConfigError, EngineConfig, connect_ray, import_ray

logger = logging.getLogger("troupe.offline")

MAX_TRIES = 3  # a part that ended three actors is the cause


class PartActor:
    """An engine in a process of Ray."""

    def __init__(self, config: EngineConfig, job: Job, folder: PartFolder) -> None:
        self._llm = LLM(**{name: getattr(config, name) for name in config.__dataclass_fields__})
        self._job = job
        self._folder = folder

    def ping(self) -> None:
        """Return when the engine is ready."""

    def work(self, number: int, rows: list[Row], first: int) -> int:
        """Answer the rows and write their part. Returns how many failed."""
        records = self._llm.run(lambda engine: self._job.answer(engine, rows, first))
        self._folder.write(number, records)
        return sum(self._job.is_failed(record) for record in records)


def run_on_ray(job: Job, path: str, out: str, file_format: str | None, given: Mapping[str, Any]) -> int:
    """Answer the rows of a table whose parts are not in the folder yet. Returns how many failed in this run.

    Args:
        path, out: file or folder to read, and folder to write.
        file_format: of the parts; None: that of the table.

    Raises:
        UsageError: a path or a setting cannot be used.
        Failure: the engines cannot run, or a part ends them; the parts that are complete stay.
    """
    config, executor = make_config(EngineConfig, given), make_config(ExecutorConfig, given)
    table_format = find_format("IN", path)
    folder = PartFolder(out, file_format or table_format)
    done = folder.open(job.describe() | {"input": path, "part_rows": executor.part_rows})
    try:
        ray = import_ray("--executor ray")
        connect_ray(ray)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    parts = split_rows(iterate_rows(ray, path, table_format), executor.part_rows)
    with tqdm(unit="row", file=sys.stderr, initial=len(done) * executor.part_rows) as bar:
        left = (part for part in parts if part[0] not in done)
        return Pool(ray, config, executor, job, folder).run(left, bar)


class Pool:
    """The actors, and the parts that they work on."""

    def __init__(self, ray: Any, config: EngineConfig, executor: ExecutorConfig, job: Job, folder: PartFolder) -> None:
        self._ray = ray
        self._part_rows = executor.part_rows
        num_gpus = int(ray.cluster_resources().get("GPU", 0)) if config.device != "cpu" else 0
        num_nodes = sum(node["Alive"] for node in ray.nodes())
        # Request no CPUs, or the tasks that read the table would wait forever.
        options = {"num_cpus": 0, "num_gpus": int(num_gpus > 0), "max_restarts": -1}
        actor_class = ray.remote(PartActor).options(scheduling_strategy="SPREAD", **options)
        count = executor.num_actors or num_gpus or num_nodes
        actors = [actor_class.remote(config, job, folder) for _ in range(count)]
        self._idle: deque[Any] = deque()
        self._pings = {self._ping(actor): actor for actor in actors}
        self._running: dict[Any, tuple[Any, int, list[Row], int]] = {}  # answer -> actor, part, rows, tries
        self._again: deque[tuple[int, list[Row], int]] = deque()
        self._is_exhausted = False  # the input

    def run(self, parts: Iterator[tuple[int, list[Row]]], bar: tqdm) -> int:  # type: ignore[type-arg]
        """Give every part to an actor until it is written."""
        num_failed = 0
        while True:
            while self._idle and (part := self._next(parts)) is not None:
                self._give(*part)
            if self._is_exhausted and not self._again and not self._running:
                return num_failed
            for answer in self._ray.wait([*self._running, *self._pings], num_returns=1)[0]:
                if answer in self._pings:
                    self._take_ping(answer)
                else:
                    num_failed += self._take(answer, bar)

    def _next(self, parts: Iterator[tuple[int, list[Row]]]) -> tuple[int, list[Row], int] | None:
        """Return the next part and how often it was tried; None if all have been given."""
        if self._again:
            return self._again.popleft()
        number, rows = (-1, []) if self._is_exhausted else next(parts, (-1, []))
        self._is_exhausted = number < 0
        return None if self._is_exhausted else (number, rows, 0)

    def _give(self, number: int, rows: list[Row], tries: int) -> None:
        actor = self._idle.popleft()
        answer = actor.work.remote(number, rows, number * self._part_rows + 1)
        self._running[answer] = (actor, number, rows, tries + 1)

    def _take(self, answer: Any, bar: tqdm) -> int:  # type: ignore[type-arg]
        """Take the answer of an actor. If it has ended, its part is given to another one."""
        actor, number, rows, tries = self._running.pop(answer)
        try:
            num_failed = int(self._ray.get(answer))
        except self._ray.exceptions.RayActorError as error:
            logger.warning("an actor ended: %s", str(error).split("\n", 1)[0])
            if tries == MAX_TRIES:
                raise Failure(f"{tries} actors ended while they answered part {number}") from error
            self._again.append((number, rows, tries))
            self._pings[self._ping(actor)] = actor
            return 0
        except self._ray.exceptions.RayTaskError as error:
            raise Failure(f"part {number}: {error.cause}; run it again to continue") from error
        bar.update(len(rows))
        self._idle.append(actor)
        return num_failed

    def _ping(self, actor: Any) -> Any:
        """Ask whether an actor is ready; while Ray starts it again, the call waits."""
        return actor.ping.options(max_task_retries=-1).remote()

    def _take_ping(self, answer: Any) -> None:
        actor = self._pings.pop(answer)
        try:
            self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            raise Failure(f"an engine could not start: {str(error).strip().splitlines()[-1]}") from error
        self._idle.append(actor)
