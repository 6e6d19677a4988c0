"""The record as HTML: escaped, marked once, and honest about what is not known."""

import dataclasses
import re
from typing import Any

import pytest

from app.extraction import ExtractionResult, Extractor
from app.extraction.json_spans import scan
from app.ui.record_view import (
    EMPTY,
    render_fields,
    render_figures,
    render_verdict,
    show_pointer,
)
from tests.fakes import FakeEngine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
}


async def extract(
    text: str, record: str = '{"name": "Ada <b>", "age": 36}', **options: Any
) -> ExtractionResult:
    return await Extractor(FakeEngine(record=record), **options).extract(SCHEMA, text)


async def test_values_and_source_are_escaped_and_linked() -> None:
    text = "<i>Ada <b>, 36"
    page = render_fields((result := await extract(text)).leaves, result, text)
    assert "<i>" not in page.replace("<i style", "") and "&lt;i&gt;" in page
    assert re.findall(r'<mark data-field="(\d)"[^>]*>([^<]*)<', page) == [("0", "Ada &lt;b&gt;"), ("1", "36")]
    assert page.count('<tr data-field="0">') == 1 and "78%" in page


async def test_a_value_without_evidence_says_so() -> None:
    page = render_fields((result := await extract("nobody")).leaves, result, "nobody")
    assert "not in the text" in page and "<mark" not in page


def test_a_growing_record_shows_values_without_judging_them() -> None:
    page = render_fields(scan('{"name": "Ad').leaves, None, "Ada")
    assert "Ad" in page and "confidence" not in page.replace("Confidence", "") and "<mark" not in page


def test_no_value_yet_shows_the_empty_state() -> None:
    assert render_fields([], None, "") == EMPTY


def test_lists_are_grouped_and_counted_from_one() -> None:
    page = render_fields(scan('{"items": [{"a": 1}, {"a": 2}], "n": 1}').leaves, None, "")
    assert re.findall(r'class="group"><th colspan="3">([^<]*)<', page) == ["items › 1", "items › 2"]


def test_overlapping_evidence_is_marked_once() -> None:
    leaves = scan('{"a": "New York", "b": "York"}').leaves
    result = dataclasses.replace(EMPTY_RESULT, leaves=tuple(leaves))
    assert render_fields(leaves, result, "New York").count("<mark") == 0


@pytest.mark.parametrize(
    ("options", "record", "badge"),
    [
        ({}, '{"name": "Ada", "age": 36}', "schema-valid"),
        ({"max_tokens": 9}, '{"name": "Ada", "age": 36}', "cut off"),
        ({}, '{"age": "x"}', "not valid"),
    ],
)
async def test_the_badge_tells_the_verdict_in_words(options: dict[str, Any], record: str, badge: str) -> None:
    assert f">{badge}<" in render_verdict(await extract("Ada", record, **options))


async def test_added_limits_and_the_backend_are_stated() -> None:
    line = render_figures(await extract("Ada"))
    assert "added limits: 200 characters a text" in line and "grammar by fakegrammar" in line
    assert "added limits" not in render_figures(await extract("Ada", limits=None))


def test_pointers_are_shown_as_paths() -> None:
    assert show_pointer("/a~1b/0/c<") == "a/b › 1 › c&lt;"


EMPTY_RESULT = ExtractionResult(
    source="", record={}, raw="", valid=True, errors=(), finish_reason="stop", confidence={}, evidence={}, leaves=(),
    bounds=None,
)  # fmt: skip
