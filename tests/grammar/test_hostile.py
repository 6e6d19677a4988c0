"""Hostile grammars: each is refused or compiled within its limits, and nothing of it stays behind."""

import itertools
import json
import time

import pytest

from grammar import GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec, UnsupportedGrammar, Vocabulary
from grammar.engines import by_name
from grammar.schema.emit import Emitter
from grammar.schema.reader import read_schema
from grammar.schema.refusal import MAX_NUM_PROBED, locate
from tests.grammar.vocabularies import accepts, allowed_tokens, make_byte_vocabulary, make_merged_vocabulary

# The slowest takes a fifth of that on a quiet core; a limit that failed would take minutes or for ever.
MAX_SECONDS = 15.0


def nest(depth, keyword):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: schema}
    return schema


def fan_out(depth, keyword, **extra):
    """Schemas of which each refers to the next one twice: 2 ** depth paths."""
    refs = {i: {"$ref": f"#/$defs/a{i + 1}"} for i in range(depth)}
    pair = (lambda ref: {"x": ref, "y": ref}) if keyword == "properties" else lambda ref: [ref, ref]
    layers = {f"a{i}": {keyword: pair(ref), **extra} for i, ref in refs.items()}
    return {"$ref": "#/$defs/a0", "$defs": {**layers, f"a{depth}": {"type": "object"}}}


def multiply(num_unions):
    pairs = [({f"a{i}": {"type": "null"}}, {f"b{i}": {"const": 1}}) for i in range(num_unions)]
    return {"allOf": [{"anyOf": [{"properties": properties} for properties in pair]} for pair in pairs]}


def number_texts(count):
    return [f"value {i:06d} of many" for i in range(count)]


json_schema = GrammarSpec.json_schema


def numbered(count, keyword, form, make_part):
    return json_schema({keyword: {form.format(i): make_part(i) for i in range(count)}})


def make_chain(depth, keyword="items", **options):
    refs = ({"$ref": f"#/$defs/d{i + 1}"} for i in range(depth))
    links = {f"d{i}": {keyword: [ref, True] if keyword == "anyOf" else ref} for i, ref in enumerate(refs)}
    end = {"properties": {"a": {}, "b": {}}}
    return json_schema({"$ref": "#/$defs/d0", "$defs": {**links, f"d{depth}": end}}, **options)


def make_element(number):
    return {"name": "a", "children": [{"ref": f"d{number}"}]}


def make_step(number):
    return {"type": "integer", "multipleOf": 9973 - 2 * number}


def string(**keywords):
    return json_schema({"type": "string", **keywords})


QUOTED, TEN_OF_20 = {"x-grounded": True}, {"contains": {"const": 1}, "minContains": 10, "maxItems": 20}
REFUSED = {
    "10,000 levels": (lambda: json_schema(nest(10_000, "items")), "deeper than 64"),
    "a schema that is itself": (lambda: json_schema({"$ref": "#"}), "refers back to itself"),
    "an enumeration of 1 MB": (lambda: json_schema({"enum": number_texts(45_000)}), "limit is 262144"),
    "a choice of 1 MB": (lambda: GrammarSpec.choice(number_texts(45_000)), "limit is 262144"),
    "a number of 5,000 digits": (lambda: json_schema('{"minimum": ' + "9" * 5000 + "}"), "4300 digits"),
    "look-ahead that backtracks": (
        lambda: string(pattern=r"^(?!(?:a|aa)+(?=a*z)c)[\s\S]*$"),
        "'pattern' at # .* backtracks more than 50000 steps",
    ),
    "a name that backtracks": (
        lambda: json_schema({"patternProperties": {"^(?:(?!b)[a-z]+)+$": False}}),
        "'patternProperties' at # .* backtracks",
    ),
    "a product of 2 ** 12": (lambda: json_schema(multiply(12)), "too large"),
    **{
        f"2 ** 40 paths of {name}": (lambda name=name: json_schema(fan_out(40, name)), "more than 10000 schemas")
        for name in ("allOf", "anyOf", "oneOf")
    },
    "8,000 properties": (lambda: numbered(8_000, "properties", "{}", lambda i: {}), "more than 12000 rules"),
    "8,000 objects in any order": (
        lambda: json_schema({"enum": [{"a": i, "b": 1} for i in range(8_000)]}, property_order="any"),
        "more than 12000 rules",
    ),
    "a chain of unions": (lambda: make_chain(2_500, "anyOf", property_order="any"), "too long a chain"),
    "200,000 letters in a row": (lambda: GrammarSpec.ebnf(f'root ::= "{"a" * 200_000}"'), "more than 65,525 symbols"),
}
BOUNDED = {
    "60 levels": lambda: json_schema(nest(60, "items")),
    "60 levels of not": lambda: json_schema(nest(60, "not")),
    "a recursive schema": lambda: json_schema({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    "2 ** 25 places": lambda: json_schema(fan_out(25, "properties", **{"not": {"required": ["z"]}})),
    "2 ** 25 sources": lambda: json_schema(fan_out(25, "properties", additionalProperties=QUOTED), source="a b"),
    "an enumeration of 200 kB": lambda: json_schema({"enum": number_texts(9_000)}),
    "a distinct enumeration": lambda: json_schema({"items": {"enum": number_texts(9_000)}, "uniqueItems": True}),
    "(.*a){30}": lambda: GrammarSpec.regex("(.*a){30}"),
    ".*a.{20}": lambda: GrammarSpec.regex(".*a.{20}"),
    "a million repeats": lambda: GrammarSpec.regex("((a{100}){100}){100}"),
    "states that double": lambda: GrammarSpec.regex("(a|b)*a(a|b){14}"),
    "300 letters of any script": lambda: GrammarSpec.regex(r"\w{1,300}"),
    "100,000 characters": lambda: string(minLength=100_000, maxLength=100_000),
    "a billion items": lambda: json_schema({"type": "array", "minItems": 10**9}),
    "a million properties": lambda: json_schema({"minProperties": 10**6}),
    "a billion of one property": lambda: json_schema(
        {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 10**9}
    ),
    "a number of 400 digits": lambda: json_schema({"minimum": 10**400}),
    "5,000 properties": lambda: numbered(5_000, "properties", "{}", lambda i: {}),
    "16,000 rules, each of the next": lambda: GrammarSpec.lark(
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(16_000)) + 'a16000: "a"'
    ),
    "4,000 references, each to the next": lambda: make_chain(4_000),
    "3,000 elements, each in the one before": lambda: GrammarSpec.xml(
        make_element(1), definitions={f"d{i}": make_element(i + 1) for i in range(1, 3_000)} | {"d3000": {"name": "a"}}
    ),
    "an ambiguous grammar": lambda: GrammarSpec.lark('start: e\ne: e e | "a" | e "a"'),
    "ambiguous GBNF": lambda: GrammarSpec.ebnf('root ::= e\ne ::= e e | [a-z] | e "a" e'),
    "400 classes in a row": lambda: GrammarSpec.ebnf("root ::= (" + "[a-z]+ " * 400 + ")*"),
    "400 classes in a row, xgrammar": lambda: GrammarSpec.ebnf(SLOW, "xgrammar"),
    "GBNF that takes any text": lambda: GrammarSpec.ebnf('root ::= ("x" | .)* "end"'),
    "200 overlapping patterns": lambda: numbered(200, "patternProperties", "^a.*{}.*b", lambda i: {}),
    "160 times ten matches of 20": lambda: numbered(160, "properties", "{}", lambda i: TEN_OF_20),
    "a multiple of 99999989": lambda: json_schema({"multipleOf": 99999989}),
    "50 multiples near 10,000": lambda: numbered(50, "properties", "{}", make_step),
    "multiples that meet": lambda: json_schema({"allOf": [{"multipleOf": n} for n in (9973, 9967, 9949)]}),
    "look-ahead that excludes everything": lambda: string(pattern="^(?=(a|aa)+$)(a+)+b$"),
}
# It takes seconds.
SLOWEST = ("400 classes in a row, xgrammar",)


@pytest.mark.parametrize("name", REFUSED)
def test_what_exceeds_a_limit_is_refused_by_name(merged_compiler, name):
    make_spec, message = REFUSED[name]
    start = time.process_time()
    with pytest.raises(GrammarError, match=message):
        merged_compiler.compile(make_spec())
    assert time.process_time() - start < MAX_SECONDS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SLOWEST else name for name in BOUNDED]
)
def test_what_looks_large_is_compiled_and_walked_within_the_limits_or_refused(merged_compiler, name):
    start = time.process_time()
    try:
        matcher = merged_compiler.compile(BOUNDED[name]()).matcher()
    except GrammarError as error:
        assert str(error)
    else:
        for _ in range(40):
            allowed = allowed_tokens(matcher, merged_compiler.vocabulary)
            if not allowed:
                assert matcher.error
                break
            # The letter wherever it may stand: it drives the patterns above to their worst.
            assert matcher.accept_token(ord("a") if ord("a") in allowed else allowed[-1])
            if matcher.is_terminated():
                break
    assert time.process_time() - start < MAX_SECONDS


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        (r"^(?!(?:ab|abab)+c(?=(?:ab)*z))[\s\S]*$", "backtracks more than 50000 steps over the value at #"),
        (r"^(?:(?!cd)[\s\S])*$", None),
    ],
)
def test_a_pattern_that_backtracks_ends_its_own_request_and_holds_no_other(merged_compiler, pattern, error):
    matcher = merged_compiler.compile(string(pattern=pattern)).matcher()
    start = time.thread_time()
    matcher.accept_token(ord('"'))
    for byte in b"ab" * 40:
        if not allowed_tokens(matcher, merged_compiler.vocabulary):
            break
        assert matcher.accept_token(byte)
    # The limits are in seconds of the processor; the library's own limit takes 90 s here.
    assert time.thread_time() - start < 5
    assert (matcher.error is None) if error is None else (error in matcher.error)
    assert accepts(matcher, merged_compiler.vocabulary, '"') is (error is None)


def test_the_schemas_that_are_tried_to_locate_a_complaint_are_bounded():
    tried = []
    shared = {f"d{i}": {"enum": [f"value {i} {j}" for j in range(20)]} for i in range(300)}
    fine = {f"p{i}": {"oneOf": [{"type": "null"}, {"$ref": f"#/$defs/d{i}"}]} for i in range(200)}
    schema = {"properties": {**fine, "x": {"oneOf": [{"type": "integer"}, {"minimum": 1}]}}, "$defs": shared}
    root = read_schema(schema, json.dumps(schema))
    refusal = locate(root, Emitter, lambda tried_one: tried.append(tried_one) or "", "oneOf constraints")
    assert refusal.node.pointer.startswith("/properties/") and refusal.keyword == "oneOf"
    assert sum(len(json.dumps(each)) for each in tried) < 2 * MAX_NUM_PROBED


SLOW = "root ::= (" + "[a-z]+ " * 400 + ")*"


def test_a_process_that_never_reads_is_killed_at_the_deadline(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(by_name, "WORKER_SCRIPT", script)
    monkeypatch.setattr(by_name, "START_SECONDS", 0.1)
    compiler = GrammarCompiler(make_byte_vocabulary(), GrammarLimits(max_xgrammar_s=0.1))
    with pytest.raises(UnsupportedGrammar, match="too large for xgrammar"):
        compiler.compile(GrammarSpec.ebnf('root ::= "a"', "xgrammar"))


def test_a_grammar_that_takes_too_much_memory_is_refused():
    limits = GrammarLimits(max_xgrammar_s=60, max_xgrammar_memory_bytes=2**20)
    compiler = GrammarCompiler(make_byte_vocabulary(), limits)
    with pytest.raises(UnsupportedGrammar, match="out of memory"):
        compiler.compile(GrammarSpec.ebnf(SLOW, "xgrammar"))


def walk_and_renew(compiler, spec, text):
    """Return the masks of a text, and how often its matcher was renewed because of a limit."""
    matcher, masks, num_renewed = compiler.compile(spec).matcher(), [], 0
    for byte in text:
        allowed = allowed_tokens(matcher, compiler.vocabulary)
        while matcher.error and matcher.renew():
            num_renewed += 1
            allowed = allowed_tokens(matcher, compiler.vocabulary)
        assert not matcher.error and matcher.accept_token(byte), matcher.error
        masks.append(allowed)
    return masks, num_renewed


def test_a_full_lexer_is_replaced_and_the_text_so_far_taken_again(merged_compiler):
    """What earlier requests wrote changes no mask; only a request that needs too much for itself fails."""
    spec = string(maxLength=60)
    compiler = GrammarCompiler(make_merged_vocabulary(), GrammarLimits(max_lexer_states=60))
    texts = [b'"' + bytes([97 + number]) * length + b'"' for number in range(9) for length in (3, 20, 12)]
    found = [walk_and_renew(compiler, spec, text) for text in texts]
    assert [masks for masks, _ in found] == [walk_and_renew(merged_compiler, spec, text)[0] for text in texts]
    assert sum(num_renewed for _, num_renewed in found) > 0
    with pytest.raises(AssertionError, match="too many states"):
        walk_and_renew(compiler, spec, b'"' + b"a" * 60)
    assert walk_and_renew(compiler, spec, texts[0])[0] == found[0][0]


def make_wordy_vocabulary():
    words = [bytes(each) for length in (2, 3) for each in itertools.product(b"aei st", repeat=length)]
    tokens = [bytes([byte]) for byte in range(256)] + words * 12
    return Vocabulary([*tokens, b""], [len(tokens)])


@pytest.mark.parametrize("max_mask_s", [1e-9, 1e9])
def test_what_an_earlier_request_needed_decides_nothing_for_the_next(max_mask_s):
    """A grammar whose masks need many items: each of its requests gets them, or none does."""
    limits = GrammarLimits(max_mask_s=max_mask_s, step_max_slow_items=10)
    compiler, outcomes = GrammarCompiler(make_wordy_vocabulary(), limits), []
    spec = GrammarSpec.ebnf('root ::= "12345" ([^x]+){0,9}')
    for _ in range(3):
        try:
            outcomes.append(walk_and_renew(compiler, spec, b"12345 tea")[0])
        except (AssertionError, GrammarError) as error:
            outcomes.append(str(error).partition("too slow")[1])
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert (outcomes[0] == "too slow") == (max_mask_s < 1)


@pytest.mark.parametrize(
    "grammar",
    ["([^x]+){0,99}", "([^x]{1,9}){1,9}", "((.*){0,30}){0,30}", "(([^x]+)+)+", "[a-z]{3} ([^x]+){0,99}"],
)
def test_an_ambiguous_grammar_is_refused_or_ends_within_its_time(grammar):
    """Nested repetitions took seconds for each mask, so the limits count time."""
    compiler = GrammarCompiler(make_wordy_vocabulary())
    start = time.thread_time()
    try:
        matcher = compiler.compile(GrammarSpec.ebnf(f"root ::= {grammar}")).matcher()
    except GrammarError as error:
        assert "too ambiguous" in str(error) or "too slow" in str(error)
    else:
        for byte in b"abc the cat sat":
            begun = time.thread_time()
            allowed = allowed_tokens(matcher, compiler.vocabulary)
            assert time.thread_time() - begun < 4
            if byte not in allowed:
                break
            assert matcher.accept_token(byte)
    assert time.thread_time() - start < 10


def test_programs_that_have_grown_leave_the_cache():
    compiler = GrammarCompiler(make_byte_vocabulary())
    compiled = compiler.compile(GrammarSpec.json_object())
    assert compiler.compile(GrammarSpec.json_object()) is compiled
    compiled.program.usage.note_mask(3.0)
    assert compiler.find(GrammarSpec.json_object()) is None
