"""Specs and vocabularies validate and explain; the compiler caches, shares and limits."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grammar import (
    GrammarCompiler,
    GrammarLimits,
    GrammarSpec,
    InvalidGrammar,
    UnsupportedGrammar,
    Vocabulary,
    allocate_bitmask,
)
from grammar import compiler as compiler_module
from grammar.engines.llguidance_engines import LONG_GRAMMAR
from tests.grammar.vocabularies import make_byte_vocabulary


def make_compiler(**limits):
    return GrammarCompiler(make_byte_vocabulary(), GrammarLimits(**limits))


def test_the_cache_is_bounded_in_bytes_and_drops_the_least_recently_used():
    compiler = make_compiler(cache_bytes=800_000)
    specs = [GrammarSpec.json_schema({"const": number}) for number in range(5)]
    first, second = compiler.compile(specs[0]), compiler.compile(specs[1])
    assert compiler.compile(specs[0]) is first
    for spec in specs[2:]:
        compiler.compile(spec)
        assert compiler.compile(specs[0]) is first
    assert compiler.compile(specs[1]) is not second
    assert compiler._cache.num_bytes <= 800_000
    num_cached, num_retired = compiler.count_cached()
    assert num_cached + num_retired == len(specs) + 1 and num_retired > 0


def test_llguidance_compiles_long_grammars_in_the_pool_for_them():
    with ThreadPoolExecutor(1) as pool:
        compiler = GrammarCompiler(make_byte_vocabulary(), native_pool=pool)
        compiler.compile(GrammarSpec.json_schema({"enum": ["short"]}))
        assert not pool._threads
        compiler.compile(GrammarSpec.json_schema({"enum": ["long" * LONG_GRAMMAR]}))
        assert pool._threads


def test_a_grammar_larger_than_the_cache_is_compiled_but_not_kept():
    compiler = make_compiler(cache_bytes=10)
    spec = GrammarSpec.json_object()
    assert compiler.compile(spec) is not compiler.compile(spec)


def test_threads_that_want_the_same_spec_share_one_compile(monkeypatch):
    compiler, calls, results = make_compiler(), [], []
    real = compiler_module.compile_json_schema
    entered, release = threading.Event(), threading.Event()

    def slow_compile(spec, *rest):
        calls.append(spec)
        entered.set()
        assert release.wait(60)
        return real(spec, *rest)

    monkeypatch.setattr(compiler_module, "compile_json_schema", slow_compile)
    spec = GrammarSpec.json_schema({"const": "ab"})
    threads = [threading.Thread(target=lambda: results.append(compiler.compile(spec))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    release.set()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert len(set(map(id, results))) == 1 and len(results) == 4


def test_a_refusal_is_repeated_without_another_compile_until_it_is_forgotten(monkeypatch):
    compiler, calls = make_compiler(), []
    real = compiler_module.compile_json_schema
    monkeypatch.setattr(compiler_module, "compile_json_schema", lambda *rest: calls.append(rest) or real(*rest))
    monkeypatch.setattr(compiler_module, "MAX_NUM_REFUSALS", 2)
    specs = [GrammarSpec.json_schema({"$dynamicRef": f"#{name}"}) for name in "abc"]
    for spec in [specs[0], specs[0], *specs]:
        with pytest.raises(UnsupportedGrammar):
            compiler.compile(spec)
    assert len(calls) == 3
    with pytest.raises(UnsupportedGrammar):
        compiler.find(specs[2])
    assert compiler.find(specs[0]) is None
    monkeypatch.setattr(compiler_module, "REFUSED_S", 0.0)
    for _ in range(2):
        with pytest.raises(UnsupportedGrammar):
            compiler.compile(specs[0])
    assert len(calls) == 5


def test_a_fault_of_a_compile_is_not_taken_for_a_refusal(monkeypatch):
    compiler, spec = make_compiler(), GrammarSpec.json_schema({"const": "a"})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(compiler_module, "compile_json_schema", lambda *rest: 1 / 0)
        compiler.compile(spec)
    assert compiler.compile(spec).backend == "llguidance"


def test_a_spec_that_is_being_compiled_has_a_future_and_no_other(monkeypatch):
    compiler, spec, found = make_compiler(), GrammarSpec.json_schema({"const": "a"}), []
    compile_json_schema = compiler_module.compile_json_schema

    def compile_and_look(*arguments):
        found.append(compiler.find_pending(spec))
        return compile_json_schema(*arguments)

    monkeypatch.setattr(compiler_module, "compile_json_schema", compile_and_look)
    assert compiler.find_pending(spec) is None
    compiled = compiler.compile(spec)
    assert found[0].result(1) is compiled
    assert compiler.find_pending(spec) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec.ebnf('root ::= "a" | )'), "a parenthesis was never opened, at character 15"),
        (GrammarSpec.ebnf('root ::= "a'), "not GBNF, at character 9"),
        (GrammarSpec.ebnf('root "a"'), "not GBNF, at character 0"),
        (GrammarSpec.ebnf("root ::= missing"), "no rule 'missing'"),
        (GrammarSpec.ebnf('main ::= "a"'), "no rule 'root'"),
        (GrammarSpec.ebnf("root ::= []"), "class is empty, at character 9"),
        (GrammarSpec.ebnf("root ::= [9-0]"), "range from '9' to '0' is reversed"),
        (GrammarSpec.ebnf('root ::= ("a"'), "not closed before the rule, at character 13"),
        (GrammarSpec.ebnf('root ::= "a" | *'), "nothing to repeat, at character 15"),
        (GrammarSpec.ebnf('root ::= "a"{4,2}'), "2 repetitions are fewer than 4"),
        (GrammarSpec.ebnf('root ::= "a"{,2}'), "not GBNF, at character 12"),
        *(
            (GrammarSpec.ebnf(f"root ::= {text}"), "is no character; GBNF has .* at character 9")
            for text in (r"[\d]+", r"[^\w]", r'"\u12"', r'"\xg1"', r"[\U0000004]", r'"\ud800"', r'"\0"', r'"\é"')
        ),
        (GrammarSpec.ebnf("root ::= root"), "first token"),
        (GrammarSpec.regex("x(a"), r"^the regex cannot be parsed: 'x\(a': unclosed group, at character 2$"),
        (GrammarSpec.regex("[a"), "unclosed character class, at character 1$"),
        (GrammarSpec.regex("a\n(b"), r"unclosed group$"), (GrammarSpec.regex("[a[](b"), r"\(b': unclosed group$"),
        (GrammarSpec.regex(r"[^\s\S]b"), "^the grammar allows no first token: no text satisfies the rest of it$"),
    ],
)
def test_a_grammar_that_cannot_be_parsed_is_invalid_and_says_why(byte_compiler, spec, message):
    with pytest.raises(InvalidGrammar, match=message):
        byte_compiler.compile(spec)


@pytest.mark.parametrize("pattern", [r"(a)\1", "a(?=b)", r"\bfoo\b"])
def test_a_pattern_no_engine_takes_is_unsupported(byte_compiler, pattern):
    with pytest.raises(UnsupportedGrammar) as refusal:
        byte_compiler.compile(GrammarSpec.regex(pattern))
    assert refusal.value.keyword == "regex"


ITSELF = {}
ITSELF["items"] = ITSELF


def test_specs_of_the_same_schema_and_order_are_equal_and_hashable():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert GrammarSpec.json_schema(schema) == GrammarSpec.json_schema(json.dumps(schema, indent=2))
    assert len({GrammarSpec.json_schema(schema), GrammarSpec.json_schema(schema, whitespace="any")}) == 2
    assert GrammarSpec.json_schema(schema) != GrammarSpec.json_schema({**schema, "properties": {"a": {}, "b": {}}})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not valid JSON: .*line 1 column 2"),
        ('{"minimum": NaN}', "NaN is not a JSON number"),
        ('{"minimum": 1e999}', "not a JSON value"),
        ('{"properties": {"a": {"maxLength": 3, "maxLength": 300}}}', "has the key 'maxLength' twice"),
        ("[]", "an object or a boolean, not list"),
        (ITSELF, "not a JSON value"),
        ({"type": "strin"}, "malformed at /type"),
        ({"properties": {"a/b": {"minLength": -1}}}, "malformed at /properties/a~1b/minLength"),
        ({"type": {1, 2}}, "not a JSON value"),
        ({"title": "\ud800"}, "lone surrogate"),
        ({"title": "x" * 300_000}, "the limit is 262144 bytes"),
    ],
)
def test_a_malformed_schema_is_invalid_and_says_where(schema, message):
    with pytest.raises(InvalidGrammar, match=message):
        GrammarSpec.json_schema(schema)


@pytest.mark.parametrize("depth", [65, 5_000, 200_000])
def test_deep_nesting_is_refused_by_name_of_the_limit(depth):
    text = '{"items":' * depth + "{}" + "}" * depth
    with pytest.raises(InvalidGrammar, match=r"64 levels|262144 bytes"):
        GrammarSpec.json_schema(text)


def test_a_foreign_meta_schema_is_not_fetched():
    # Port 9 discards; a fetch would fail or hang instead of giving a spec.
    GrammarSpec.json_schema({"$schema": "http://127.0.0.1:9/schema", "type": "null"})


@pytest.mark.parametrize(
    ("make", "value", "options", "message"),
    [
        *((GrammarSpec.choice, value, {}, "choice") for value in ("yes", [], [""], ["a", 1])),
        *((make, "", {}, "not empty") for make in (GrammarSpec.regex, GrammarSpec.ebnf)),
        *((GrammarSpec.regex, text, {}, "that escapes nothing") for text in ("\\", "a\\", "a\\\\\\")),
        (GrammarSpec.regex, "a", {"backend": "guess"}, "outlines_core"),
        (GrammarSpec.json_object, "none", {}, "compact"),
        (GrammarSpec.json_schema, {}, {"property_order": "sorted"}, "choose schema or any"),
        (Vocabulary, [b"a", b""], {"eos_token_ids": []}, "EOS"),
        (Vocabulary, [b"a", b""], {"eos_token_ids": [2]}, "EOS"),
        (Vocabulary, [b"a", b""], {"eos_token_ids": [-1]}, "EOS"),
    ],
)
def test_what_a_spec_or_a_vocabulary_cannot_be_made_of_is_named(make, value, options, message):
    with pytest.raises(ValueError, match=message):
        make(value, **options)


def test_tokens_that_end_a_text_have_no_bytes():
    padded = Vocabulary([b"a"] * 33 + [b""], [33])
    assert (padded.size, padded.num_words) == (34, 2)
    assert Vocabulary([b"a", b"</s>"], [1]).token_bytes == (b"a", b"")


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
def test_a_fresh_bitmask_allows_exactly_the_vocabulary(size):
    bitmask = allocate_bitmask(2, size)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
    assert bitmask.dtype == np.int32
    assert bits[:, :size].all()
    assert not bits[:, size:].any()


def test_special_tokens_are_named_and_are_no_text():
    vocabulary = Vocabulary([b"a", b"", b""], [2], {"<call>": 1, "<eos>": 2})
    assert dict(vocabulary.special_tokens) == {"<call>": 1}
    with pytest.raises(ValueError, match="also has the bytes"):
        Vocabulary([b"a", b""], [1], {"<a>": 0})
    with pytest.raises(ValueError, match="ids are 0"):
        Vocabulary([b"a", b""], [1], {"<b>": 7})
