"""The observatory in a real browser: it draws while it is seen, rests when it is not, and steps through masks."""

from typing import Any

from tests.browser.site import Site


def num_looks(site: Site) -> int:
    return int(site.page.locator(".observatory").get_attribute("data-looks") or 0)


def test_it_polls_only_while_it_is_seen_and_a_running_request_gets_a_lane_and_blocks(site: Site) -> None:
    site.go_to("Engine")
    site.wait_for(lambda: num_looks(site) >= 2)
    site.go_to("Chat")
    before, beats = num_looks(site), 0

    def count(request: Any) -> None:
        nonlocal beats
        beats += "component_server" in request.url and '"refresh"' in request.post_data

    # The strip asks for its state as often as the drawings would look; one look may be under way.
    site.page.on("request", count)
    site.wait_for(lambda: beats >= 4)
    assert num_looks(site) <= before + 1
    site.page.remove_listener("request", count)
    site.go_to("Engine")
    send = site.page.get_by_role("button", name="Send 12 requests")
    send.click()
    site.wait_for(lambda: site.num_running() + site.num_waiting() > 2)
    send.wait_for()  # again, although their bars are still there
    site.page.get_by_role("img", name="half of").first.wait_for()
    site.go_to("Chat")
    site.make_answers_endless()
    site.ask("Count, please.")
    site.wait_for(lambda: site.num_running() > 0)
    site.go_to("Engine")
    site.page.locator(".lanes rect.p-grammar").first.wait_for()
    site.page.get_by_role("img", name="blocks owned").wait_for()
    site.page.get_by_role("img", name="requests in the last 30 seconds").wait_for()
    site.wait_for(lambda: "of 64" in site.page.locator(".tiles").inner_text())
    site.go_to("Chat")
    site.press_stop()
    site.figures.wait_for()
