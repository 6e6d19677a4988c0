"""GBNF as llama.cpp writes it, which xgrammar reads only in part."""

import pytest

from grammar import GrammarSpec, InvalidGrammar
from grammar.backends.gbnf import rewrite_gbnf
from tests.grammar.vocabularies import accepts

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


def is_accepted(compiler, grammar, text):
    return accepts(compiler.compile(GrammarSpec.ebnf(grammar)).matcher(), compiler.vocabulary, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"a": {}, "é":\n\t"\\n|."}', True), ("{}", True), ('{"a":}', False), ('{"a":  true}', False)],
)
def test_the_white_space_of_llama_cpp_is_taken(byte_compiler, text, expected):
    assert is_accepted(byte_compiler, JSON, text) == expected


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
    assert all(is_accepted(byte_compiler, grammar, text) for text in accepted)
    assert not any(is_accepted(byte_compiler, grammar, text) for text in refused)


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
