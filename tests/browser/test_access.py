"""Everybody can use it: by keyboard alone, with enough contrast, with names that can be read out."""

from pathlib import Path

from tests.browser.axe import list_violations
from tests.browser.site import Site
from tests.browser.test_extract_page import INVOICE

MAX_TABS = 120
SAMPLES = sorted((Path(__file__).resolve().parents[2] / "assets" / "samples").glob("event_*.txt"))
# A phone, a tablet and a desktop; one of them in the dark, which changes colours alone.
VIEWS = ((390, 844, False), (1024, 768, True), (1440, 900, False))
WRITTEN = """A loop:

```python
# add up
def total(values: list[int]) -> int:
    return sum(value for value in values if value != "none")
```

- [x] done
- [ ] to do

$x^2$ and \\(y\\)

| city | people |
|---|---:|
| Leuven | 102,851 |

<tool_call>{"name": "f"}</tool_call>
"""
NOTE = {"role": "user", "content": "At noon.", "metadata": {"title": "note.txt", "id": "file", "status": "done"}}
TABS = {"Batch": "Many texts, one schema", "Engine": "Batch lanes", "API": "Base URL"}


def tab_to(site: Site, condition: str) -> None:
    """Press Tab until the focused element fulfils a condition in JavaScript over `node`."""
    for _ in range(MAX_TABS):
        site.page.keyboard.press("Tab")
        if site.page.evaluate(f"(() => {{ const node = document.activeElement; return Boolean({condition}); }})()"):
            return
    raise AssertionError(f"the Tab key never reaches {condition}")


def test_a_question_is_asked_and_asked_again_by_keyboard_alone(site: Site) -> None:
    tab_to(site, "node.ariaLabel === 'Message'")
    site.page.keyboard.type("Hello!")
    site.page.keyboard.press("Enter")
    site.figures.wait_for()
    tab_to(site, "/retry/i.test(node.ariaLabel || node.title)")
    site.page.keyboard.press("Enter")
    site.page.locator(".branch").get_by_text("2 of 2").wait_for()
    tab_to(site, "node.ariaLabel === 'Previous version of turn 1'")
    site.page.keyboard.press("Enter")
    site.page.locator(".branch").get_by_text("1 of 2").wait_for()


def test_a_record_is_extracted_corrected_and_kept_by_keyboard_alone(site: Site) -> None:
    tab_to(site, "node.role === 'tab' && node.innerText === 'Chat'")
    for _ in range(2):
        site.page.keyboard.press("ArrowLeft")
    site.wait_for(lambda: site.page.url.endswith("#extract"))
    tab_to(site, "node.closest('#source')")
    site.page.wait_for_timeout(1000)  # Gradio empties a text box once more just after its tab has opened
    site.page.keyboard.insert_text(INVOICE)
    tab_to(site, "node.id === 'run'")
    site.page.keyboard.press("Enter")
    vendor = site.page.get_by_role("textbox", name="vendor")
    vendor.wait_for()
    tab_to(site, "node.ariaLabel === 'vendor'")
    site.page.keyboard.press("ControlOrMeta+a")
    site.page.keyboard.type("Northwind")
    tab_to(site, "node.ariaLabel === 'date'")
    site.page.get_by_text("typed by you", exact=True).wait_for()
    # The record was drawn again, and the value has kept the focus.
    site.wait_for(lambda: site.page.evaluate("document.activeElement.ariaLabel") == "date")
    # Back to the button above the table, as a person would; it leads to the marked values first.
    for _ in range(MAX_TABS):
        site.page.keyboard.press("Shift+Tab")
        label = site.page.evaluate("document.activeElement.matches('.approve') && document.activeElement.textContent")
        if label:
            site.page.keyboard.press("Enter")
        if label and label.startswith("Approve"):
            break
    site.page.get_by_text("values not opened: not counted as checked").wait_for()


def test_flagged_fields_are_stepped_through_by_keyboard(site: Site) -> None:
    """A text that says none of the fields: every value is a guess, and the review leads through them."""
    site.extract("The weather was fine and nobody bought anything.")
    button = site.page.get_by_role("button", name="to check")
    button.wait_for()
    button.click()
    first = site.page.evaluate("document.activeElement.dataset.pointer")
    site.page.keyboard.press("Enter")
    site.page.get_by_text("checked by you:").wait_for()
    assert site.page.evaluate("document.activeElement.dataset.pointer") != first
    site.page.keyboard.press("Alt+ArrowUp")


def check_views(site: Site) -> list[str]:
    """Return what axe finds in each view; the last one stays."""
    found = []
    switch = site.page.get_by_role("button", name="Light or dark")
    for width, height, is_dark in VIEWS:
        site.page.set_viewport_size({"width": width, "height": height})
        if is_dark:
            switch.click()
        found += [f"{width} px{', dark' * is_dark}: {line}" for line in list_violations(site.page)]
        if is_dark:
            switch.click()
    return found


def visit_all(site: Site) -> dict[str, list[str]]:
    """Every tab with something on it, and what axe says there."""
    found = {}
    site.import_chat([{"role": "user", "content": "Hello!"}, NOTE, {"role": "assistant", "content": WRITTEN}])
    site.ask("Hello!")
    site.figures.wait_for()
    found["Chat"] = check_views(site)
    site.toggle("Settings")
    found["Settings"] = check_views(site)
    site.toggle("Settings")
    site.extract(INVOICE)
    site.page.get_by_role("textbox", name="vendor").click()
    site.page.locator(".why").wait_for()
    site.unfold("describe your own")
    site.unfold("Options")
    found["Extract"] = check_views(site)
    for tab, words in TABS.items():
        site.go_to(tab)
        site.page.get_by_text(words).first.wait_for()
        if tab == "Batch":
            site.page.locator("#batch-files input[type=file]").set_input_files(SAMPLES)
            site.page.get_by_role("button", name="Run all").click()
            site.page.get_by_text("done in").wait_for()
            site.page.locator("[data-row]").first.click()
            site.page.locator("#batch-review .value").first.wait_for()
        found[tab] = check_views(site)
    return found


def test_axe_finds_nothing(site: Site) -> None:
    problems = [f"{tab}, {line}" for tab, lines in visit_all(site).items() for line in lines]
    assert not problems, "\n".join(problems)
