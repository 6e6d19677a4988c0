"""Which tests share a worker under `pytest -n`, and how many threads each worker's torch takes."""

from __future__ import annotations

import os

import pytest

# The workers share the cores. Set before torch is imported; servers that tests start inherit it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker, so that its fixtures are made once; start with those that wait most."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/browser/"))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
