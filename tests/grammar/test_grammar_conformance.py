"""The official JSON Schema test suite, draft 2020-12: nothing invalid is accepted, and the README says how it went."""

from collections import Counter
from pathlib import Path

import pytest

from app.bench.grammar.suite_table import LOOSE, README, RIGHT, list_outcomes, make_table, replace_table

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
    # Of the others, 18 are of schemas that forbid everything, which are refused.
    assert counts[RIGHT] >= 1150


@needs_suite
def test_the_table_in_the_readme_holds(outcomes):
    text = README.read_text(encoding="utf-8")
    assert replace_table(text, make_table(outcomes)) == text, (
        "run python -m app.bench.grammar.suite_table FOLDER"
    )


def test_a_readme_without_the_marks_is_left_alone():
    with pytest.raises(ValueError, match="are not there"):
        replace_table("# grammar\n", "| a |")
