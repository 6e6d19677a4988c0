"""The page fits: on a phone nothing reaches beyond the edge, on a desk the chat fills the window."""

from pathlib import Path
from typing import Any

import pytest

from tests.browser.site import Site
from tests.browser.test_extract_page import INVOICE

MAX_SCREENSHOT_BYTES = 300_000


def test_nothing_overflows_on_a_phone(phone: Site) -> None:
    phone.ask("What can you do?")
    phone.figures.wait_for()
    assert phone.find_overflow() == []
    phone.extract(INVOICE)
    phone.page.get_by_text("schema-valid").wait_for(timeout=20_000)
    assert phone.find_overflow() == []
    phone.go_to("API")
    phone.page.get_by_text("Base URL").first.wait_for()
    assert phone.find_overflow() == []


def test_the_settings_open_and_close_on_a_phone(phone: Site) -> None:
    phone.make_answers_endless()
    phone.ask("Count, please.")
    phone.wait_for(lambda: phone.num_running() == 1, 10)
    phone.press_stop()
    phone.figures.wait_for()


def test_the_chat_fills_the_window_and_no_more(site: Site) -> None:
    box = site.page.locator("#composer").bounding_box()
    assert 740 < box["y"] + box["height"] <= 800
    assert site.page.evaluate("document.documentElement.scrollHeight") <= 800


def test_the_strip_is_live(site: Site) -> None:
    strip = site.page.locator(".strip")
    assert "demo_model" in strip.inner_text() and "ready" in strip.inner_text()
    site.ask("Hello!")
    site.wait_for(
        lambda: not strip.inner_text().endswith("\n0 tok/s") and " 0 tok/s" not in strip.inner_text(), 5
    )


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """Where the screenshots go; asked for before a page is opened."""
    given = request.config.getoption("--screenshots", default=None)
    if given is None:
        pytest.skip("only with --screenshots DIR")
    return Path(given)


def test_screenshots_for_the_readme(folder: Path, site: Site) -> None:
    for turn, question in enumerate(["Hello! Who are you?", "What can you do?"]):
        site.ask(question)
        site.figures.nth(turn).wait_for()
    save(site, folder / "chat.png")
    site.extract(INVOICE)
    site.page.get_by_text("schema-valid").wait_for(timeout=20_000)
    save(site, folder / "extract.png")


def save(site: Any, path: Path) -> None:
    # The strip is polled: let it come to rest, and the pointer leave what it pressed.
    site.page.mouse.move(640, 780)
    site.wait_for(lambda: "ready" in site.page.locator(".strip").inner_text(), 5)
    site.page.screenshot(path=path)
    assert path.stat().st_size < MAX_SCREENSHOT_BYTES
