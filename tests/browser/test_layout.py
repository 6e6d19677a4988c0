"""The page fits: on a phone nothing reaches beyond the edge, on a desk the chat fills the window."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.browser.site import Site
from tests.browser.test_access import TABS
from tests.browser.test_errors import occupy
from tests.browser.test_extract_page import INVOICE

SAMPLES = sorted((Path(__file__).resolve().parents[2] / "assets" / "samples").glob("event_*.txt"))
MAX_SCREENSHOT_BYTES = 300_000
SHOWN_MS = 12_000  # of work in the picture of the observatory


def test_on_a_phone_nothing_overflows_and_the_buttons_of_the_panels_cover_nothing_and_work(phone: Site) -> None:
    phone.ask("What can you do?")
    phone.figures.wait_for()
    assert phone.find_overflow() == []
    assert phone.page.locator(".strip .model").evaluate("(name) => name.scrollWidth <= name.clientWidth")
    phone.extract(INVOICE)
    phone.page.get_by_role("textbox", name="vendor").wait_for()
    assert phone.find_overflow() == []
    # Nothing lies over the record when one looks at it.
    record = phone.page.locator("#extract .record-side")
    phone.wait_for(lambda: record.evaluate("(node) => node.scrollIntoView() ?? node.getBoundingClientRect().top < 40"))
    phone.wait_for(lambda: phone.page.locator("#run").evaluate("(node) => node.getBoundingClientRect().bottom < 0"))
    for tab, words in TABS.items():
        phone.go_to(tab)
        phone.page.get_by_text(words).first.wait_for()
        assert phone.find_overflow() == [], tab
    phone.go_to("Chat")
    state = phone.page.locator(".strip .state").bounding_box()
    for name in ("Chats", "Settings"):
        button = phone.page.get_by_role("button", name=name, exact=True).bounding_box()
        assert button["x"] > state["x"] + state["width"] or button["y"] > state["y"] + state["height"], name
    phone.toggle("Chats")
    phone.page.get_by_role("button", name="Close").or_(phone.page.get_by_role("button", name="Chats")).first.wait_for()
    phone.toggle("Chats")
    phone.make_answers_endless()
    phone.ask("Count, please.")
    phone.wait_for(lambda: phone.num_running() == 1)
    phone.press_stop()
    phone.figures.nth(1).wait_for()


def test_a_wide_screen_is_filled_and_has_the_list_of_chats_until_it_is_closed(unopened: Site) -> None:
    site = unopened
    site.resize(1280, 800)
    site.open()
    site.page.get_by_role("button", name="New chat").wait_for()
    assert site.find_overflow() == []
    chats = site.page.get_by_role("button", name="Chats", exact=True)
    site.wait_for(lambda: chats.get_attribute("aria-expanded") == "true")
    box, strip = site.page.locator("#composer").bounding_box(), site.page.locator(".strip")
    assert 740 < box["y"] + box["height"] <= 800
    assert site.page.evaluate("document.documentElement.scrollHeight") <= 800
    site.wait_for(lambda: "demo_model" in strip.inner_text() and "ready" in strip.inner_text())
    site.ask("Hello!")
    site.wait_for(lambda: not strip.inner_text().endswith("\n0 tok/s") and " 0 tok/s" not in strip.inner_text())
    site.figures.wait_for()
    site.toggle("Chats")
    site.reload()
    site.composer.wait_for()
    site.page.wait_for_timeout(3500)  # longer than the page tries to open it
    assert chats.get_attribute("aria-expanded") == "false"
    site.toggle("Chats")
    site.toggle("Settings")
    site.go_to("Engine")
    # No room is kept for panels that are not shown.
    tabs = site.page.locator("#tabs")
    site.wait_for(lambda: tabs.bounding_box()["x"] < 40 and tabs.bounding_box()["width"] > 1200)
    site.resize(1300, 800)
    site.go_to("Chat")
    # Each panel stands beside the chat, also after a change of the window's width while they were away.
    site.composer.wait_for()
    left, right = (site.page.locator(panel).bounding_box() for panel in ("#chats", "#settings"))
    site.wait_for(lambda: 0 < tabs.bounding_box()["x"] - left["x"] - left["width"] < 40)
    site.wait_for(lambda: 0 < right["x"] - tabs.bounding_box()["x"] - tabs.bounding_box()["width"] < 40)
    site.toggle("Settings")
    site.resize(720, 800)
    site.wait_for(lambda: chats.get_attribute("aria-expanded") == "false")
    site.go_to("Extract")
    source, record = (site.page.locator(f"#extract {part}") for part in ("#source-tabs", ".record-side"))
    site.wait_for(lambda: record.bounding_box()["width"] > 600)
    assert record.bounding_box()["y"] > source.bounding_box()["y"]
    site.go_to("Engine")

    def count_columns() -> list[int]:
        tops = site.page.locator(".tile").evaluate_all("(tiles) => tiles.map((tile) => tile.offsetTop)")
        return [tops.count(top) for top in sorted(set(tops))]

    for width, num_columns in ((1280, 8), (1024, 4), (720, 4), (390, 2)):  # no row of tiles is shorter than another
        site.resize(width, 800)
        site.wait_for(lambda count=num_columns: count_columns() == [count] * (8 // count))


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """Where the screenshots go; asked for before a page is opened."""
    given = request.config.getoption("--screenshots", default=None)
    if given is None:
        pytest.skip("only with --screenshots DIR")
    return Path(given)


def test_screenshots_for_the_readme(folder: Path, site: Site) -> None:
    site.extract(INVOICE)
    site.page.get_by_role("textbox", name="vendor").click()
    site.page.locator(".why").wait_for()
    save(site, folder / "extract.png")
    site.go_to("Batch")
    site.page.locator("#batch-files input[type=file]").set_input_files(SAMPLES)
    site.page.get_by_label("Schema of a record").click()
    site.page.get_by_role("option", name="event", exact=True).click()
    site.page.get_by_role("button", name="Run all").click()
    site.page.get_by_text("done in").wait_for()
    site.page.locator("[data-row='0']").click()
    site.page.get_by_text("of 2 · row 1").wait_for()
    save(site, folder / "batch.png")
    site.go_to("Engine")
    site.page.get_by_role("img", name="blocks owned").wait_for()
    is_over = threading.Event()
    lengths = (150, 300, 500, 700, 900, 1200)
    crowd = [threading.Thread(target=occupy, args=(site.base_url, is_over, length)) for length in lengths]
    try:
        for each in crowd:
            each.start()
        site.wait_for(lambda: site.num_running() > 2)
        site.page.wait_for_timeout(SHOWN_MS)
        site.page.locator("#observatory").scroll_into_view_if_needed()
        save(site, folder / "observatory.png", is_busy=True)
    finally:
        is_over.set()
        for each in crowd:
            each.join()


def save(site: Any, path: Path, is_busy: bool = False) -> None:
    site.page.evaluate("window.scrollTo(0, 0)")
    # The strip is polled: let it come to rest.
    site.wait_for(lambda: is_busy or "ready" in site.page.locator(".strip").inner_text())
    site.page.screenshot(path=path)
    assert path.stat().st_size < MAX_SCREENSHOT_BYTES
