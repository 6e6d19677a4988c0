"""axe-core, the accessibility checker, from the package axe-playwright-python."""

from importlib.resources import files
from typing import Any

# A color half-way through its transition is nobody's choice.
FINISH = """document.getAnimations()
    .filter(each => each.effect.getComputedTiming().endTime < Infinity).forEach(each => each.finish())"""
SCRIPT = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def list_violations(page: Any) -> list[str]:
    """What axe finds wrong on the page as it is, one line each."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(SCRIPT)
    page.evaluate(FINISH)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]
