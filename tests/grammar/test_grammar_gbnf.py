"""GBNF as llama.cpp writes it, which xgrammar reads only in part."""

import pytest

from grammar import GrammarSpec, InvalidGrammar
from grammar.backends.gbnf import rewrite_gbnf
from tests.grammar.vocabularies import check_texts

# The forms in which llama.cpp's own JSON grammar writes white space and escapes.
JSON = r"""
root   ::= object
value  ::= object | string | ("true" | "null") ws
object ::=
  "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes | )
  )* "\"" ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


def test_the_white_space_of_llama_cpp_is_taken(byte_compiler):
    good, bad = ['{"a": {}, "é":\n\t"\\n|."}', "{}"], ['{"a":}', '{"a":  true}']
    check_texts(byte_compiler, GrammarSpec.ebnf(JSON), good, bad)


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        ('root ::= ("a" | ) "b"', ["ab", "b"], ["a", ""]),
        ('root ::= (|"a") "b"', ["ab", "b"], ["a"]),
        ('root ::= "a" ("x" | | "y") "b"', ["axb", "ab", "ayb"], ["a"]),
        ('root ::= "a" |', ["a", ""], ["aa"]),
        ('root ::= a "." b\na ::= "x" |\n# | )\nb ::=\n  | "y"', ["x.y", ".", "x."], ["x", "xay"]),
        ('root ::= "a" . "b"', ["axb", "a\nb", "aéb", 'a"b', "a😀b"], ["ab", "axxb", "a"]),
        ('root ::= "a".*', ["a", "ab\n日"], ["b"]),
        ('root ::= c.\nc ::= "c"', ["cx"], ["c", "cxx"]),
        ('root ::= r.1 [.|)] ".|)"\nr.1 ::= "r"', ["r..|)", "r|.|)"], ["ra.|)", "rx.|)"]),
    ],
)
def test_empty_alternatives_and_any_characters(byte_compiler, grammar, accepted, refused):
    check_texts(byte_compiler, GrammarSpec.ebnf(grammar), accepted, refused)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a |" [|).]+ # | )\n  ("b" | c)\nc ::= (c.d)? (="(|)")\nc.d ::= "\\"." | "" | [\\]|.]',
        'root ::= TagDispatch(("a", b)) Macro()\nb ::= "."',
    ],
)
def test_what_needs_no_rewriting_stays_as_it_is(grammar):
    assert rewrite_gbnf(grammar) == grammar


def test_an_error_names_the_line_of_the_user(byte_compiler):
    with pytest.raises(InvalidGrammar, match=r'line 4, column 5: Rule "missing" is not defined'):
        byte_compiler.compile(GrammarSpec.ebnf('root ::= "a" |\na ::= .\n  |\n  | missing'))


@pytest.mark.parametrize("grammar", ["root ::=", 'root ::= # later\na ::= "x"'])
def test_a_rule_without_a_body_is_refused(grammar):
    with pytest.raises(InvalidGrammar, match="the rule 'root' says nothing"):
        rewrite_gbnf(grammar)
