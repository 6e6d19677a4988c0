"""Compile a structural tag: its graph, and each value in it by the route it would take alone."""

import json
import time
from collections.abc import Callable
from typing import Any

from ..backend import CompiledGrammar
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..plan import PlanEntry
from ..spec import GrammarSpec
from ..vocabulary import Vocabulary
from .graph import FreeText, Leaf, TagGraph
from .matcher import TagProgram
from .structural_tag import list_children, list_leaves, name_place
from .tokens import Straddles, TagTokens, TooManyCuts
from .walk import Walker

NAME = "structural_tag"
# Every byte that UTF-8 text may hold; a value's matcher is moved by single bytes where a token crosses its end.
_TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))
# The last byte of every value of a type: what has none of these types does not tell by itself where it ends.
_LAST_BYTES = {"object": b"}", "array": b"]", "string": b'"', "boolean": b"e", "null": b"l"}


def add_bytes(vocabulary: Vocabulary) -> Vocabulary:
    """Return a vocabulary that has every byte of text as a token, the missing ones behind its own."""
    known = {data for data in vocabulary.token_bytes if len(data) == 1}
    missing = [bytes((byte,)) for byte in _TEXT_BYTES if bytes((byte,)) not in known]
    if not missing:
        return vocabulary
    return Vocabulary(
        [*vocabulary.token_bytes, *missing], vocabulary.eos_token_ids, vocabulary.special_tokens
    )


def compile_tags(
    spec: GrammarSpec,
    tokens: TagTokens,
    inner_vocabulary: Vocabulary,
    compile_inner: Callable[[GrammarSpec], CompiledGrammar],
    max_seconds: float,
) -> CompiledGrammar:
    """Compile a structural tag, or raise GrammarError with a pointer into it.

    Args:
        inner_vocabulary: `add_bytes` of the vocabulary.
        compile_inner: compiles for that vocabulary.
        max_seconds: after which no further value is begun.
    """
    document = json.loads(spec.text)
    is_legacy = document["is_legacy"]
    graph = TagGraph(document["format"], tokens.vocabulary)
    specs: dict[str, GrammarSpec] = {}
    compiled: dict[str, CompiledGrammar] = {}
    deadline = time.monotonic() + max_seconds
    for pointer, leaf in list_leaves(document["format"], "/format"):
        if time.monotonic() > deadline:
            raise InvalidGrammar(
                f"the values of the structural tag take more than {max_seconds:g} s to compile"
            )
        place = name_place(pointer, is_legacy)
        specs[pointer] = spec.make_leaf(place, leaf)
        compiled[pointer] = compile_leaf(specs[pointer], join_leaf(place, leaf, is_legacy), compile_inner)
    leaves = {index: node for index, node in enumerate(graph.nodes) if isinstance(node, Leaf)}
    check_borders(graph, leaves, specs, is_legacy)
    walker = Walker(
        graph,
        {index: compiled[leaf.pointer].program.new_matcher for index, leaf in leaves.items()},
        find_byte_ids(inner_vocabulary),
    )
    known: dict[tuple[int, bytes | None], Straddles] = {}
    straddles: dict[int, Straddles] = {}
    for index, node in leaves.items():
        place, kind = name_place(node.pointer, is_legacy), specs[node.pointer].kind
        try:
            straddles[index] = find_straddles(walker, tokens, node, specs[node.pointer], known)
        except TooManyCuts as error:
            reason = (
                "its end could lie in too many tokens; put a const_string of several characters behind it"
            )
            raise UnsupportedGrammar(place, kind, reason) from error
    num_bytes = sum(each.program.size_bytes for each in compiled.values())
    program = TagProgram(walker, tokens, straddles, inner_vocabulary, num_bytes)
    program.masks.prepare()
    return CompiledGrammar(NAME, make_plan(document, compiled), program)


def compile_leaf(
    spec: GrammarSpec, place: str, compile_inner: Callable[[GrammarSpec], CompiledGrammar]
) -> CompiledGrammar:
    """Compile a value; errors name its place."""
    try:
        return compile_inner(spec)
    except UnsupportedGrammar as error:
        raise UnsupportedGrammar(place + error.pointer, error.keyword, error.reason) from error
    except InvalidGrammar as error:
        raise InvalidGrammar(f"{place}: {error}") from error


def join_leaf(place: str, leaf: dict[str, Any], is_legacy: bool) -> str:
    """Return the pointer to a value's own text."""
    if is_legacy:
        return place
    return f"{place}/{'pattern' if leaf['type'] == 'regex' else leaf['type']}"


def find_byte_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return for each byte the token of that byte, -1 where there is none."""
    ids = [-1] * 256
    for index, data in enumerate(vocabulary.token_bytes):
        if len(data) == 1:
            ids[data[0]] = index
    return tuple(ids)


def find_last_bytes(spec: GrammarSpec) -> bytes | None:
    """Return how every value of a spec ends, None when it does not tell by itself where that is."""
    if spec.kind != "json_schema":
        return None
    schema = json.loads(spec.text)
    return _LAST_BYTES.get(str(schema.get("type"))) if isinstance(schema, dict) else None


def check_borders(
    graph: TagGraph, leaves: dict[int, Leaf], specs: dict[str, GrammarSpec], is_legacy: bool
) -> None:
    """Refuse what would have to be read in a new way at every byte."""
    for node in graph.nodes:
        if isinstance(node, FreeText) and node.next is not None:
            for index in graph.list_next(node.next):
                if index in leaves:
                    place = name_place(leaves[index].pointer, is_legacy)
                    reason = (
                        "nothing marks the border between free text and this; put a const_string between them"
                    )
                    raise UnsupportedGrammar(place, "any_text", reason)
    for leaf in leaves.values():
        if find_last_bytes(specs[leaf.pointer]) is None:
            for index in graph.list_next(leaf.next):
                if isinstance(graph.nodes[index], Leaf | FreeText):
                    place = name_place(leaf.pointer, is_legacy)
                    reason = "nothing marks its end; put a const_string behind it, or give the schema a type"
                    raise UnsupportedGrammar(place, specs[leaf.pointer].kind, reason)


def find_straddles(
    walker: Walker,
    tokens: TagTokens,
    leaf: Leaf,
    spec: GrammarSpec,
    known: dict[tuple[int, bytes | None], Straddles],
) -> Straddles:
    """Return the tokens that may end a value and go on; the same for all leaves that go on alike."""
    last_bytes = find_last_bytes(spec)
    key = leaf.next, last_bytes if spec.kind == "json_schema" else b"\x00"
    if key not in known:
        first_bytes = frozenset(byte for byte in _TEXT_BYTES if walker.leads_on(leaf.next, bytes((byte,))))
        splits = tokens.find_splits(
            first_bytes,
            None if last_bytes is None else frozenset(last_bytes),
            lambda rest: walker.leads_on(leaf.next, rest),
        )
        known[key] = Straddles(tokens, splits, spec.kind == "json_schema")
    return known[key]


def make_plan(document: dict[str, Any], compiled: dict[str, CompiledGrammar]) -> tuple[PlanEntry, ...]:
    """Return the plan: each format by its place, and what is in the values by whom they would be enforced alone."""
    is_legacy = document["is_legacy"]
    entries: list[PlanEntry] = []

    def add(part: dict[str, Any], pointer: str) -> None:
        place = name_place(pointer, is_legacy)
        if pointer in compiled:
            inside = join_leaf(place, part, is_legacy)
            entries.extend(each._replace(pointer=inside + each.pointer) for each in compiled[pointer].plan)
        elif not is_legacy:
            entries.append(PlanEntry(place, part["type"], NAME))
        for where, child in list_children(part, pointer):
            add(child, where)

    if is_legacy:
        entries.append(PlanEntry("/triggers", "triggers", NAME))
    add(document["format"], "/format")
    return tuple(entries)
