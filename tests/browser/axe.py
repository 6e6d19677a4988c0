"""axe-core, where a machine has it: the accessibility checker is looked for, never fetched."""

import os
from pathlib import Path
from typing import Any

import pytest

# Folders that npm and distributions use; AXE_CORE names the file itself.
PLACES = (
    Path.cwd() / "node_modules/axe-core/axe.min.js",
    Path.home() / "node_modules/axe-core/axe.min.js",
    Path("/usr/lib/node_modules/axe-core/axe.min.js"),
    Path("/usr/local/lib/node_modules/axe-core/axe.min.js"),
    Path("/usr/share/nodejs/axe-core/axe.min.js"),
)


def find_axe() -> Path | None:
    """The script, None where it is not installed."""
    given = os.environ.get("AXE_CORE")
    places = [Path(given)] if given else list(PLACES)
    return next((place for place in places if place.is_file()), None)


def list_violations(page: Any) -> list[str]:
    """What axe finds wrong on the page as it is, one line each; skips where there is no axe."""
    script = find_axe()
    if script is None:
        pytest.skip("axe-core is not installed (npm install axe-core, or AXE_CORE=path of axe.min.js)")
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]
