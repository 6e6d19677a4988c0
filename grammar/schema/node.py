"""A JSON Schema as a graph: one node for each schema object, with its subschemas and the target of its `$ref`."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..plan import NO_EFFECT, PlanEntry
from .keywords import SCHEMA_KEYWORDS, SCHEMA_LIST_KEYWORDS, SCHEMA_MAP_KEYWORDS, Path, iterate_subschemas

_RELATING = SCHEMA_KEYWORDS | SCHEMA_LIST_KEYWORDS | SCHEMA_MAP_KEYWORDS | {"$ref"}


class Node:
    """One schema object. Nodes are compared by identity; after reading, nothing in them changes.

    Attributes:
        pointer: where the user wrote it.
        keywords: its assertions. Subschemas in them are nodes, `True` or `False`; `$ref` holds its target.
        origin: present keyword -> the keyword the user wrote, where a rule renamed it.
        notes: plan entries of the keywords that no engine has to enforce.
    """

    __slots__ = ("keywords", "notes", "origin", "pointer")

    def __init__(self, pointer: str, keywords: dict[str, Any]) -> None:
        self.pointer = pointer
        self.keywords = keywords
        self.origin: dict[str, str] = {}
        self.notes: list[PlanEntry] = []

    def __repr__(self) -> str:
        return f"Node({self.pointer!r}, {list(self.keywords)})"

    def get(self, keyword: str, default: Any = None) -> Any:
        return self.keywords.get(keyword, default)

    def written_name(self, keyword: str) -> str:
        return self.origin.get(keyword, keyword)

    def drop(self, keyword: str, why: str = NO_EFFECT) -> None:
        """Remove a keyword that asserts nothing and note it in the plan. Only while the schema is read."""
        del self.keywords[keyword]
        self.notes.append(PlanEntry(self.pointer, self.written_name(keyword), why))

    def rename(self, old: str, new: str, value: Any) -> None:
        """Replace a keyword by another form of it, at its place. Only while the schema is read."""
        items = [(new, value) if key == old else (key, kept) for key, kept in self.keywords.items()]
        self.keywords = dict(items)
        self.origin[new] = self.written_name(old)


Schema = Node | bool


def iterate_children(node: Node) -> Iterator[tuple[Path, Schema]]:
    """Yield (path, subschema) of a node, in its order; the target of `$ref` is no subschema."""
    return iterate_subschemas(node.keywords, Node)


def list_related(node: Node) -> list[Node]:
    """Return the nodes directly below a node and the target of its `$ref`."""
    if _RELATING.isdisjoint(node.keywords):
        return []
    found = [child for _, child in iterate_children(node) if isinstance(child, Node)]
    target = node.keywords.get("$ref")
    return [*found, target] if isinstance(target, Node) else found


def list_applied(node: Node) -> list[Schema]:
    """Return the schemas that a node applies to the same value without condition."""
    found: list[Schema] = list(node.get("allOf", ()))
    return [*found, node.get("$ref")] if "$ref" in node.keywords else found


def iterate_nodes(starts: Iterable[Schema]) -> Iterator[Node]:
    """Yield every node that can be reached, once, references followed; a node comes before what is below it."""
    seen: set[Node] = set()
    pending = [start for start in starts if isinstance(start, Node)][::-1]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending.extend(list_related(node)[::-1])


def is_trivial(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Node) and not schema.keywords)


def list_properties(node: Node) -> dict[str, Schema]:
    found: dict[str, Schema] = node.get("properties", {})
    return found


def find_member(keywords: dict[str, Any], name: str) -> Schema | None:
    """Return the schema that some keywords certainly apply to a property; None if that depends or there is none."""
    properties = keywords.get("properties", {})
    if name in properties:
        found: Schema = properties[name]
        return found
    return None if "patternProperties" in keywords else keywords.get("additionalProperties")


def find_element(keywords: dict[str, Any], index: int) -> Schema | None:
    places = keywords.get("prefixItems", ())
    found: Schema | None = places[index] if index < len(places) else keywords.get("items")
    return found
