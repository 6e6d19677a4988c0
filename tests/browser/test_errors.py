"""The page explains errors, suggests a solution, and continues to work."""

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

from tests.browser.site import PATIENCE_S, Site


def error_of(site: Site) -> str:
    """The last message of the chat, once the turn has ended."""
    site.page.locator("#chatbot .bot-row strong").last.wait_for()
    return str(site.page.locator("#chatbot .bot-row .message-content").last.inner_text())


def occupy(url: str, is_over: threading.Event, max_tokens: int = 1900) -> None:
    """Hold one place of the engine until it is over, with one request after another."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    while not is_over.is_set():
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as stream:
                for _ in stream:
                    if is_over.is_set():
                        return
        except OSError:
            is_over.wait(0.2)


def test_a_full_queue_says_when_to_try_again(lasting: Site) -> None:
    lasting.limit_answers(3)
    is_over = threading.Event()
    crowd = [threading.Thread(target=occupy, args=(lasting.base_url, is_over)) for _ in range(3)]
    try:
        for each in crowd:
            each.start()
        lasting.wait_for(lambda: lasting.num_running() == 2 and lasting.num_waiting() == 1)
        lasting.ask("Hello!")
        said = error_of(lasting)
        assert "The queue is full." in said and "Try again in" in said
    finally:
        is_over.set()
        for each in crowd:
            each.join()
    lasting.wait_for(lambda: lasting.num_running() == 0)
    lasting.page.get_by_role("button", name="Retry").click()
    lasting.figures.wait_for()


def test_an_engine_that_restarts_says_so_and_goes_on_with_the_answer(lasting: Site, flag: Path) -> None:
    lasting.limit_answers(3)
    flag.touch()
    lasting.ask("Hello!")
    lasting.page.locator(".strip .state.restarting").wait_for()
    flag.unlink()
    lasting.page.locator(".strip .state.ready").wait_for()
    lasting.figures.wait_for()


def test_a_file_that_is_no_text_is_named_in_the_chat_and_in_the_workbench(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\r")
    site.page.locator("#composer input[type=file]").set_input_files(path)
    site.page.locator("#composer .thumbnails").wait_for()
    site.ask("What is this?")
    site.page.locator(".page-note", has_text="picture.txt is not a text").wait_for()
    assert site.composer.input_value() == "What is this?"
    site.go_to("Extract")
    site.page.locator("#extract input[type=file]").set_input_files(path)
    site.page.locator("#extract .record-status .problem", has_text="picture.txt is not a text").wait_for()
    site.go_to("Chat")
    site.toggle("Chats")
    site.page.get_by_label("Chats to import").set_input_files(path)
    site.page.locator(".page-note", has_text="Nothing imported").wait_for()


# Shortens the patience with the server from 5 s to 1 s.
HURRY = """() => {
  const wait = setTimeout;
  setTimeout = (run, ms, ...rest) => wait(run, ms === 5000 ? 1000 : ms, ...rest);
}"""
BE_BUSY = "() => { setTimeout(() => { for (const end = performance.now() + 1300; performance.now() < end;); }); }"


def test_a_server_that_is_gone_is_named_and_a_reload_keeps_what_was_typed(site: Site) -> None:
    state, more = site.page.locator(".strip .state"), site.page.get_by_role("button", name="Continue")
    site.limit_answers(3)
    site.ask("Hello!")
    more.wait_for()
    site.page.evaluate(HURRY)
    held: list[Any] = []
    site.page.route("**/component_server/**", lambda route: held.append(route))
    site.wait_for(lambda: held != [])
    # The reply comes while the page is busy.
    site.page.evaluate(BE_BUSY)
    held[0].continue_()
    site.page.wait_for_timeout(500)
    assert state.inner_text() != "not reachable"
    site.page.unroute("**/component_server/**")
    site.page.route("**/component_server/**", lambda route: route.abort())
    state.filter(has_text="not reachable").wait_for()
    for button in (more, site.page.get_by_role("button", name="Retry")):
        button.click()
        site.page.locator(".page-note", has_text="nothing was asked").wait_for()
        site.page.get_by_role("button", name="Close the note").click()
    site.page.unroute("**/component_server/**")
    state.filter(has_text="ready").wait_for()
    site.complaints.clear()
    site.composer.fill("A long question, not yet asked")
    site.reload()
    site.wait_for(lambda: site.composer.input_value() == "A long question, not yet asked")
    site.composer.press("Enter")
    site.figures.nth(1).wait_for()
    site.reload()
    site.figures.nth(1).wait_for()
    assert site.composer.input_value() == ""
