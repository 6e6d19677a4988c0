"""The extraction form in a real browser: from a pasted invoice to a checked record."""

import pytest

from tests.browser.site import Site

INVOICE = """Invoice INV-2041
Northwind Paper Ltd
Date: 2026-03-14

2 x Desk lamp, 49.50 EUR each
1 x Office chair, 180.00 EUR each

Total: 279.00 EUR
"""


def test_a_pasted_invoice_becomes_a_valid_record_with_evidence(site: Site) -> None:
    site.extract(INVOICE)
    site.page.get_by_text("schema-valid").wait_for(timeout=20_000)
    fields = site.page.locator("#fields")
    assert "INV-2041" in fields.inner_text() and "%" in fields.inner_text()
    assert fields.locator("mark").count() >= 3
    assert "grammar by" in site.page.locator("#figures").inner_text()


def test_a_schema_that_cannot_be_enforced_is_refused_beside_the_editor(site: Site) -> None:
    site.go_to("Extract")
    site.page.get_by_text("Every keyword is enforced").wait_for()
    editor = site.page.locator("#schema .cm-content")
    editor.click()
    editor.press("ControlOrMeta+a")
    site.page.keyboard.insert_text('{"type": "array", "$dynamicRef": "#a"}')
    site.page.get_by_text("Unsupported keyword “$dynamicRef” at the root.").wait_for()


def test_choosing_a_sample_brings_its_text_and_schema(site: Site) -> None:
    site.go_to("Extract")
    samples = site.page.get_by_label("Example text")
    if samples.count() == 0:
        pytest.skip("assets/samples is empty")
    samples.click()
    site.page.get_by_role("option").filter(has_text="contact").first.click()
    site.wait_for(lambda: bool(site.page.locator("#source textarea").input_value()), 5)
    site.wait_for(lambda: '"Contact"' in site.page.locator("#schema .cm-content").inner_text(), 5)


def test_an_empty_text_is_not_run(site: Site) -> None:
    site.extract("  ")
    site.page.get_by_text("There is no text.").wait_for()
