"""What a visitor of a Space sees while a large model comes from the hub: the step, the share, and then the app."""

from pathlib import Path
from typing import Any

from app.startup_app import Loading
from engine import EngineConfig
from tests.browser.axe import list_violations
from tests.fakes import FakeEngine

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
STEPS = [
    {"step": "tokenizer", "seconds": 2.0, "downloaded_bytes": 0, "total_bytes": None},
    {"step": "weights", "seconds": 41.0, "downloaded_bytes": 3_100_000_000, "total_bytes": 8_000_000_000},
    {"step": "page", "seconds": 130.0, "downloaded_bytes": 8_000_000_000, "total_bytes": 8_000_000_000},
]


class StartingHouse:
    """Answers a page as the startup app does during a start; what it tells is set from outside."""

    def __init__(self, page: Any, base_url: str, cache: Path) -> None:
        self.progress: dict[str, Any] | None = STEPS[0]
        config = EngineConfig(model=MODEL)
        self.drawn = Loading(FakeEngine(config=config, state="starting"), cache).draw()
        page.route(f"{base_url}/", self.open_page)
        page.route("**/loading", self.tell)

    def open_page(self, route: Any) -> None:
        if self.progress is None:
            route.continue_()
        else:
            route.fulfill(status=200, content_type="text/html", body=self.drawn)

    def tell(self, route: Any) -> None:
        if self.progress is None:
            route.fulfill(status=404)
        else:
            route.fulfill(json=self.progress)


def test_a_start_is_told_step_by_step_and_opens_the_app(chromium: Any, base_url: str, tmp_path: Path) -> None:
    context = chromium.new_context(**chromium.phone)
    page = context.new_page()
    house = StartingHouse(page, base_url, tmp_path)
    page.goto(f"{base_url}/")
    page.get_by_text("Loading Qwen3-4B-Instruct-2507").wait_for()
    house.progress = STEPS[1]
    page.get_by_text("3.1 GB of 8.0 GB · 41 s").wait_for()
    assert page.get_by_role("progressbar", name="Download").get_attribute("aria-valuenow") == "39"
    assert page.get_by_role("listitem").filter(has_text="weights").get_attribute("aria-current") == "step"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert list_violations(page) == []
    house.progress = STEPS[2]
    page.get_by_text("2 min 10 s").wait_for()
    house.progress = None
    page.get_by_role("tab", name="Extract").wait_for(timeout=90_000)
    context.close()
