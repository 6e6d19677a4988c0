"""A schema is judged before anything is generated, with the place of what is wrong."""

import pytest

from app.extraction.schema_check import SchemaChecker
from grammar import GrammarError


@pytest.fixture(scope="module")
def checker() -> SchemaChecker:
    return SchemaChecker()


def test_a_good_schema_tells_its_backend_and_how_many_keywords_it_enforces(checker: SchemaChecker) -> None:
    checked = checker.check('{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}')
    assert checked.backend == "llguidance" and checked.num_enforced == 4


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"type": "object",}', "line 1 column 19"), ("[1]", "not list"), ("true", "object"),
        ('{"type": "strin"}', "/type"),
        ('{"type": "object", "properties": {"a": {"$dynamicRef": "#a"}}}', r"'\$dynamicRef' at /properties/a is not"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(checker: SchemaChecker, text: str, part: str) -> None:
    with pytest.raises(GrammarError, match=part):
        checker.check(text)
