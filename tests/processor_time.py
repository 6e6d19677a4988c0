"""ProcessorTime: the processor time of each test file, with all processes that its tests start; printed after a run.

A file's time begins where the worker's last file ended, so it includes the fixtures that its first test sets up. Time
before the first test, which is imports and collection, has a line of its own.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NUM_SHOWN = 10
START = "imports and collection"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def measure_tree(pid: int) -> float:
    """Processor seconds of a process, of the children it has waited for, and of those that run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile, or this is not Linux
        return 0.0
    own = sum(map(int, fields[11:15])) / TICKS_PER_S
    return own + sum(measure_tree(int(child)) for pids in children for child in pids)


class ProcessorTime:
    """Registered in each worker, which reports to the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: Counter[str] = Counter()
        self._at = 0.0

    def _note(self, name: str) -> None:
        now = measure_tree(os.getpid())
        self.seconds[name] += max(now - self._at, 0.0)
        self._at = now

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Note a file's time before its last teardown: a browser that ends takes the time of its processes along."""
        if nextitem is None or nextitem.path != item.path:
            self._note(self._name(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if not self.seconds:
            self._note(START)
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._note(self._name(item))
        return result

    def _name(self, item: pytest.Item) -> str:
        return item.path.relative_to(self.config.rootpath).as_posix()

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["processor_time"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("processor_time", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        folders: Counter[str] = Counter()
        for name, seconds in self.seconds.items():
            folders["/".join(name.split("/")[:2])] += seconds
        terminalreporter.section(f"processor time: {sum(self.seconds.values()):.0f} s")
        for name, seconds in [*folders.most_common(), *self.seconds.most_common(NUM_SHOWN)]:
            terminalreporter.write_line(f"{seconds:8.1f} s  {name}")
