"""The chat in a real browser: it streams, stops, and lets go of the engine when nobody looks any more."""

from tests.browser.site import Site


def test_an_answer_streams_and_ends_with_its_figures(site: Site) -> None:
    site.ask("Hello! Who are you?")
    site.figures.wait_for()
    assert site.answer.strip()
    assert all(part in site.figures.inner_text() for part in ("first token", "tok/s", "tokens", "cached"))


def test_the_text_grows_and_stop_ends_the_request(site: Site) -> None:
    site.make_answers_endless()
    site.ask("Count, please.")
    site.wait_for(lambda: site.page.locator("#chatbot .bot-row").count() > 0 and len(site.answer) > 0, 10)
    length = len(site.answer)
    site.wait_for(lambda: len(site.answer) > length, 5)
    assert site.num_running() == 1
    site.press_stop()
    site.wait_for(lambda: site.num_running() == 0, 1)
    site.figures.wait_for()
    assert site.figures.inner_text().strip().endswith("stopped")
    stopped_at = len(site.answer)
    site.page.wait_for_timeout(300)
    assert len(site.answer) == stopped_at


def test_closing_the_tab_aborts_within_a_second(site: Site) -> None:
    site.make_answers_endless()
    site.ask("Count, please.")
    site.wait_for(lambda: site.num_running() == 1, 10)
    site.page.close()
    site.wait_for(lambda: site.num_running() == 0, 1)


def test_retry_edit_and_undo_work_on_the_last_turn(site: Site) -> None:
    site.ask("Hello!")
    site.figures.wait_for()
    assert " 0% cached" in site.figures.inner_text()
    site.page.get_by_role("button", name="Retry").click()
    # The second answer is known by its figures: its prompt is in the cache.
    site.page.locator("#chatbot .thought-group", has_not_text=" 0% cached").wait_for()
    site.page.get_by_role("button", name="Edit").click()
    site.page.locator("#chatbot textarea").fill("What can you do?")
    site.page.get_by_label("Submit", exact=True).click()
    site.page.get_by_text("What can you do?").wait_for()
    site.figures.wait_for()
    site.page.get_by_role("button", name="Undo").click()
    site.wait_for(lambda: site.composer.input_value() == "What can you do?", 5)
    assert site.page.locator("#chatbot .user-row").count() == 0


def test_an_example_prompt_is_asked_with_one_click(site: Site) -> None:
    site.page.locator("#chatbot .example").first.click()
    site.figures.wait_for()
    assert site.page.locator("#chatbot .user-row").count() == 1


def test_a_grammar_that_is_not_usable_is_explained_in_the_chat(site: Site) -> None:
    site.page.locator("#settings .toggle-button").click()
    site.page.get_by_label("Grammar of the answer").click()
    site.page.get_by_role("option", name="JSON schema").click()
    site.page.get_by_label("Grammar: JSON schema").fill('{"type": "array", "$dynamicRef": "#a"}')
    site.ask("Hello!")
    site.page.get_by_text("Unsupported keyword “$dynamicRef” at the root.").wait_for()
