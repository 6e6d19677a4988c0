"""Rewrite a schema into an equivalent one that the engines understand, and name what no engine enforces.

Every rule keeps the set of valid instances; tests compare both sides with independent validators.
Pointers in the result refer to the schema as the user wrote it.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..errors import InvalidGrammar, UnsupportedGrammar
from ..plan import ANNOTATION, ENGINE, PlanEntry, Problem
from .dialect import (
    DRAFT_2020,
    Dialect,
    check_well_formed,
    detect_dialect,
    is_dialect_named,
    with_dialect,
)
from .excluded_bounds import ExcludedBounds
from .identifiers import IDENTIFYING, Identifiers, write_reference
from .keywords import ASSERTIONS, STRUCTURE_KEYWORDS, iterate_children, join_pointer, split_pointer
from .loops import find_loop
from .node import Node
from .number_spelling import spell_numbers
from .problems import PATTERN_REASON, find_problems, is_beyond_doubles
from .rules import apply_rules

# Annotations that no reference can lead into.
TEXTS = ("title", "description", "$comment")
# Annotations that are instances: they may hold numbers that an engine cannot read at all.
INSTANCES = ("default", "examples")


@dataclass(frozen=True, slots=True)
class Normalised:
    """A rewritten schema with what was learnt on the way.

    Attributes:
        schema: the equivalent schema, in the forms of draft 2020-12, without identifiers: its references are
            JSON pointers.
        plan: one entry per keyword; the ones an engine has to enforce have `enforced_by` ENGINE.
        problems: keywords that llguidance does not enforce exactly.
        places: pointer into `schema` -> (pointer where the user wrote it, present keyword -> the user's).
        has_ids: a subschema has an identifier of its own, so that pointers do not tell all.
        drops_ref_siblings: what stands beside `$ref` asserts nothing.
    """

    schema: dict[str, Any] | bool
    plan: tuple[PlanEntry, ...]
    problems: tuple[Problem, ...]
    places: dict[str, tuple[str, dict[str, str]]]
    has_ids: bool
    drops_ref_siblings: bool


def normalise(schema: dict[str, Any] | bool) -> Normalised:
    """Return the equivalent schema, the plan and the problems of a well-formed schema.

    The result may share parts with `schema`, which the caller gives away.
    """
    walk = _Walk(schema)
    result = walk.rewrite(schema, "", "")
    walk.rewrite_targets(result)
    walk.problems.extend(walk.bounds.find_problems())
    if walk.has_one_of:
        # A narrower branch could make two of them look exclusive that are not.
        walk.problems.extend(walk.narrowed)
    else:
        # Constants, not ranges, show llguidance that branches of `oneOf` exclude each other.
        for schema in walk.enumerated:
            spell_numbers(schema)
    if isinstance(result, dict) and "$schema" in result:
        result["$schema"] = DRAFT_2020.uri
    return Normalised(
        result,
        tuple(walk.plan),
        tuple(walk.problems),
        walk.places,
        walk.has_ids,
        walk.drops_ref_siblings,
    )


@dataclass(slots=True)
class _Walk:
    """One pass over a document."""

    document: dict[str, Any] | bool
    plan: list[PlanEntry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    visited: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    # (pointer of the schema, its present form)
    refs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    identifiers: Identifiers = field(init=False)
    named: Dialect | None = field(init=False)  # the draft that `$schema` names, here or around
    guessed: Dialect | None = None
    has_ids: bool = False
    is_embedded: bool = True
    has_one_of: bool = False
    places: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)
    narrowed: list[Problem] = field(default_factory=list)
    enumerated: list[dict[str, Any]] = field(default_factory=list)
    bounds: ExcludedBounds = field(default_factory=ExcludedBounds)

    def __post_init__(self) -> None:
        self.identifiers = Identifiers(self.document)
        self.named = detect_dialect(self.document) if is_dialect_named(self.document) else None

    @property
    def drops_ref_siblings(self) -> bool:
        """Whether what stands beside `$ref` asserts nothing here."""
        return self.named is not None and self.named.ignores_ref_siblings

    def rewrite(
        self, schema: dict[str, Any] | bool, pointer: str, place: str, origin: dict[str, str] | None = None
    ) -> dict[str, Any] | bool:
        """Rewrite a schema and everything below it; `pointer` is where the user wrote it, `place` where it goes."""
        self.visited.add(pointer)
        if isinstance(schema, bool):
            return schema
        outer = self.named
        if pointer and is_dialect_named(schema):
            self.named = detect_dialect(schema)
        node = Node(copy_containers(schema), pointer, self.drops_ref_siblings, origin or {})
        self._drop_extensions(node)
        apply_rules(node)
        self._record(node)
        self.places[place] = pointer, node.origin
        for path, child in list(iterate_children(node.schema)):
            keyword = node.original_name(str(path[0]))
            old = new = join_pointer(pointer, keyword, *path[1:])
            if place != pointer or keyword != path[0]:
                new = join_pointer(place, *path)
            made = node.conjuncts.get(int(path[1])) if keyword == "allOf" else None
            put(node.schema, path, self.rewrite(child, pointer if made else old, new, made))
        self.named = outer
        return node.schema

    def rewrite_targets(self, result: dict[str, Any] | bool) -> None:
        """Write every `$ref` as a JSON pointer, and rewrite what only a `$ref` reaches, say under "components"."""
        # No name counts that stands where the document does not say that a schema is.
        self.is_embedded = False
        # The list grows while it is read: targets have references of their own.
        for pointer, schema in self.refs:
            ref = schema["$ref"]
            target = self.identifiers.find_target(pointer, ref)
            if target is None:
                raise UnsupportedGrammar(pointer, "$ref", "only references within the schema are followed")
            if not self.moved.isdisjoint(accumulate(target.split("/"), "{}/{}".format)):
                reason = f"its target {ref} lies under a keyword that has to be rewritten"
                raise UnsupportedGrammar(pointer, "$ref", reason)
            if target not in self.visited:
                self._rewrite_target(result, pointer, ref, target)
            schema["$ref"] = write_reference(target)
        if self.refs and isinstance(result, dict):
            self._check_loops(result)

    def _check_loops(self, result: dict[str, Any]) -> None:
        """Raise UnsupportedGrammar for schemas that lead only to each other."""
        place = find_loop(result)
        if place is not None:
            pointer, _ = self.places.get(place, (place, {}))
            raise UnsupportedGrammar(
                pointer, "$ref", "it leads back to itself, and asserts nothing on the way"
            )

    def _rewrite_target(self, result: Any, pointer: str, ref: str, target: str) -> None:
        parent, parts = result, split_pointer(target)
        for part in parts[:-1]:
            parent = descend(parent, part)
        found = descend(parent, parts[-1])
        if not isinstance(found, dict | bool):
            message = f"$ref at {pointer or '#'} points to {ref}, which is not a schema"
            raise InvalidGrammar(message, pointer)
        check_target(found, target, self._find_dialect())
        rewritten = self.rewrite(found, target, target)
        if isinstance(parent, list):
            parent[int(parts[-1])] = rewritten
        elif isinstance(parent, dict):
            parent[parts[-1]] = rewritten

    def _drop_extensions(self, node: Node) -> None:
        # llguidance reads options from the schema itself, some of which loosen it.
        if "x-guidance" in node.schema:
            node.drop("x-guidance", ANNOTATION)
        for keyword in INSTANCES:
            if is_beyond_doubles(node.schema.get(keyword)):
                node.drop(keyword, ANNOTATION)
        if node.pointer:
            # An engine would read what lies below in the forms of that draft, and all is in those of one by now.
            node.schema.pop("$schema", None)
            self.has_ids |= "$id" in node.schema or "id" in node.schema
        self._take_identifiers(node)
        if isinstance(node.schema.get("$ref"), str):
            self.refs.append((node.pointer, node.schema))

    def _take_identifiers(self, node: Node) -> None:
        """Take note of the names of a schema, and leave them out: an engine may read them in another draft."""
        if IDENTIFYING.isdisjoint(node.schema):
            return
        self.identifiers.add(node.schema, node.pointer, self._find_dialect(), self.is_embedded)
        for keyword in IDENTIFYING:
            if isinstance(node.schema.get(keyword), str):
                del node.schema[keyword]

    def _find_dialect(self) -> Dialect:
        """Return the draft here: the one that is named, else the one that the document looks like."""
        if self.named is not None:
            return self.named
        self.guessed = self.guessed or detect_dialect(self.document)
        return self.guessed

    def _record(self, node: Node) -> None:
        self.moved.update(node.moved)
        self.plan.extend(node.plan)
        is_made = len(node.conjuncts) == len(node.schema.get("allOf", ()))
        for keyword in node.schema:
            if keyword not in STRUCTURE_KEYWORDS and not (is_made and keyword == "allOf"):
                why = ENGINE if keyword in ASSERTIONS else ANNOTATION
                self.plan.append(PlanEntry(node.pointer, node.original_name(keyword), why))
        for keyword in TEXTS:
            # An engine would only read over them.
            if isinstance(node.schema.get(keyword), str):
                del node.schema[keyword]
        self.problems.extend(find_problems(node))
        self.bounds.add(node)
        self.has_one_of |= "oneOf" in node.schema
        if "enum" in node.schema or "const" in node.schema:
            self.enumerated.append(node.schema)
        if node.is_narrowed:
            self.narrowed.append(Problem(node.pointer, "pattern", PATTERN_REASON))


def check_target(schema: dict[str, Any] | bool, pointer: str, dialect: Dialect) -> None:
    """Raise InvalidGrammar for what is malformed where the meta-schema does not look."""
    try:
        check_well_formed(schema if is_dialect_named(schema) else with_dialect(schema, dialect))
    except InvalidGrammar as error:
        raise InvalidGrammar(f"below {pointer}, {error}", pointer + (error.pointer or "")) from error


def copy_containers(schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a schema and the lists and maps directly in it, so that subschemas can be replaced."""
    return {k: v.copy() if isinstance(v, dict | list) else v for k, v in schema.items()}


def put(schema: dict[str, Any], path: tuple[str | int, ...], child: dict[str, Any] | bool) -> None:
    """Put a subschema where `iterate_children` found it."""
    if len(path) == 1:
        schema[str(path[0])] = child
    else:
        schema[str(path[0])][path[1]] = child


def descend(value: Any, part: str) -> Any:
    """Follow one part of a JSON pointer; None where it leads nowhere."""
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
        return value[int(part)]
    return None
