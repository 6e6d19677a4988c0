"""The chat in a real browser: it streams, stops, restores chats, and frees the engine when the page is closed."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.browser.site import Site


def begin_a_long_answer(lasting: Site) -> None:
    lasting.limit_answers(2000)
    lasting.ask("Count, please.")
    lasting.wait_for(lambda: lasting.num_running() == 1)


def ask_and_wait(site: Site, text: str, turn: int = 0) -> None:
    site.ask(text)
    site.figures.nth(turn).wait_for()


def test_a_turn_is_asked_again_changed_and_taken_back(site: Site) -> None:
    site.ask("Hello! Who are you, and how do I start?")  # longer than a block of the cache
    site.figures.wait_for()
    first = site.figures.inner_text()
    assert site.answer.strip()
    assert all(part in first for part in ("first token", "tok/s", "tokens", " 0% cached"))
    site.page.get_by_role("button", name="Retry").click()
    site.page.locator(".branch").get_by_text("2 of 2").wait_for()
    # The second answer is known by its figures: its prompt is in the cache.
    site.page.locator("#chatbot .thought-group", has_not_text=" 0% cached").wait_for()
    site.page.get_by_role("button", name="Previous version of turn 1").click()
    site.page.locator(".branch").get_by_text("1 of 2").wait_for()
    site.wait_for(lambda: site.figures.inner_text() == first)
    # Escape leaves the question as it was, Enter asks the new one.
    edit, box = site.page.get_by_role("button", name="Edit"), site.page.locator("#chatbot textarea")
    edit.click()
    assert box.bounding_box()["width"] > site.page.locator("#chatbot .message-wrap").bounding_box()["width"] - 60
    box.fill("Nothing")
    box.press("Escape")
    box.wait_for(state="detached")
    assert "Who are you" in site.page.locator("#chatbot .user-row").inner_text()
    edit.click()
    box.fill("What can")
    box.press("Shift+Enter")
    box.press_sequentially("you do?")
    box.press("Enter")
    site.page.locator("#chatbot .user-row", has_text=re.compile(r"What can\s*you do\?")).wait_for()
    # A button that is pressed while a turn runs does nothing.
    site.wait_for(lambda: site.figures.all_inner_texts() not in ([], [first]))
    # The question and its answer have versions now, each with a switch of its own.
    site.page.get_by_role("button", name="Retry").click()
    switches = site.page.locator(".branch", has_text="2 of 2")
    site.wait_for(lambda: switches.count() == 2)
    site.figures.wait_for()
    site.page.get_by_role("button", name="Undo").click()
    site.wait_for(lambda: site.composer.input_value() == "What can\nyou do?")
    site.wait_for(lambda: site.page.locator("#chatbot .user-row").count() == 0)
    site.page.locator("#chatbot .example").first.click()
    site.figures.wait_for()
    site.wait_for(lambda: site.page.locator("#chatbot .user-row").count() == 1)
    # An edit ends with its chat.
    edit.click()
    site.toggle("Chats")
    site.page.get_by_role("button", name="New chat").click()
    ask_and_wait(site, "Bye!")
    assert box.count() == 0


def test_an_earlier_question_is_asked_again_and_the_turns_after_it_stay_a_version(site: Site) -> None:
    ask_and_wait(site, "Hello!")
    ask_and_wait(site, "What can you do?", turn=1)
    retries, rows = site.page.get_by_role("button", name="Retry"), site.page.locator("#chatbot .user-row")
    site.wait_for(lambda: retries.count() == 2)
    retries.first.click()
    site.page.locator(".branch").get_by_text("2 of 2").wait_for()
    assert rows.all_inner_texts() == ["Hello!"]
    site.page.get_by_role("button", name="Previous version of turn 1").click()
    site.wait_for(lambda: rows.all_inner_texts() == ["Hello!", "What can you do?"])


def test_the_text_grows_and_stop_ends_the_request(lasting: Site) -> None:
    num_aborted = lasting.num_aborted()
    begin_a_long_answer(lasting)
    growing = lasting.page.locator("#growing .bot-row")
    lasting.wait_for(lambda: growing.count() > 0 and len(lasting.answer) > 0)
    length = len(lasting.answer)
    lasting.wait_for(lambda: len(lasting.answer) > length)
    # What is entered meanwhile is sent when the answer has ended.
    lasting.composer.fill("And then?")
    lasting.composer.press("Enter")
    lasting.page.locator(".outbox", has_text="And then?").wait_for()
    assert lasting.num_running() == 1
    lasting.press_stop()
    # Ended by the button, not by the token limit: the engine counts how requests end.
    lasting.wait_for(lambda: lasting.num_aborted() == num_aborted + 1)
    lasting.page.locator(".user-row").get_by_text("And then?").wait_for()
    lasting.page.get_by_text("stopped").first.wait_for()
    assert lasting.composer.input_value() == ""
    # The engine may have begun before the page shows it: until then, the last answer is the one before.
    lasting.wait_for(lambda: growing.count() > 0 and len(lasting.answer) > 5)
    begun = lasting.answer
    lasting.reload()
    lasting.wait_for(lambda: len(lasting.answer) > len(begun) and lasting.answer.startswith(begun))
    assert lasting.num_running() == 1
    lasting.complaints.clear()  # Gradio's about the stream that the reload cut
    lasting.page.keyboard.press("Escape")
    lasting.wait_for(lambda: lasting.num_running() == 0)
    assert lasting.num_aborted() == num_aborted + 2


def test_messages_entered_in_one_breath_are_sent_once_and_in_order(lasting: Site) -> None:
    lasting.limit_answers(3)
    texts = [f"Message {number}." for number in range(4)]
    lasting.composer.focus()
    for text in texts:
        lasting.page.keyboard.insert_text(text)
        lasting.page.keyboard.press("Enter")
    lasting.page.keyboard.insert_text("A draft")
    rows = lasting.page.locator("#chatbot .user-row")
    lasting.wait_for(lambda: rows.count() == 4)
    assert rows.all_inner_texts() == texts
    assert lasting.composer.input_value() == "A draft"
    lasting.limit_answers(2000)
    lasting.composer.press("Enter")
    lasting.wait_for(lambda: lasting.num_running() == 1)
    # A message that waits can be taken back, before what was typed since.
    lasting.ask("Wait")
    lasting.composer.fill("typed")
    lasting.page.get_by_role("button", name="Take back Wait").click()
    lasting.wait_for(lambda: lasting.composer.input_value() == "Wait\ntyped")
    # One that waits in a chat is not sent in another one; a reload keeps it.
    lasting.composer.fill("")
    lasting.ask("Later")
    lasting.toggle("Chats")
    lasting.page.get_by_role("button", name="New chat").click()
    lasting.page.locator("#chatbot .example").first.wait_for()
    lasting.page.locator(".outbox li").wait_for(state="detached")
    lasting.page.locator("#chat-list").get_by_role("button", name="Message 0.").first.click()
    lasting.page.locator(".outbox li", has_text="Later").wait_for()
    lasting.reload()
    lasting.page.locator(".outbox li", has_text="Later").wait_for()
    lasting.page.locator("#composer button.stop-button").wait_for()  # the answer is taken up again
    lasting.complaints.clear()  # Gradio's about the stream that the reload cut
    lasting.press_stop()
    lasting.page.locator(".user-row", has_text="Later").wait_for()
    lasting.page.locator("#growing .bot-row").wait_for()
    assert lasting.composer.input_value() == ""
    lasting.press_stop()
    lasting.wait_for(lambda: lasting.num_running() == 0)


def test_retry_undo_edit_and_versions_leave_an_answer_that_is_being_written(lasting: Site) -> None:
    lasting.limit_answers(3)
    ask_and_wait(lasting, "Hello!")
    lasting.page.get_by_role("button", name="Continue").click()  # three tokens more
    lasting.page.locator(".branch").get_by_text("2 of 2").wait_for()
    chatbot, num_aborted = lasting.page.locator("#chatbot"), lasting.num_aborted()
    lasting.wait_for(lambda: chatbot.locator(".bot-row").count() == 1)  # the second answer is over
    begin_a_long_answer(lasting)
    previous = lasting.page.locator("[aria-label='Previous version of turn 1']")
    previous.wait_for(state="hidden")  # a frame after the first words
    # The buttons are out of sight by now; as clicks that came just before.
    previous.dispatch_event("click")
    chatbot.get_by_label("Undo", exact=True).dispatch_event("click")
    chatbot.get_by_label("Edit").dispatch_event("click")
    chatbot.locator("textarea").fill("Bye!")
    chatbot.get_by_label("Submit", exact=True).dispatch_event("click")
    with lasting.page.expect_response("**/gradio_api/run/**"):
        chatbot.get_by_label("Retry").dispatch_event("click")
    lasting.page.wait_for_timeout(1000)  # the refusals of the other clicks, of which one restores the question
    chatbot.locator(".user-row", has_text="Hello!").wait_for()
    assert (lasting.num_running(), lasting.num_aborted()) == (1, num_aborted)
    lasting.press_stop()
    lasting.figures.nth(1).wait_for()
    assert chatbot.locator(".user-row").all_inner_texts() == ["Hello!", "Count, please."]
    assert (lasting.num_running(), lasting.num_aborted()) == (0, num_aborted + 1)
    lasting.page.locator(".branch").get_by_text("2 of 2").wait_for()
    previous.click()
    lasting.page.locator(".branch").get_by_text("1 of 2").wait_for()
    lasting.wait_for(lambda: chatbot.locator(".user-row").count() == 1)


def test_a_chat_that_is_left_goes_on_and_one_that_is_removed_stays_away(lasting: Site) -> None:
    chats = lasting.page.locator("#chat-list")
    begin_a_long_answer(lasting)
    lasting.toggle("Chats")
    lasting.page.get_by_role("button", name="New chat").click()
    lasting.wait_for(lambda: lasting.page.locator("#messages .message-row").count() == 0)
    chats.get_by_role("button", name="Count, please.").first.click()
    lasting.page.locator("#chatbot .user-row", has_text="Count, please.").wait_for()
    lasting.page.locator("#growing .bot-row").wait_for()
    lasting.press_stop()
    lasting.figures.wait_for()
    lasting.page.get_by_role("button", name="Continue").wait_for()  # the rows and their buttons are drawn
    lasting.page.get_by_role("button", name="Retry").click()
    lasting.wait_for(lambda: lasting.num_running() == 1)
    chats.get_by_role("button", name="Remove Count, please.").click()
    lasting.wait_for(lambda: lasting.num_running() == 0)
    lasting.page.get_by_text("There are no chats yet.").wait_for()
    lasting.wait_for(lambda: lasting.page.locator("#messages .message-row").count() == 0)
    lasting.page.locator("#composer button.submit-button").wait_for()
    lasting.wait_for(lambda: chats.locator("li.none").count() == 1)
    chats.get_by_role("button", name="Undo").click()
    lasting.page.locator("#chatbot .user-row", has_text="Count, please.").wait_for()


def test_chats_are_there_after_a_reload_are_searched_exported_and_imported(site: Site, tmp_path: Path) -> None:
    ask_and_wait(site, "What can you do?")
    site.toggle("Chats")
    chats, questions = site.page.locator(".chats"), site.page.locator("#chatbot .user-row")
    chats.get_by_role("button", name="Rename What can you do?").click()
    chats.get_by_label("Title of the chat").fill("My questions")
    site.page.keyboard.press("Enter")
    chats.get_by_role("button", name="My questions").first.wait_for()
    site.composer.fill("not sent")
    site.page.keyboard.press("Control+Shift+O")
    assert site.composer.input_value() == "", "the draft of another chat"
    site.wait_for(lambda: questions.count() == 0 and site.composer.evaluate("node => node === document.activeElement"))
    ask_and_wait(site, "Hello! Who are you?")
    site.wait_for(lambda: chats.locator("li").count() == 2)
    chats.get_by_role("button", name="My questions").first.click()
    questions.filter(has_text="What can you do?").wait_for()
    assert site.composer.input_value() == "not sent"
    chats.get_by_role("button", name="Hello! Who are you?").first.click()
    questions.filter(has_text="Who are you?").wait_for()
    assert site.composer.input_value() == ""
    site.reload()
    questions.filter(has_text="Who are you?").wait_for()
    site.toggle("Chats")
    with site.page.expect_download() as waiting:
        chats.get_by_role("button", name="Export").click()
    path = tmp_path / "chats.json"
    waiting.value.save_as(path)
    site.composer.press("Control+k")  # what is typed at once belongs to the search
    site.page.keyboard.type("what can")
    site.wait_for(lambda: chats.locator("li").count() == 1)
    chats.get_by_role("button", name="My questions").first.click()
    questions.filter(has_text="What can you do?").wait_for()
    chats.get_by_role("button", name="Remove My questions").click()
    chats.get_by_text("No chat has these words.").wait_for()
    site.wait_for(lambda: questions.count() == 0)
    chats.get_by_label("Chats to import").set_input_files(path)
    chats.get_by_role("button", name="My questions").first.click()
    questions.filter(has_text="What can you do?").wait_for()


def test_a_press_is_not_lost_when_the_list_of_chats_is_drawn_again_meanwhile(site: Site) -> None:
    ask_and_wait(site, "Hello!")
    site.toggle("Chats")
    chats = site.page.locator("#chat-list")
    site.press_through(
        chats.get_by_role("button", name="Remove Hello!"),
        lambda: (site.page.keyboard.press("Control+Shift+O"), chats.locator("li.current").wait_for(state="detached")),
    )
    site.page.get_by_text("There are no chats yet.").wait_for()


def test_two_tabs_keep_the_chats_of_both(site: Site) -> None:
    other = Site(site.page.context.new_page(), site.base_url)
    other.page.goto(f"{site.base_url}/#chat")
    other.composer.wait_for()
    ask_and_wait(site, "Hello!")
    ask_and_wait(other, "What can you do?")
    other.toggle("Chats")
    listed = other.page.locator("#chat-list li")
    other.wait_for(lambda: listed.count() == 2)
    site.reload()
    # Each tab opens its own chat again.
    site.page.locator("#chatbot .user-row", has_text="Hello!").wait_for()
    site.toggle("Chats")
    site.wait_for(lambda: site.page.locator("#chat-list li").count() == 2)
    site.page.get_by_role("button", name="Remove What can you do?").click()
    other.wait_for(lambda: listed.count() == 1)
    other.page.get_by_role("button", name="Remove Hello!").click()
    site.page.get_by_text("There are no chats yet.").wait_for()
    # The open chat of this tab was removed there: it takes no question any more.
    site.ask("And now?")
    # The note stands above the text box, as wide as it is.
    note, box = site.page.locator(".page-note", has_text="removed in another tab"), site.page.locator("#composer")
    note.wait_for()
    assert all(note.bounding_box()[side] == box.bounding_box()[side] for side in ("x", "width"))
    note.get_by_role("button", name="Close the note").click()
    note.wait_for(state="detached")
    site.page.get_by_role("button", name="New chat").click()
    ask_and_wait(site, "Hello again!")
    # Both ask in one chat before either hears of the other: neither question is lost.
    other.page.get_by_role("button", name="Hello again!").first.click()
    other.figures.first.wait_for()
    site.page.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    for tab, text in ((site, "And you?"), (other, "And who else?")):
        tab.ask(text)
    for tab in (site, other):
        tab.figures.nth(1).wait_for()
    site.reload()
    site.page.locator(".branch").get_by_text("2 of 2").wait_for()
    other.page.close()
    assert other.complaints == []


def test_a_message_that_the_server_has_failed_to_take_stands_in_the_text_box_again(site: Site) -> None:
    def fail(route: Any) -> None:
        if "Hello!" in route.request.post_data:
            route.fulfill(status=500, json={"error": "no"})
        else:
            route.continue_()

    site.page.route("**/gradio_api/run/**", fail)
    site.ask("Hello!")
    site.wait_for(lambda: site.composer.input_value() == "Hello!")
    site.page.unroute("**/gradio_api/run/**")
    site.composer.press("Enter")
    site.figures.wait_for()
    site.complaints.clear()  # the browser's about the failure


def test_a_message_entered_during_an_upload_is_sent_with_its_file(site: Site, tmp_path: Path) -> None:
    path, upload = tmp_path / "note.txt", re.compile(r"/gradio_api/upload\?")
    path.write_text("The meeting is at noon.")
    held: list[Any] = []
    site.page.route(upload, lambda route: held.append(route))
    site.page.locator("#composer input[type=file]").set_input_files(path)
    site.page.locator("#composer [role=status]").wait_for()
    site.ask("When is it?")
    site.page.locator(".outbox", has_text="When is it?").wait_for()
    site.page.unroute(upload)  # which lets the held one go on
    site.page.locator("#chatbot .user-row").get_by_role("button", name="note.txt").wait_for()
    site.figures.wait_for()
    assert site.composer.input_value() == ""


def test_the_tokens_of_every_answer_can_be_looked_into_also_after_a_reload(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("The meeting is at noon.")
    site.page.locator("#composer input[type=file]").set_input_files(path)
    site.page.locator("#composer .thumbnails").wait_for()
    ask_and_wait(site, "When is it, for $x^2$?")
    # The file is a chip with its name, which opens; the formula is drawn.
    question, name = site.page.locator("#chatbot .user-row"), "note.txt"
    chip = question.get_by_role("button", name=name)
    assert "The meeting is at noon." not in question.inner_text()
    question.locator(".katex").wait_for()
    chip.click()
    question.get_by_text("The meeting is at noon.").wait_for()
    site.page.get_by_role("button", name="Edit").click()
    assert site.page.locator("#chatbot textarea:visible").count() == 1
    site.page.locator("#chatbot").get_by_label("Submit", exact=True).click()
    site.page.locator(".branch").get_by_text("2 of 2").first.wait_for()
    site.figures.wait_for()
    site.page.get_by_role("button", name="Look inside an answer").click()
    tokens = site.page.locator("#inside .token")
    tokens.nth(1).hover()
    site.page.get_by_text("Token 2 of").wait_for()
    site.page.locator("#inside").get_by_role("columnheader", name="probability").wait_for()
    site.wait_for(lambda: site.page.locator("#inside tbody tr").count() == 6)
    ask_and_wait(site, "What can you do?", turn=1)
    site.reload()
    site.figures.nth(1).wait_for()
    site.figures.first.click()
    site.page.get_by_text("Answer 1 of 2").wait_for()
    first = tokens.all_inner_texts()
    chip.wait_for()
    site.page.get_by_role("button", name="Next answer").press("Enter")
    site.page.get_by_text("Answer 2 of 2").wait_for()
    site.wait_for(lambda: tokens.all_inner_texts() not in ([], first))
    assert first


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_question_asked_or_a_chat_imported_while_the_page_opens_stays(unopened: Site, is_asked: bool) -> None:
    site = unopened
    held: list[Any] = []  # the replies, so that the server has given them before it hears of more
    is_held = True

    def hold(route: Any) -> None:
        if is_held:
            held.append((route, route.fetch()))
        else:
            route.continue_()

    site.page.route("**/gradio_api/run/**", hold)
    site.open()
    site.wait_for(lambda: bool(held))
    if is_asked:
        site.ask("Hello!")
    else:
        site.bring_chat([{"role": "user", "content": "Long ago"}])
    site.page.wait_for_timeout(300)
    is_held = False
    for route, reply in reversed(held):  # that of the opening comes last
        route.fulfill(response=reply)
    if is_asked:
        site.figures.wait_for()
    site.toggle("Chats")
    site.page.locator(".chats").get_by_role("button", name="Hello!" if is_asked else "Imported").first.wait_for()


def test_what_is_asked_and_pressed_while_a_chat_opens_is_of_the_chat_that_was_chosen(site: Site) -> None:
    ask_and_wait(site, "Hello!")
    site.toggle("Chats")
    chats, rows = site.page.locator("#chat-list"), site.page.locator("#chatbot .user-row")
    chats.get_by_role("button", name="New chat").click()
    site.wait_for(lambda: rows.count() == 0)
    ask_and_wait(site, "What can you do?")
    held: list[Any] = []
    site.page.route("**/gradio_api/run/**", lambda route: held.append(route))
    chats.get_by_role("button", name="Hello!").first.click()
    site.wait_for(lambda: bool(held))
    site.page.get_by_role("button", name="Retry").click()  # of the chat that is left
    site.ask("And now?")
    chats.get_by_role("button", name="New chat").click()
    site.ask("Bye!")
    site.page.wait_for_timeout(300)
    assert len(held) == 1, "one after the other"
    site.page.unroute("**/gradio_api/run/**")
    rows.get_by_text("Bye!").wait_for()
    site.figures.wait_for()
    assert rows.all_inner_texts() == ["Bye!"]
    chats.get_by_role("button", name="Hello!").first.click()
    site.wait_for(lambda: rows.all_inner_texts() == ["Hello!", "And now?"])
    site.figures.nth(1).wait_for()
    chats.get_by_role("button", name="What can you do?").first.click()
    site.wait_for(lambda: rows.all_inner_texts() == ["What can you do?"])
    assert site.page.locator(".branch").count() == 0


def test_settings_change_only_when_they_are_set_and_are_there_again_after_a_reload(site: Site) -> None:
    site.toggle("Settings")
    preset = site.page.get_by_label("System prompt preset")
    prompt = site.page.get_by_label("System prompt", exact=True)
    preset.click()
    site.page.get_by_role("option", name="Short answers").click()
    site.wait_for(lambda: "one or two sentences" in prompt.input_value())
    assert site.page.get_by_label("Think first").count() == 0  # its template has no such switch
    site.choose_grammar("regex", "yes|no")
    prompt.fill("Be a cat.")
    preset.click()
    site.page.keyboard.press("Tab")  # the list is left without a choice
    temperature = site.page.get_by_label("Temperature").first
    temperature.fill("1.5")
    temperature.press("Enter")
    site.reload()
    site.composer.wait_for()
    site.toggle("Settings")
    site.wait_for(lambda: prompt.input_value() == "Be a cat.")
    site.wait_for(lambda: temperature.input_value() == "1.5")
    site.wait_for(lambda: site.page.get_by_label("Grammar: regex").input_value() == "yes|no")
    # A grammar that cannot be used is explained.
    site.choose_grammar("JSON schema", '{"type": "array", "$dynamicRef": "#a"}')
    site.ask("Hello!")
    site.page.get_by_text("Unsupported keyword “$dynamicRef” at the root.").wait_for()


def test_html_of_a_question_is_text_and_images_of_other_hosts_are_links_that_nothing_has_loaded(site: Site) -> None:
    loaded: list[str] = []
    site.page.route("http://other.example/**", lambda route: (loaded.append(route.request.url), route.abort()))
    text = 'See ![a cat](http://other.example/cat.png)\n\n<img src="http://other.example/dog.png">'
    typed = "Use <b>or</b> &lt;, and `<i>`"
    both = [(name, {"title": f"*{name}*", "id": f"model:{name}"}) for name in "ab"]
    compared = [
        message
        for name, heading in both
        for message in (
            {"role": "assistant", "content": "", "metadata": heading}, {"role": "assistant", "content": f"By {name}."},
            {"role": "assistant", "content": "", "metadata": {"title": f"{name} tok/s"}},
        )
    ]
    asked = [{"role": "user", "content": typed}, {"role": "assistant", "content": text}]
    site.import_chat([*asked, {"role": "user", "content": "Both?"}, *compared])
    links = site.page.locator("#talk").get_by_role("link")
    site.wait_for(lambda: links.count() == 2)
    assert links.all_inner_texts() == ["Image: a cat", "Image: http://other.example/dog.png"]
    assert site.page.locator("#talk img:visible").count() == 0
    # The browser reports both as asked for, and then as blocked.
    assert len(site.complaints) == len(site.external_requests) == 2 and loaded == []
    assert all("Content Security Policy" in complaint for complaint in site.complaints)
    site.complaints.clear()
    site.external_requests.clear()
    # The answers of two models stand beside each other, each over its figures, and an answer has the column's width.
    def are_beside_each_other() -> bool:
        left, right, figures = (site.page.get_by_text(words).bounding_box() for words in ("By a.", "By b.", "b tok/s"))
        return left["y"] == right["y"] and left["x"] + 300 < right["x"] == figures["x"] and figures["y"] > right["y"]

    site.wait_for(are_beside_each_other)  # the column may still be opening
    column, row = (site.page.locator(f"#chatbot {part}").first.bounding_box() for part in (".message-wrap", ".bot-row"))
    assert row["width"] > column["width"] - 20
    assert site.page.locator("#chatbot .user-row").first.inner_text() == typed.replace("`", "")
    site.page.get_by_role("button", name="Edit").first.click()
    site.wait_for(lambda: site.page.locator("#chatbot textarea").input_value() == typed)


def test_chats_of_an_older_version_are_taken_over_once(site: Site) -> None:
    old = [{"id": "old", "title": "Old", "time": 7, "messages": [{"role": "user", "content": "Long ago"}], "forks": []}]
    site.page.evaluate("chats => localStorage.setItem('troupe-chats', JSON.stringify({ current: 'old', chats }))", old)
    site.reload()
    site.composer.wait_for()
    site.toggle("Chats")
    chats = site.page.locator("#chat-list")
    chats.get_by_role("button", name="Old").first.click()
    site.page.locator("#chatbot .user-row", has_text="Long ago").wait_for()
    site.wait_for(lambda: site.page.evaluate("localStorage.getItem('troupe-chats')") is None)
    chats.get_by_role("button", name="Remove Old").click()
    site.page.get_by_text("There are no chats yet.").wait_for()
    site.reload()
    site.composer.wait_for()
    site.toggle("Chats")
    site.page.wait_for_timeout(1500)
    assert chats.locator("li.none").count() == 1
    site.complaints.clear()  # Gradio's about the streams that the reloads cut


def test_a_chosen_model_takes_over_and_compared_ones_can_all_be_looked_into(two_models: Site) -> None:
    site, page = two_models, two_models.page
    site.open("chat")
    chosen, box = page.locator("#answering .token"), page.locator("#answering input")
    chosen.get_by_text("demo_model").wait_for()
    box.click()
    page.get_by_role("option", name="second").click()
    site.wait_for(lambda: [each.split()[0] for each in chosen.all_inner_texts()] == ["second"])
    page.get_by_role("button", name="+ Compare").click()
    page.get_by_role("option", name="demo_model").click()
    site.wait_for(lambda: [each.split()[0] for each in chosen.all_inner_texts()] == ["second", "demo_model"])
    site.ask("Hello")
    site.figures.nth(3).wait_for()  # the name and the figures of each
    page.get_by_role("button", name="Look inside an answer").click()
    page.get_by_text("Answer 2 of 2").wait_for()
    page.locator("#inside .token").first.wait_for()
    page.get_by_role("button", name="Previous answer").click()
    page.get_by_text("Answer 1 of 2").wait_for()
    page.locator("#inside .token").first.wait_for()
    # The choice says which model is not loaded, also when that changes.
    site.wait_for(lambda: chosen.all_inner_texts() == ["second", "demo_model"])
    site.go_to("Engine")
    body = json.dumps({"model": "demo_model", "prompt": "Once", "max_tokens": 100, "ignore_eos": True}).encode()
    asked = urllib.request.Request(f"{site.base_url}/v1/completions", body, {"Content-Type": "application/json"})
    rows = page.locator("#models tr")

    def change_the_speed() -> None:
        before = rows.all_inner_texts()
        urllib.request.urlopen(asked).close()
        site.wait_for(lambda: rows.all_inner_texts() != before)

    site.press_through(page.locator('[data-act="end second"]'), change_the_speed)
    page.locator('[data-act="load second"]').wait_for(state="attached")
    site.go_to("Chat")
    site.wait_for(lambda: chosen.all_inner_texts() == ["second (not loaded)", "demo_model"])
