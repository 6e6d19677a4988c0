"""Which tests share a worker under `pytest -n`, and how many threads each worker's torch takes."""

from __future__ import annotations

import os

import pytest

# The workers share the cores. Set before torch is imported; servers that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# One worker keeps the servers and the browser of these; they come first, because they wait most.
BROWSER = "tests/browser/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker, so that each of its fixtures is made once."""
    items.sort(key=lambda item: not item.nodeid.startswith(BROWSER))
    for item in items:
        file = item.nodeid.split("::")[0]
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("browser" if file.startswith(BROWSER) else file))
