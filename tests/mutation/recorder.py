"""A pytest plugin that records which test executes which line of the mutated files, and how long each test takes.

Loaded by `python -m tests.mutation map`; the files it writes are named by the process, so that workers can share.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

FOLDER = Path(os.environ["MUTATION_FOLDER"])

durations: dict[str, float] = defaultdict(float)
failed: set[str] = set()
recorder = coverage.Coverage(
    data_file=str(FOLDER / "coverage"),
    data_suffix=True,
    include=json.loads(os.environ["MUTATION_FILES"]),
    config_file=False,
    messages=False,
)
# The xdist controller runs no test.
if "PYTEST_XDIST_WORKER" in os.environ:
    recorder.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    recorder.switch_context(item.nodeid)
    yield
    recorder.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    durations[report.nodeid] += report.duration
    if not report.passed:
        failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    if recorder._started:
        recorder.stop()
        recorder.save()
    outcome = {"durations": durations, "failed": sorted(failed)}
    (FOLDER / f"tests-{os.getpid()}.json").write_text(json.dumps(outcome), encoding="utf-8")
