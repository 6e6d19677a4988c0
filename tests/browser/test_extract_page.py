"""The workbench in a real browser: from a pasted invoice to a checked, corrected and kept record."""

import pytest

from tests.browser.site import Site

INVOICE = """Invoice INV-2041
Northwind Paper Ltd
Date: 2026-03-14

2 x Desk lamp, 49.50 EUR each
1 x Office chair, 180.00 EUR each

Total: 279.00 EUR
"""


def test_a_pasted_invoice_becomes_a_valid_record_that_lights_up_with_its_evidence(site: Site) -> None:
    site.extract(INVOICE)
    site.page.get_by_text("fits the schema").wait_for()
    # The parts of one update reach the page one after the other.
    number = site.page.get_by_role("textbox", name="invoice_number")
    site.wait_for(lambda: number.input_value() == "INV-2041")
    site.page.locator("#fields").get_by_text("%").first.wait_for()
    site.wait_for(lambda: site.page.locator("#evidence mark").count() >= 3)
    site.page.locator("#figures").get_by_text("grammar by").wait_for()
    mark = site.page.locator("#evidence mark", has_text="INV-2041")
    number.hover()
    site.wait_for(lambda: "lit" in str(mark.get_attribute("class")))
    site.page.locator("#evidence mark", has_text="Northwind").hover()
    row = site.page.get_by_role("row").filter(has=site.page.get_by_role("textbox", name="vendor"))
    site.wait_for(lambda: "lit" in str(row.get_attribute("class")))
    site.wait_for(lambda: "lit" not in str(mark.get_attribute("class")))
    site.go_to("Table")
    site.page.get_by_role("cell", name="INV-2041").wait_for()


def test_verbatim_texts_are_copied_from_the_source(site: Site) -> None:
    """The demo model reads dates well and would invent a vendor; under the grammar it cannot."""
    site.go_to("Extract")
    site.page.get_by_label("Verbatim texts").check()
    site.extract(INVOICE.replace("Northwind Paper Ltd", "Qzx-9 Vrooml & Sons"))
    site.page.get_by_text("fits the schema").wait_for()
    vendor = site.page.get_by_role("textbox", name="vendor")
    site.wait_for(lambda: bool(vendor.input_value()))
    assert vendor.input_value() in INVOICE.replace("Northwind Paper Ltd", "Qzx-9 Vrooml & Sons")


def test_a_corrected_record_is_checked_and_kept_and_later_runs_are_compared_with_it(site: Site) -> None:
    site.extract(INVOICE)
    keep, total = (
        site.page.get_by_role("button", name="Keep as verified"),
        site.page.get_by_role("textbox", name="total"),
    )
    total.fill("a lot")
    keep.click()
    site.page.get_by_text("not kept").wait_for()
    site.wait_for(lambda: "/total" in site.page.locator("#record-status").inner_text())
    total.press("Escape")  # undone
    site.page.get_by_role("textbox", name="vendor").fill("Northwind Ltd")
    keep.click()
    site.page.get_by_text("later runs on this text are compared with it").wait_for()
    site.page.get_by_text("by hand").wait_for()
    site.page.reload()
    site.extract(INVOICE)
    site.page.get_by_text("fields as in the record you verified").wait_for()
    site.page.get_by_text('verified: "Northwind Ltd"').wait_for()


def test_json_and_classes_follow_the_form(site: Site) -> None:
    site.go_to("Extract")
    page = site.page
    page.get_by_role("button", name="Details of date").click()
    page.locator(".schema-form .hint", has_text="format").get_by_text("llguidance").wait_for()
    page.get_by_text("schema keywords are enforced").click()
    page.get_by_role("row", name="/properties/line_items").first.wait_for()
    page.get_by_role("textbox", name="Name of field 1", exact=True).fill("number")
    page.get_by_role("button", name="Add field", exact=True).click()
    page.get_by_role("textbox", name="Name of field 7").fill("paid")
    kind = page.get_by_label("Kind of paid").or_(page.get_by_label("Kind of new field"))
    kind.select_option("choice")
    choices = page.get_by_label("paid: choices, one per line")
    assert choices.input_value() == "yes\nno"
    details = page.get_by_role("button", name="Details of paid")
    details.click()
    choices.wait_for(state="detached")
    details.click()
    choices.wait_for()
    kind.select_option("yes or no")
    site.go_to("JSON Schema")
    site.wait_for(lambda: '"paid"' in page.locator("#schema").inner_text() or scroll_down(site))


def scroll_down(site: Site) -> bool:
    """Editors draw only the lines in view."""
    site.page.locator("#schema .cm-scroller").evaluate("(box) => box.scrollBy(0, 200)")
    return False


def test_choosing_a_sample_brings_its_text_and_schema(site: Site) -> None:
    site.go_to("Extract")
    samples = site.page.get_by_label("Example text")
    if samples.count() == 0:
        pytest.skip("assets/samples is empty")
    samples.click()
    site.page.get_by_role("option").filter(has_text="contact").first.click()
    site.wait_for(lambda: bool(site.page.get_by_label("Text", exact=True).input_value()))
    site.wait_for(lambda: site.page.get_by_role("textbox", name="Name of field 2").input_value() == "email")


def test_a_text_longer_than_the_model_is_read_in_parts(site: Site) -> None:
    site.extract("\n".join(f"Line {number}: nothing to see here, move along please." for number in range(80)))
    site.page.get_by_text("overlapping parts").wait_for()
