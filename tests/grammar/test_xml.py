"""XML documents: what the grammar accepts, an XML parser that agrees, and descriptions that are refused."""

import json
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grammar import GrammarSpec, InvalidGrammar, UnsupportedGrammar, XmlValidator
from tests.grammar.vocabularies import SETTINGS, accepts

ORDER = {
    "name": "order",
    "attributes": {"id": {"type": "integer", "required": True}, "état": {"enum": ["open", 'a"b<&']}, "note": "string"},
    "children": [
        {"name": "customer", "text": {"type": "string", "min_length": 1, "max_length": 5}},
        {"name": "item", "min": 0, "max": None, "attributes": {"sku": {"pattern": "[A-Z[~]{2}\\d+", "required": True}},
         "text": "number"},
        {"choice": [{"name": "paid", "text": "boolean"}, {"name": "due", "text": "date"}, {"name": "free"}], "min": 0},
    ],
}  # fmt: skip
CUSTOMER = "<customer>Bob</customer>"
TREE = {"name": "n", "attributes": {"v": "string"}, "children": [{"ref": "n", "min": 0, "max": 2}]}

OPTIONAL = [{"name": "b", "min": 0, "max": None}, {"name": "c", "min": 0}]


def verdicts(compiler, spec, text):
    """Whether the grammar accepts a text, and whether the validator does."""
    compiled = compiler.compile(spec)
    return accepts(compiled.matcher(), compiler.vocabulary, text), XmlValidator(spec.text).is_valid(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'<order id="1">{CUSTOMER}</order>', True),
        (f'<order id="-7" état="a&quot;b&lt;&amp;" note="x &gt; y">\n  {CUSTOMER}\n\t<free/>\n</order>', True),
        (f'<order id="1">{CUSTOMER}<item sku="AB1">1.5</item><item sku="[~2">-2</item><paid>true</paid></order>', True),
        ('<order id="1"><customer>a&lt;b</customer><due>2024-02-29</due></order>', True),
        ('<order id="1"><customer>&amp;&amp;é日&gt;</customer><free></free></order>', True),
        (f"<order>{CUSTOMER}</order>", False),
        (f'<order id="1" état="shut">{CUSTOMER}</order>', False),
        ('<order id="1"><customer></customer></order>', False),
        ('<order id="1"><customer>&amp;&amp;&amp;&amp;&amp;&amp;</customer></order>', False),
        (f'<order id="1">{CUSTOMER}<item sku="ab1">1</item></order>', False),
        (f'<order id="1">{CUSTOMER}<item sku="AB1">one</item></order>', False),
        (f'<order id="1">{CUSTOMER}<due>2023-02-29</due></order>', False),
        (f'<order id="1">{CUSTOMER}<free/><free/></order>', False),
        (f'<order id="1"><free/>{CUSTOMER}</order>', False),
        (f'<order id="1">words {CUSTOMER}</order>', False),
        (f'<order id="1">{CUSTOMER}', False),
        (f'<order id="1">{CUSTOMER}</order><order/>', False),
        ('<order id="1"><customer>a<b</customer></order>', False),
        (f'<!DOCTYPE order><order id="1">{CUSTOMER}</order>', False),
    ],
)  # fmt: skip
def test_grammar_and_parser_agree_on_what_is_valid(byte_compiler, text, expected):
    assert verdicts(byte_compiler, GrammarSpec.xml(ORDER), text) == (expected, expected)


@pytest.mark.parametrize(
    "text",
    [
        f"<order note='x' id=\"1\">{CUSTOMER}</order>", f'<order  id="1" >{CUSTOMER}</order >',
        f'<order id="1"><!-- c -->{CUSTOMER}</order>', '<order id="1"><customer>&#66;ob</customer></order>',
        '<order id="1"><customer><![CDATA[Bob]]></customer></order>',
    ],
)
def test_of_equal_spellings_one_is_written(byte_compiler, text):
    assert verdicts(byte_compiler, GrammarSpec.xml(ORDER), text) == (False, True)


def test_white_space_and_declaration_are_as_asked(byte_compiler):
    declared = f'<?xml version="1.0" encoding="UTF-8"?>\n<order id="1">\n{CUSTOMER}\n</order>'
    plain, spaced = f'<order id="1">{CUSTOMER}</order>', f'<order id="1">   {CUSTOMER}</order>'
    for declaration, expected in [("none", (0, 1)), ("optional", (1, 1)), ("required", (1, 0))]:
        spec = GrammarSpec.xml(ORDER, declaration=declaration)
        for text, is_fine in zip((declared, plain), expected, strict=True):
            assert verdicts(byte_compiler, spec, text) == (is_fine, is_fine)
    for whitespace, expected in [("compact", (1, 0)), ("spaced", (1, 0)), ("any", (1, 1))]:
        spec = GrammarSpec.xml(ORDER, whitespace=whitespace)
        assert tuple(verdicts(byte_compiler, spec, text)[0] for text in (plain, spaced)) == expected
    assert not verdicts(byte_compiler, GrammarSpec.xml(ORDER), "\n" + plain)[0]


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (GrammarSpec.xml(TREE, definitions={"n": TREE}), ["<n/>", '<n v=""><n><n/></n><n/></n>'],
         ["<n><n/><n/><n/></n>", "<n><m/></n>"]),
        (GrammarSpec.xml({"name": "a", "children": [{"sequence": OPTIONAL, "min": 2, "max": None}]}),
         ["<a/>", "<a><b/><c/><b/></a>", "<a><c/><c/><c/></a>"], ["<a><d/></a>"]),
    ],
)  # fmt: skip
def test_elements_may_contain_themselves_and_what_may_be_nothing_may_be_repeated(byte_compiler, spec, good, bad):
    for text in (*good, *bad):
        assert verdicts(byte_compiler, spec, text) == (text in good, text in good)


@SETTINGS
@given(text=st.text(max_size=12), attribute=st.text(max_size=12))
def test_any_text_survives_its_escapes(byte_compiler, text, attribute):
    """Output of ElementTree is accepted exactly where XML can carry it and no equal spelling is another one."""
    node = ElementTree.Element("a", {"b": attribute})
    node.text = text
    written = ElementTree.tostring(node, "unicode", short_empty_elements=False)
    spec = GrammarSpec.xml({"name": "a", "attributes": {"b": "string"}, "text": "string"})
    is_accepted, is_valid = verdicts(byte_compiler, spec, written)
    is_plain = not any((ord(c) < 32 and c not in "\n\t") or c in "\ufffe\uffff" for c in text)
    is_plain &= not any(ord(c) < 32 or c in "\ufffe\uffff" for c in attribute)
    assert is_accepted == is_plain
    assert is_valid or not is_accepted


@pytest.mark.parametrize("kind", ["lolz", "file", "parameter"])
def test_the_validator_resolves_no_entities(kind):
    doctype = {
        "lolz": '<!DOCTYPE a [<!ENTITY x "yyyyyyyyyy"><!ENTITY z "&x;&x;&x;">]>',
        "file": '<!DOCTYPE a [<!ENTITY z SYSTEM "file:///etc/passwd">]>',
        "parameter": '<!DOCTYPE a [<!ENTITY % z "x">]>',
    }[kind]
    validator = XmlValidator(GrammarSpec.xml({"name": "a", "text": "string"}).text)
    assert validator.is_valid("<a>z</a>") and not validator.is_valid(f"{doctype}<a>&z;</a>")
    assert not validator.is_valid(f"{doctype}<a></a>")


def test_the_validator_refuses_what_is_nested_too_deeply_for_python():
    deep = "<n>" * 5000 + "</n>" * 5000
    deep_spec = GrammarSpec.xml(TREE | {"children": [{"ref": "n", "min": 0}]}, definitions={"n": TREE})
    assert not XmlValidator(deep_spec.text).is_valid(deep)


@pytest.mark.parametrize(
    ("root", "options", "words"),
    [
        ([], {}, "/root: Expected `object`, got `array`"),
        ({}, {}, "has a name"),
        ({"name": "a>"}, {}, "not an XML name"),
        ({"name": "a", "txt": "string"}, {}, "unknown field `txt`"),
        ({"name": "a", "text": "float"}, {}, "Invalid enum value 'float'"),
        ({"name": "a", "text": {"enum": []}}, {}, "text/enum: Expected `array` of length >= 1"),
        ({"name": "a", "text": {"enum": ["\x00"]}}, {}, r"U\+0000"),
        ({"name": "a", "text": {"type": "string", "pattern": "x"}}, {}, "exactly one of"),
        ({"name": "a", "text": {"type": "string", "min_length": 3, "max_length": 2}}, {}, "larger than"),
        ({"name": "a", "children": []}, {}, "children: Expected `array` of length >= 1"),
        ({"name": "a", "children": [{"name": "b", "min": 2, "max": 1}]}, {}, "larger than max"),
        ({"name": "a", "children": [{"ref": "b"}]}, {}, "not among the definitions"),
        ({"name": "a", "min": 0}, {}, "stands alone"),
        ({"name": "a"}, {"declaration": "yes"}, "declaration"),
        ({"name": "a"}, {"definitions": {"b": {"name": "b", "children": [{"ref": "b"}]}}}, "without end"),
    ],
)
def test_a_malformed_description_is_invalid_and_says_where(root, options, words):
    with pytest.raises(InvalidGrammar, match=words):
        GrammarSpec.xml(root, **options)


@pytest.mark.parametrize(
    ("root", "place", "keyword"),
    [
        ({"name": "x:a"}, ["root"], "name"),
        ({"name": "xmlns"}, ["root"], "name"),
        ({"name": "a", "text": "string", "children": [{"name": "b"}]}, ["root"], "text"),
        ({"name": "a", "text": {"pattern": r"\p{Lu}"}}, ["root", "text"], "pattern"),
        ({"name": "a", "text": {"pattern": "[[:alpha:]]"}}, ["root", "text"], "pattern"),
        ({"name": "a", "text": {"type": "integer", "max_length": 3}}, ["root", "text"], "max_length"),
    ],
)
def test_what_is_not_written_is_refused_with_its_place(root, place, keyword):
    with pytest.raises(UnsupportedGrammar) as refusal:
        GrammarSpec.xml(root)
    assert refusal.value.pointer.split("/")[1:] == place
    assert refusal.value.keyword == keyword


def test_hostile_descriptions_are_refused(byte_compiler):
    deep = {"name": "a"}
    for _ in range(40):
        deep = {"name": "a", "children": [deep]}
    with pytest.raises(InvalidGrammar, match="nested deeper than 32"):
        GrammarSpec.xml(deep)
    with pytest.raises(InvalidGrammar, match="/max: Expected `int` <= 10000"):
        GrammarSpec.xml({"name": "a", "children": [{"name": "b", "max": 10**9}]})
    wide = {"name": "a", "children": [{"sequence": [{"name": "b", "max": 10_000}] * 50, "max": 10_000}]}
    spec = GrammarSpec.xml(wide)
    assert byte_compiler.compile(spec).backend == "llguidance"
    assert json.loads(spec.text)["root"]["name"] == "a"
