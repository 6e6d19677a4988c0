"""What grows is sent and drawn alone, whatever stands above it, and many pages grow side by side.

Counted, not timed: a machine that does other work is slow, and that is no fault of the page.
"""

import asyncio
import threading
from typing import Any

import pytest

from tests.browser.site import Site
from tests.measure import ui_load

FIRST, LAST = 5, 25
NUM_PAGES, SECONDS, NUM_UPDATES = 5, 3.0, 10
ANSWER = "Keys and values lie in **blocks** of 16.\n\n- a list item with `code`\n- another\n\n```\nprint(1)\n```\n"
# Counts the frames in which the growing text is another one than before, and what changes in the history meanwhile.
WATCH = """() => {
  window.updates = window.changes = 0;
  let before = -1;
  const look = () => {
    const now = [...document.querySelectorAll("#growing .bot-row .message-content")].at(-1)?.textContent.length ?? -1;
    if (now !== before && now > 0) window.updates++;
    before = now;
    requestAnimationFrame(look);
  };
  look();
  const observer = new MutationObserver((records) => { window.changes += records.length; });
  observer.observe(document.querySelector("#chatbot"), { childList: true, characterData: true, subtree: true });
}"""


def test_under_200_messages_only_the_answer_is_sent_and_drawn(lasting: Site) -> None:
    """The messages are drawn but, like failed turns, not read by the model."""
    questions = [{"role": "user", "content": f"Question {turn}: how does paging work?"} for turn in range(100)]
    answer = {"role": "assistant", "content": ANSWER, "metadata": {"id": "error"}}
    lasting.import_chat([message for question in questions for message in (question, answer)])
    lasting.limit_answers(2000)
    developer = lasting.page.context.new_cdp_session(lasting.page)
    sizes: list[int] = []
    developer.on("Network.dataReceived", lambda event: sizes.append(event["dataLength"]))
    developer.send("Network.enable")
    lasting.page.evaluate(WATCH)
    lasting.ask("Count, please.")
    # The first updates also carry and draw what was asked.
    lasting.page.wait_for_function(f"window.updates > {FIRST}")
    first, changes = lasting.page.evaluate("[window.updates, window.changes]")
    num_bytes = sum(sizes)
    lasting.page.wait_for_function(f"window.updates > {LAST}")
    last, changes_after = lasting.page.evaluate("[window.updates, window.changes]")
    num_bytes = sum(sizes) - num_bytes
    assert lasting.page.locator("#growing .bot-row").count() == 1, "the answer ended before it was measured"
    lasting.press_stop()
    lasting.figures.last.wait_for()
    developer.detach()
    assert changes_after == changes
    # A history of 200 messages is 40 KB; the strip shares the line.
    assert num_bytes / (last - first) < 4000


def test_a_crowd_of_pages_streams_evenly_and_a_real_page_among_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui_load, "ALONE_S", 1.0)
    monkeypatch.setattr(ui_load, "RAMP_UP_S", 0.5)
    found: dict[str, Any] = {}

    def crowd() -> None:
        found["loads"] = asyncio.run(ui_load.measure(site.base_url, NUM_PAGES, SECONDS, NUM_UPDATES))

    site.make_answers_endless()
    site.page.evaluate(WATCH)
    thread = threading.Thread(target=crowd)
    thread.start()
    site.wait_for(lambda: site.num_running() >= NUM_PAGES or not thread.is_alive())
    site.ask("Count, please.")
    site.page.wait_for_function("window.updates >= 10")
    site.press_stop()
    thread.join()
    _, many = found["loads"]
    assert min(many.rates) > 0.3 * max(many.rates)
