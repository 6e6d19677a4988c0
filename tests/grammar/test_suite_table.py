"""The JSON-Schema-Test-Suite: no invalid instance is accepted, and the table of outcomes holds."""

from collections import Counter
from pathlib import Path

import pytest

from tests.grammar import suite_table
from tests.grammar.suite_table import LOOSE, RIGHT, TABLE_FILE, list_outcomes, replace_table

SUITE = Path(__file__).parents[2].parent / "shared" / "data" / "json_schema_test_suite" / "draft2020-12"
needs_suite = pytest.mark.skipif(
    not any(SUITE.glob("*.json")), reason="the JSON-Schema-Test-Suite is not beside the repository"
)


@pytest.fixture(scope="module")
def outcomes(byte_compiler):
    return list(list_outcomes(SUITE, byte_compiler))


@needs_suite
def test_no_schema_accepts_an_invalid_instance(outcomes, capsys):
    counts = Counter(each.outcome for each in outcomes)
    with capsys.disabled():
        print(f"\nJSON-Schema-Test-Suite 2020-12: {dict(counts)}")
    assert [each for each in outcomes if each.outcome == LOOSE] == []
    # 18 of the others belong to schemas that forbid everything, which are refused.
    assert counts[RIGHT] >= 1150


@needs_suite
def test_the_table_in_the_readme_holds(outcomes):
    text = TABLE_FILE.read_text(encoding="utf-8")
    assert replace_table(text, suite_table.make_table(outcomes)) == text, (
        "run python -m tests.grammar.suite_table FOLDER"
    )
