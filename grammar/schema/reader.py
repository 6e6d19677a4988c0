"""Reads a JSON Schema into nodes: resolves references, rewrites older forms, drops keywords that cannot fail."""

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidGrammar, UnsupportedGrammar
from ..plan import ANNOTATION
from .dialect import Dialect, check_well_formed, detect_dialect, find_named, with_dialect
from .formats import CHECKED_FORMATS
from .identifiers import SIGNS, Identifiers
from .keywords import (
    ASSERTIONS,
    IN_PLACE_APPLICATORS,
    SCHEMA_KEYWORDS,
    SCHEMA_LIST_KEYWORDS,
    SCHEMA_MAP_KEYWORDS,
    STRUCTURE_KEYWORDS,
    Path,
    is_schema,
    join_pointer,
    map_subschemas,
    split_pointer,
)
from .node import Node, Schema, is_trivial, iterate_children, iterate_nodes, list_applied, list_related
from .rules import GROUNDED, apply_rules

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Schemas that apply to one value, each as often as references lead to it: a validator takes 10 ms for so many.
MAX_NUM_APPLIED = 10_000
# Dynamic anchor -> pointer of the outermost schema with that anchor among the schemas entered so far.
Scope = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Context:
    """Context in which a schema is read: its draft, and the targets of its dynamic references."""

    named: Dialect | None
    scope: Scope


def read_schema(document: dict[str, Any] | bool, text: str) -> Schema:
    """Return the root node of a well-formed schema, or `True` or `False`.

    Args:
        text: the document as JSON.

    Raises:
        InvalidGrammar: a reference leads to a value that is not a schema, or to a malformed schema.
        UnsupportedGrammar: a reference leads out of the document, or schemas lead only to each other.
    """
    return document if isinstance(document, bool) else _Reader(document, text).read()


class _Reader:
    def __init__(self, document: dict[str, Any], text: str) -> None:
        self._document = document
        self._dialect = detect_dialect(document)
        has_names = SIGNS.search(text) is not None
        self._identifiers = Identifiers(document if has_names else {}, self._dialect)
        # One node per pointer; where targets of dynamic references differ, one per pointer and context.
        self._nodes: dict[tuple[str, Scope], Schema] = {}
        # Nodes whose keywords have not been read yet.
        self._contexts: dict[Node, Context] = {}
        self._references: list[tuple[Node, Context, str, str]] = []

    def read(self) -> Schema:
        root = self._make(self._document, "", Context(find_named(self._document), self._extend((), "")))
        assert isinstance(root, Node), "booleans are not read here"
        self._expand([root])
        # The list grows during the loop, because targets contain further references.
        for node, context, keyword, ref in self._references:
            target = self._find_target(node, context, keyword, ref)
            # A second one beside it is a `$dynamicRef`.
            is_first = node.get("$ref", True) is None
            if target is node and (len(node.keywords) > 1 or not is_first):
                if is_first:
                    node.drop("$ref")  # the schema says the same without it
            elif isinstance(target, Node) and is_first:
                node.keywords["$ref"] = target
            else:
                node.keywords["allOf"] = [*node.get("allOf", ()), target]
                if is_first:
                    del node.keywords["$ref"]
            self._expand([target] if isinstance(target, Node) else [])
        if self._references:
            check_loops(root)
            check_paths(root)
        return root

    def _make(self, raw: Any, pointer: str, context: Context) -> Schema:
        """Return the node of a pointer; its keywords are read later."""
        if isinstance(raw, bool):
            return raw
        key = pointer, context.scope
        if key not in self._nodes:
            self._nodes[key] = node = Node(pointer, raw)
            self._contexts[node] = context
        return self._nodes[key]

    def _expand(self, pending: list[Node]) -> None:
        while pending:
            node = pending.pop()
            if node in self._contexts:
                self._read_keywords(node, self._contexts.pop(node))
                pending.extend(list_related(node))

    def _read_keywords(self, node: Node, context: Context) -> None:
        raw, node.keywords = node.keywords, {}
        if (named := find_named(raw)) is not None:
            context = Context(named, context.scope)
        if context.scope or self._identifiers.dynamic:
            context = Context(context.named, self._extend(context.scope, node.pointer))
        drops_siblings = context.named is not None and context.named.ignores_ref_siblings
        annotates = context.named is not None and context.named.annotates_formats
        is_alone = drops_siblings and isinstance(raw.get("$ref"), str)
        for keyword, value in raw.items():
            if keyword in REFERENCES and isinstance(value, str):
                self._references.append((node, context, keyword, value))
                # Keep `$ref` at its position among the keywords, and present for the rewriting rules.
                node.keywords["$ref"] = None
                node.origin.setdefault("$ref", keyword)
            elif keyword in ASSERTIONS and not (annotates and keyword == "format" and value in CHECKED_FORMATS):
                node.keywords[keyword] = self._read_value(node.pointer, keyword, value, context)
                if is_alone:
                    node.drop(keyword)
            elif keyword == GROUNDED and value is True:
                node.keywords[keyword] = value
            elif keyword not in STRUCTURE_KEYWORDS:
                node.keywords[keyword] = value
                node.drop(keyword, ANNOTATION)
        apply_rules(node)

    def _read_value(self, pointer: str, keyword: str, value: Any, context: Context) -> Any:
        def read(path: Path, each: Any) -> Any:
            return self._make(each, join_pointer(pointer, *path), context) if is_schema(each) else each

        return map_subschemas(keyword, value, read)

    def _extend(self, scope: Scope, pointer: str) -> Scope:
        """Return the dynamic anchors after entering the resource at a pointer."""
        own = self._identifiers.dynamic.get(self._identifiers.find_resource(pointer), {})
        known = {name for name, _ in scope}
        return (*scope, *(pair for pair in own.items() if pair[0] not in known))

    def _find_target(self, node: Node, context: Context, keyword: str, ref: str) -> Schema:
        target = self._identifiers.find_target(node.pointer, ref)
        if target is None:
            raise UnsupportedGrammar(node.pointer, keyword, "only references within the schema are followed")
        if keyword != "$ref":
            target = self._find_dynamic(target, context, keyword, ref)
        key = target, self._extend(context.scope, target)
        if key in self._nodes:
            return self._nodes[key]
        raw, is_in_place = find_raw(self._document, split_pointer(target))
        if not is_schema(raw):
            message = f"{keyword} at {node.pointer or '#'} points to {ref}, which is not a schema"
            raise InvalidGrammar(message, node.pointer)
        dialect = context.named or self._dialect
        if not is_in_place:
            check_target(raw, target, dialect)
            self._identifiers.add(raw, target, dialect)
        return self._make(raw, target, Context(context.named, key[1]))

    def _find_dynamic(self, target: str, context: Context, keyword: str, ref: str) -> str:
        name = "" if keyword == "$recursiveRef" else ref.partition("#")[2]
        own = self._identifiers.dynamic.get(self._identifiers.find_resource(target), {})
        return dict(context.scope).get(name, target) if own.get(name) == target else target


def check_target(schema: dict[str, Any] | bool, pointer: str, dialect: Dialect) -> None:
    """Raise InvalidGrammar for a malformed target that the meta-schema does not cover."""
    try:
        check_well_formed(schema if find_named(schema) else with_dialect(schema, dialect))
    except InvalidGrammar as error:
        raise InvalidGrammar(f"below {pointer}, {error}", pointer + (error.pointer or "")) from error


def find_raw(document: Any, parts: list[str]) -> tuple[Any, bool]:
    """Return (value at a JSON pointer or None, whether the document declares a schema there)."""
    is_in_place, holder = True, ""
    for part in parts:
        if isinstance(document, list) and part.isdecimal() and int(part) < len(document):
            is_in_place, holder = holder in SCHEMA_LIST_KEYWORDS, ""
            document = document[int(part)]
        elif isinstance(document, dict) and part in document:
            if is_in_place and not holder:
                holder = part
            else:
                is_in_place, holder = holder in SCHEMA_MAP_KEYWORDS, ""
            document = document[part]
        else:
            return None, False
    is_alone = not holder or (holder in SCHEMA_KEYWORDS and is_schema(document))
    return document, is_in_place and is_alone


def check_loops(root: Schema) -> None:
    """Raise UnsupportedGrammar for schemas that only refer to each other, for which a validator accepts every value.

    Follows references and applicators of the same value, up to a schema that asserts something else.
    """
    passing = {
        node: [
            *(each for each in list_applied(node) if not is_trivial(each)),
            *(each for keyword in ("anyOf", "oneOf") for each in node.get(keyword, ())),
        ]
        for node in iterate_nodes([root])
        if node.keywords and node.keywords.keys() <= {"$ref", "allOf", "anyOf", "oneOf"}
    }
    is_changed = True
    while is_changed:
        # In both directions, so that a long chain takes few rounds.
        is_changed = False
        for node in [*passing, *reversed(passing)]:
            nexts = passing.get(node)
            if nexts is not None and not (nexts and all(each in passing for each in nexts)):
                del passing[node]
                is_changed = True
    # Every remaining schema leads to another remaining one, so they form a loop, and a loop contains a reference.
    found: Node | None = next(iter(passing), None)
    on_way: set[Node] = set()
    while found is not None and not (found in on_way and "$ref" in found.keywords):
        on_way.add(found)
        found = next(after for after in passing[found] if isinstance(after, Node))
    if found is not None:
        raise UnsupportedGrammar(found.pointer, "$ref", "it refers back to itself without asserting anything")


def check_paths(root: Schema) -> None:
    """Raise UnsupportedGrammar where references apply too many schemas to one value: 40 pairs make 2 ** 40 of them.

    A reference back to a schema that is being counted adds nothing.
    """
    numbers: dict[Node, int] = {}
    # Each node twice: to begin it, and when what it applies has been counted.
    pending = [(node, False) for node in iterate_nodes([root])]
    while pending:
        node, is_counted = pending.pop()
        if is_counted:
            numbers[node] = 1 + sum(numbers[each] for each in list_in_place(node))
        elif node not in numbers:
            numbers[node] = 0
            pending += [(node, True), *((each, False) for each in list_in_place(node))]
        if numbers[node] > MAX_NUM_APPLIED:
            keyword = next(each for each in node.keywords if each in IN_PLACE_APPLICATORS)
            reason = f"references apply more than {MAX_NUM_APPLIED} schemas to one value"
            raise UnsupportedGrammar(node.pointer, keyword, reason)


def list_in_place(node: Node) -> list[Node]:
    """Return the nodes that apply to the same value as a node, under a condition or not."""
    if node.keywords.keys().isdisjoint(IN_PLACE_APPLICATORS):
        return []
    below = [child for path, child in iterate_children(node) if path[0] in IN_PLACE_APPLICATORS]
    return [each for each in (*below, node.get("$ref")) if isinstance(each, Node)]
