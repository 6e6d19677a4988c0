"""Site: one open page of the app, in the words of a person who uses it."""

import json
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

# A grammar that keeps any model busy: no end before the token limit.
ENDLESS_SCHEMA = '{"type": "array", "items": {"type": "integer"}, "minItems": 5000}'
POLL_S = 0.1
# No claim about speed, only an end to a wait that will never succeed: a loaded machine may be very slow.
PATIENCE_S = 90.0


class Site:
    """A page, what it complained about, and what it asked of other hosts."""

    def __init__(self, page: Any, base_url: str) -> None:
        self.page = page
        self.base_url = base_url
        self.complaints: list[str] = []
        self.external_requests: list[str] = []
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._watch)

    def open(self, tab: str = "chat") -> None:
        """Open the app at a tab in a page that is new; at "extract" it extracts an example by itself."""
        # Pages of one context share what the browser keeps, and the server knows the browser's chats by its cookie.
        self.page.context.clear_cookies()
        developer = self.page.context.new_cdp_session(self.page)
        kept = {"origin": self.base_url, "storageTypes": "local_storage"}
        developer.send("Storage.clearDataForOrigin", kept)
        developer.detach()
        self.page.goto(f"{self.base_url}/#{tab}")
        (self.composer if tab == "chat" else self.page.get_by_role("tab", name=tab.title())).first.wait_for()

    def reload(self) -> None:
        """Load the page again."""
        self.page.reload()
        self.complaints.clear()  # Gradio's about the streams of a page that was left

    def resize(self, width: int, height: int) -> None:
        """Give the page a size, and wait until it has it."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.wait_for(lambda: self.page.evaluate("[innerWidth, innerHeight]") == [width, height])

    @property
    def composer(self) -> Any:
        return self.page.locator("#composer textarea")

    @property
    def answer(self) -> str:
        """The last answer's text, without its figures."""
        return str(self.page.locator("#messages .bot-row .message:not(.thought) .message-content").last.inner_text())

    @property
    def figures(self) -> Any:
        """The muted lines under answers."""
        return self.page.locator("#chatbot .bot-row .thought-group")

    def ask(self, text: str) -> None:
        self.composer.fill(text)
        self.composer.press("Enter")

    def bring_chat(self, messages: list[dict[str, Any]]) -> None:
        """Bring a chat from a file; it is not opened."""
        chat = {"id": "imported", "title": "Imported", "time": 1, "messages": messages}
        file: Any = {"name": "chats.json", "mimeType": "application/json"}
        file["buffer"] = json.dumps({"chats": [chat]}).encode()
        self.page.get_by_label("Chats to import").set_input_files(files=[file])

    def import_chat(self, messages: list[dict[str, Any]]) -> None:
        """Bring a chat from a file, and open it."""
        self.bring_chat(messages)
        self.toggle("Chats")
        self.page.locator(".chats").get_by_role("button", name="Imported").first.click()
        num_questions = sum(message["role"] == "user" and "metadata" not in message for message in messages)
        self.wait_for(lambda: self.page.locator("#chatbot .user-row").count() == num_questions)
        self.toggle("Chats")

    def press_through(self, button: Any, change: Callable[[], Any]) -> None:
        """Press a button, and let go of it when the page has changed."""
        button.hover()
        self.page.mouse.down()
        change()
        self.page.mouse.up()

    def press_stop(self) -> None:
        """At once, without waiting for two frames alike; nothing when the answer has ended by itself."""
        self.page.evaluate("document.querySelector('#composer button.stop-button')?.click()")

    def limit_answers(self, max_tokens: int) -> None:
        """Through the settings."""
        self.toggle("Settings")
        self.page.get_by_label("Max tokens").first.fill(str(max_tokens))
        self.toggle("Settings")

    def make_answers_endless(self) -> None:
        """Through the settings: a grammar that never ends, and many tokens."""
        self.toggle("Settings")
        self.page.get_by_label("Max tokens").first.fill("4000")
        self.choose_grammar("JSON schema", ENDLESS_SCHEMA)
        self.toggle("Settings")

    def choose_grammar(self, kind: str, text: str) -> None:
        """In the open settings."""
        self.page.get_by_label("Grammar of the answer").click()
        self.page.get_by_role("option", name=kind).click()
        self.page.get_by_label(f"Grammar: {kind}").fill(text)

    def toggle(self, panel: str) -> None:
        """Open or close the panel of chats or of settings, and wait until it has moved."""
        button = self.page.get_by_role("button", name=panel, exact=True)
        is_open = button.get_attribute("aria-expanded") == "true"
        button.click()
        self.wait_for(lambda: button.get_attribute("aria-expanded") == str(not is_open).lower())

    def go_to(self, tab: str) -> None:
        # Each token of an answer is a tab, too, and may spell a tab's name; those have a data-index.
        tabs = self.page.locator('[role="tab"]:not([data-index])')
        tabs.and_(self.page.get_by_role("tab", name=tab, exact=True)).click()

    def extract(self, text: str) -> None:
        self.go_to("Extract")
        self.go_to("Text")
        self.page.get_by_role("textbox", name="Text", exact=True).fill(text)
        self.page.get_by_role("button", name="Extract", exact=True).click()

    def approve(self) -> None:
        """Press Approve: it leads to the marked values that nobody saw, and then approves."""
        button = self.page.get_by_role("button", name="Approve")
        while button.inner_text().startswith("Go to"):
            button.click()
        button.click()

    def unfold(self, words: str) -> None:
        """Open a folded part of the Extract tab."""
        self.page.get_by_role("button", name=words).click()

    def type_code(self, editor: str, text: str) -> None:
        """Replace what stands in a code editor, as a person pastes."""
        content = self.page.locator(f"{editor} .cm-content")
        content.click()
        content.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(text)

    def find_overflow(self) -> list[str]:
        """Visible elements that reach beyond the right edge, unless something around them scrolls or hides them."""
        return list(self.page.evaluate(FIND_OVERFLOW))

    def wait_for(self, condition: Callable[[], bool]) -> float:
        """Poll until it holds; returns the seconds it took."""
        start = time.monotonic()
        while not condition():
            waited = time.monotonic() - start
            assert waited < PATIENCE_S, f"did not happen within {PATIENCE_S} s"
            # Through the page, so that its events are heard meanwhile.
            if self.page.is_closed():
                time.sleep(POLL_S)
            else:
                self.page.wait_for_timeout(POLL_S * 1000)
        return time.monotonic() - start

    def num_running(self) -> int:
        """Requests in the engine, as it says itself."""
        return self._read_metric("num_requests_running")

    def num_waiting(self) -> int:
        """Requests that wait for a place in the batch."""
        return self._read_metric("num_requests_waiting")

    def num_aborted(self) -> int:
        """Requests that were ended from outside, since the server started."""
        return self._read_metric('request_success_total{[^}]*finished_reason="abort"')

    def _read_metric(self, name: str) -> int:
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=PATIENCE_S) as reply:
            found = re.search(rf"^troupe:{name}\S* ([\d.]+)", reply.read().decode(), re.MULTILINE)
        assert found is not None, f"no metric {name}"
        return int(float(found[1]))

    def _hear(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} at {message.location['url']}")

    def _watch(self, request: Any) -> None:
        if request.url.startswith(("data:", "blob:")):
            return
        if urlsplit(request.url).netloc != urlsplit(self.base_url).netloc:
            self.external_requests.append(request.url)


FIND_OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  const isContained = (element) => {
    for (let box = element.parentElement; box && box !== document.body; box = box.parentElement) {
      const scrolls = ["auto", "scroll", "hidden"].includes(getComputedStyle(box).overflowX);
      if (scrolls && box.getBoundingClientRect().right <= width + 1 && !box.classList.contains("gradio-container"))
        return true;
    }
    return false;
  };
  const found = document.documentElement.scrollWidth > width + 1 ? ["the page scrolls sideways"] : [];
  for (const element of document.querySelectorAll("main *:not(.sidebar):not(.sidebar *)")) {
    const box = element.getBoundingClientRect();
    const isSeen = box.width > 1 && box.height > 1 && element.checkVisibility();
    if (isSeen && box.right > width + 1 && !isContained(element))
      found.push(`${element.tagName}#${element.id}.${element.className} reaches ${Math.round(box.right)} of ${width}`);
  }
  return found;
}"""
