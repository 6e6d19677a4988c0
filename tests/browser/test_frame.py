"""The page in a frame of another site, for which the browser stores nothing, as it is shown in a Space."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import FLAGS, FRAMER
from tests.browser.site import PATIENCE_S
from tests.browser.test_extract_page import INVOICE

BLOCKED = {"profile": {"cookie_controls_mode": 1}}  # third-party cookies, and their storage where it is not partitioned
# The browser does not know that the page around the frame, which the test makes up, is on this machine.
FEATURES = "--disable-features=LocalNetworkAccessChecks,ThirdPartyStoragePartitioning"


@pytest.fixture
def frame(chromium: Any, base_url: str, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "Default").mkdir()
    (tmp_path / "Default" / "Preferences").write_text(json.dumps(BLOCKED))
    launch = chromium.browser_type.launch_persistent_context
    with launch(tmp_path, executable_path=chromium.path, args=[*FLAGS, FEATURES]) as context:
        body = f"<iframe src='{base_url}' style='width: 1200px; height: 3000px'></iframe>"
        context.route(f"{FRAMER}/", lambda route: route.fulfill(body=body, content_type="text/html"))
        context.set_default_timeout(PATIENCE_S * 1000)
        page = context.new_page()
        page.goto(FRAMER)
        yield page.frame_locator("iframe")


def test_a_frame_without_storage_works_and_says_what_is_not_kept(frame: Any, tmp_path: Path) -> None:
    lost = "chats, records, batches and settings are gone when it is closed"
    frame.locator(".toast-body", has_text=lost).wait_for()
    stored = frame.locator("body").evaluate("() => { try { return `${localStorage}`; } catch { return 'denied'; } }")
    assert stored == "denied"
    vendor = frame.locator("#extract").get_by_role("textbox", name="vendor")
    vendor.fill("Northwind & Sons")
    vendor.press("Tab")
    frame.locator("#extract").get_by_text("typed by you").wait_for()
    frame.locator("#recent option", has_text="corrected").wait_for(state="attached")
    frame.get_by_role("button", name="Edit, or describe").click()
    frame.get_by_role("button", name="Save schema").click()
    frame.get_by_text("the schema is gone when the page is closed").wait_for()
    (tmp_path / "invoice.txt").write_text(INVOICE)
    frame.get_by_role("tab", name="Batch").click()
    frame.locator("#batch-files input[type=file]").set_input_files(tmp_path / "invoice.txt")
    frame.get_by_role("button", name="Run all").click()
    frame.locator("#batch-records [data-row='0']").click()
    frame.locator("#batch-review").get_by_role("textbox", name="vendor").wait_for()
    frame.get_by_role("tab", name="Chat", exact=True).click()
    frame.locator("#composer textarea").fill("What can you do?")
    frame.locator("#composer textarea").press("Enter")
    frame.locator("#chatbot .thought-group").wait_for()
    frame.get_by_role("button", name="Chats", exact=True).click()
    frame.locator(".chats .open", has_text="What can you do?").wait_for()
    frame.locator(".chats .where", has_text=lost).wait_for()
