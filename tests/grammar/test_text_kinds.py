"""Lark and GBNF grammars, and CSV tables."""

import pytest

from grammar import GrammarSpec, InvalidGrammar, PlanEntry, UnsupportedGrammar, read_spec
from tests.grammar.vocabularies import check_texts

COLUMNS = {"name": "string", "n": "integer", "x": "number", "ok": "boolean", "d": "date", "k": ["a,b", "c"]}
HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ('%llguidance {}\nstart: "a"', "%llguidance"), ("start: <[256]>", "<"), ("start: @other", "@"),
        ("start: gen\ngen[max_tokens=2]: /[a-z]+/", "max_tokens"),
        ('start: gen\n?gen [ stop="x"]: /.*/', "stop"), ("start: GEN\nGEN.2[lazy]: /a+/", "lazy"),
        ("start[capture]: /a+/", "capture"),
    ],
)
def test_lark_extensions_are_refused(text, sign):
    with pytest.raises(UnsupportedGrammar) as refusal:
        GrammarSpec.lark(text)
    assert refusal.value.keyword == sign


def test_schemas_in_lark_are_enforced_or_refused(byte_compiler):
    text = 'start: "<%json>" %json {"type": "array", "items": {"enum": ["a\\"}"]}} tail\ntail: "!" %json {"const": 1}'
    matcher = byte_compiler.compile(GrammarSpec.lark(text))
    for written, is_right in (('<%json>["a\\"}"]!1', True), ('<%json>["b"]!1', False), ("<%json>[]!2", False)):
        one = matcher.matcher()
        assert (all(map(one.accept_token, written.encode())) and one.is_completed()) == is_right
    for wrong, error in (
        ('start: %json {"uniqueItems": true}', UnsupportedGrammar), ("start: %json x", InvalidGrammar),
        ('start: %json {"type": "nonsense"}', InvalidGrammar), ('start: @j0 %json {"const": 1}', UnsupportedGrammar),
    ):  # fmt: skip
        with pytest.raises(error):
            byte_compiler.compile(GrammarSpec.lark(wrong))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('start: NAME " ::= " NAME\nNAME: /[a-z]+/', "lark"), ("// a ::= b\nstart: /::=/", "lark"),
        ('root ::= "start: x"', "ebnf"), ('# start: a\nroot ::= [/"] "::="', "ebnf"),
    ],
)
def test_a_grammar_is_ebnf_where_a_rule_says_so(byte_compiler, text, kind):
    spec = read_spec("grammar", text)
    assert spec.kind == kind
    byte_compiler.compile(spec)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"', ["1+(2+3)", "12"], ["1+", "(1"]),
        # These look like extensions, but are quoted.
        ('start: "<a@b>" /[<#]+/ "%json" // @ <\n', ["<a@b><#%json"], []),
        ('# a[lazy]\nstart: "b[c]" | a ["x"]\n// a[lazy]\na: /[a-z]/', ["qx"], []),
        *((f'{sign}start: value\n?value: "a" | "[" value "]"', ["[a]"], ["[a"]) for sign in "?!"),
    ],
)
def test_lark_grammars_are_context_free(byte_compiler, grammar, good, bad):
    compiled = check_texts(byte_compiler, GrammarSpec.lark(grammar), good, bad)
    assert compiled.plan == (PlanEntry("", "lark", "llguidance"),)


@pytest.mark.parametrize("text", ["", "  ", 'root: "a"', 'start: "a" ('])
def test_malformed_lark_is_invalid(byte_compiler, text):
    with pytest.raises(InvalidGrammar):
        byte_compiler.compile(GrammarSpec.lark(text))


@pytest.mark.parametrize("has_header", [True, False])
def test_csv_fields_keep_to_their_types(byte_compiler, has_header):
    good = ['Zoë,1,-2.5,true,2024-02-29,"a,b"', '"a ""b"", c",0,0,false,2023-12-31,c', ",1,1,true,2024-01-01,c"]
    bad = [
        *("a,1.5,1,true,2024-01-01,c", "a,1,1,yes,2024-01-01,c", "a,1,1,true,2023-02-29,c"),
        *("a,1,1,true,2024-01-01,d", "a,1,1,true,2024-01-01", "a,01,1,true,2024-01-01,c"), 'a"b,1,1,true,2024-01-01,c',
    ]
    above = f"{HEADER}\n" if has_header else ""
    spec = GrammarSpec.csv(COLUMNS, has_header=has_header)
    check_texts(byte_compiler, spec, [above + row for row in good], [above + row for row in bad])


def test_csv_delimiter_and_quoting_are_as_asked(byte_compiler):
    spec = GrammarSpec.csv({"a": "string", "b": "integer"}, delimiter=";", is_quoting=False)
    check_texts(byte_compiler, spec, ["a;b\nx, y;1\nz;2"], ['a;b\n"x";1', "a,b\nx,1"])


@pytest.mark.parametrize(
    "options",
    [
        {"columns": {}}, {"columns": {"a": "text"}}, {"columns": {"a": []}},
        {"columns": {"a": "string"}, "delimiter": "ab"}, {"columns": {"a,b": "string"}, "is_quoting": False},
        {"columns": {"a\nb": "string"}},
    ],
)
def test_malformed_tables_are_invalid(options):
    with pytest.raises(InvalidGrammar):
        GrammarSpec.csv(**options)


# The forms in which llama.cpp's own LLAMA_JSON grammar writes white space and escapes.
LLAMA_JSON = r"""
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


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (LLAMA_JSON, ['{"a": {}, "é":\n\t"\\n|."}', "{}"], ['{"a":}', '{"a":  true}']),
        ('root ::= ("a" | ) "b"', ["ab", "b"], ["a", ""]),
        ('root ::= (|"a") "b"', ["ab", "b"], ["a"]),
        ('root ::= "a" ("x" | | "y") "b"', ["axb", "ab", "ayb"], ["a"]),
        ('root ::= "a" |', ["a", ""], ["aa"]),
        ('root ::= a "." b\na ::= "x" |\n# | )\nb ::=\n  | "y"', ["x.y", ".", "x."], ["x", "xay"]),
        ('root ::= "a" . "b"', ["axb", "a\nb", "aéb", 'a"b', "a😀b"], ["ab", "axxb", "a"]),
        ('root ::= "a".*', ["a", "ab\n日"], ["b"]),
        ('root ::= c.\nc ::= "c"', ["cx"], ["c", "cxx"]),
        ('root ::= r-1 [.|)] ".|)"\nr-1 ::= "r"', ["r..|)", "r|.|)"], ["ra.|)", "rx.|)"]),
        ('root ::= [a-z]+ "ab" [^a]', ["xabb", "ababab-"], ["abb", "xaba"]),
        ('root ::= "a"{ 2} "b"{1, 2} ("c" | "d"){0} "e"{0,0}', ["aab", "aabb"], ["ab", "aabc", "aabe"]),
        ('root ::= "a"{ 2 , }{2}"b"+?', ["aaaa", "aaaaab"], ["aaa"]),
        (r'root ::= [\x41-\u0043a-c-9\-\]^]+ "\"\\\U0001F600"', ['Bb-9]^"\\😀'], ['D"\\😀', '5"\\😀']),
    ],
)
def test_gbnf_means_what_llama_cpp_reads(byte_compiler, grammar, accepted, refused):
    check_texts(byte_compiler, GrammarSpec.ebnf(grammar), accepted, refused)


def test_xgrammar_reads_gbnf_as_llguidance_does(byte_compiler):
    grammar = 'root ::= "a |" [|).]+ (c | ) # | )\nc ::= (c-d)?\nc-d ::= "\\"." | . [\\]|.]'
    for backend in ("llguidance", "xgrammar"):
        spec = GrammarSpec.ebnf(grammar, backend)
        assert byte_compiler.compile(spec).backend == backend
        check_texts(byte_compiler, spec, ["a |).", 'a ||".', "a |)x]", "a |.日|"], ["a |", "a |)x", 'a |)"', "a |]"])


@pytest.mark.parametrize("grammar", ["root ::=", 'root ::= # later\na ::= "x"'])
def test_a_rule_without_a_body_is_refused_by_xgrammar_too(byte_compiler, grammar):
    with pytest.raises(InvalidGrammar, match="the rule 'root' says nothing"):
        byte_compiler.compile(GrammarSpec.ebnf(grammar, "xgrammar"))
