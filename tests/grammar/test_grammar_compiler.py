"""GrammarCompiler: caching, single flight, limits."""

import threading

import pytest

from grammar import GrammarCompiler, GrammarLimits, GrammarSpec, InvalidGrammar, UnsupportedGrammar
from grammar import compiler as compiler_module
from tests.grammar.vocabularies import allowed_tokens, make_byte_vocabulary


def make_compiler(**limits):
    return GrammarCompiler(make_byte_vocabulary(), GrammarLimits(**limits), num_threads=1)


def test_a_spec_is_compiled_once():
    compiler = make_compiler()
    first = compiler.compile(GrammarSpec.json_schema({"type": "null"}))
    assert compiler.compile(GrammarSpec.json_schema('{"type":  "null"}')) is first


def test_the_cache_is_bounded_in_bytes_and_drops_the_least_recently_used():
    compiler = make_compiler(cache_bytes=200_000)
    specs = [GrammarSpec.json_schema({"const": number}) for number in range(5)]
    first, second = compiler.compile(specs[0]), compiler.compile(specs[1])
    assert compiler.compile(specs[0]) is first
    for spec in specs[2:]:
        compiler.compile(spec)
        assert compiler.compile(specs[0]) is first
    assert compiler.compile(specs[1]) is not second
    assert compiler._cache.num_bytes <= 200_000


def test_a_grammar_larger_than_the_cache_is_compiled_but_not_kept():
    compiler = make_compiler(cache_bytes=10)
    spec = GrammarSpec.json_object()
    assert compiler.compile(spec) is not compiler.compile(spec)


def test_threads_that_want_the_same_spec_share_one_compile(monkeypatch):
    compiler, calls, results = make_compiler(), [], []
    real = compiler_module.compile_spec
    entered, release = threading.Event(), threading.Event()

    def slow_compile(spec, *rest):
        calls.append(spec)
        entered.set()
        assert release.wait(60)
        return real(spec, *rest)

    monkeypatch.setattr(compiler_module, "compile_spec", slow_compile)
    spec = GrammarSpec.choice(["a", "b"])
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
    real = compiler_module.compile_spec
    monkeypatch.setattr(compiler_module, "compile_spec", lambda *rest: calls.append(rest) or real(*rest))
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
    compiler, spec = make_compiler(), GrammarSpec.choice(["a"])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(compiler_module, "compile_spec", lambda *rest: 1 / 0)
        compiler.compile(spec)
    assert compiler.compile(spec).backend == "outlines_core"


def test_many_threads_may_compile_different_specs():
    compiler, errors = make_compiler(), []

    def compile_some(seed):
        for number in range(20):
            spec = GrammarSpec.json_schema({"const": f"{seed % 2} {number}"})
            matcher = compiler.compile(spec).matcher()
            if allowed_tokens(matcher, compiler.vocabulary) != [ord('"')]:
                errors.append((seed, number))

    threads = [threading.Thread(target=compile_some, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


@pytest.mark.parametrize("text", ['root ::= root "a"', "root ::= root", "root ::= []"])
def test_a_grammar_without_a_first_token_is_invalid(byte_compiler, text):
    with pytest.raises(InvalidGrammar, match="no first token"):
        byte_compiler.compile(GrammarSpec.ebnf(text))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec.ebnf('root ::= "a" | )'), "ebnf"),
        (GrammarSpec.ebnf('root ::= "a'), "line 1, column 12"),
        (GrammarSpec.ebnf("root ::= missing"), '"missing" is not defined'),
        (GrammarSpec.ebnf('main ::= "a"'), '"root" is not found'),
        (GrammarSpec.regex("x(a"), r"^the regex cannot be parsed: 'x\(a': unclosed group, at character 2$"),
        (GrammarSpec.regex("[a"), "unclosed character class, at character 1$"),
        (GrammarSpec.regex("a\n(b"), r"unclosed group$"),
    ],
)
def test_a_grammar_that_cannot_be_parsed_is_invalid_and_says_why(byte_compiler, spec, message):
    with pytest.raises(InvalidGrammar, match=message):
        byte_compiler.compile(spec)


@pytest.mark.parametrize("pattern", ["\\", "a\\", "a\\\\\\"])
def test_a_backslash_at_the_end_is_no_pattern(byte_compiler, pattern):
    with pytest.raises(InvalidGrammar, match="backslash that escapes nothing"):
        byte_compiler.compile(GrammarSpec.regex(pattern))
    with pytest.raises(InvalidGrammar, match="at /items: its pattern ends with a backslash"):
        byte_compiler.compile(GrammarSpec.json_schema({"items": {"type": "string", "pattern": pattern}}))


@pytest.mark.parametrize("pattern", [r"(a)\1", "a(?=b)", r"\bfoo\b"])
def test_a_pattern_no_engine_takes_is_unsupported(byte_compiler, pattern):
    with pytest.raises(UnsupportedGrammar) as refusal:
        byte_compiler.compile(GrammarSpec.regex(pattern))
    assert refusal.value.keyword == "regex"


def test_xgrammar_is_given_only_bounded_grammars():
    compiler = make_compiler()
    with pytest.raises(UnsupportedGrammar, match="repetitions add up to 5000"):
        compiler.compile(GrammarSpec.ebnf("root ::= [a-z]{1,5000}"))
    with pytest.raises(UnsupportedGrammar, match="16384"):
        compiler.compile(GrammarSpec.ebnf('root ::= "' + "a" * 20_000 + '"'))


def test_a_matcher_that_hits_a_limit_allows_nothing_and_says_why():
    compiler = make_compiler(step_lexer_fuel=60)
    pattern = "|".join(f"[a-z]{{{number}}}{number}" for number in range(1, 40))
    try:
        matcher = compiler.compile(GrammarSpec.regex(pattern, backend="llguidance")).matcher()
    except InvalidGrammar as error:
        assert "limit" in str(error)
        return
    for byte in b"abcdefghijklmnop":
        if matcher.error is not None:
            break
        allowed_tokens(matcher, compiler.vocabulary)
        matcher.accept_token(byte)
    assert matcher.error
    assert allowed_tokens(matcher, compiler.vocabulary) == []
