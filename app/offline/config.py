"""ExecutorConfig: the flags of offline verbs for a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.config import UsageError, setting


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """Location and number of the engines of an offline job.

    Raises:
        UsageError: a value outside its range.
    """

    executor: Literal["local", "ray"] = setting(
        "local",
        "ray: engines on the cluster of RAY_ADDRESS; the input is one Parquet, JSONL or CSV table, the "
        "output a folder of parts; both may be URLs (s3://...). The same command continues a stopped run",
    )
    num_actors: int = setting(0, "engines with --executor ray; 0: one per GPU, or else per node")
    part_rows: int = setting(64, "rows of a part of the output, with --executor ray")

    def __post_init__(self) -> None:
        for name, low, high in (("num_actors", 0, 4096), ("part_rows", 1, 10**6)):
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{name}={getattr(self, name)} must be from {low} to {high}")
