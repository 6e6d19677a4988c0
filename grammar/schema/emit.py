"""Write nodes as a JSON Schema of draft 2020-12: as they are for a validator, and as llguidance reads it exactly."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import Any

from .formats import EXACT_PATTERNS
from .keywords import NUMERIC_BOUNDS, Path, map_subschemas
from .node import Node, Schema
from .patterns import make_safe
from .rules import GROUNDED

Json = dict[str, Any]
# Returns the keywords to write for a node.
Read = Callable[[Node], dict[str, Any]]

# Values of `enum` that may be spelt in two ways; doubles this small have no rounding in a range around them.
MAX_NUM_VALUES = 16
MAX_NUMBER = 2**40
MAX_NUM_MULTIPLES = 64
MAX_NUM_INLINED = 256  # branches of `oneOf` that are written in place of a reference
_MEMBERS = frozenset(["properties", "patternProperties", "additionalProperties"])
_BRANCHING = frozenset(["$ref", "allOf", "anyOf", "oneOf"])


@dataclass(slots=True)
class Emitter:
    """Writes one document. What is referred to stands under `$defs`.

    Attributes:
        read: the keywords of a node, its own by default.
        adapt: changes the written form of one node in place.
        impossible: nodes that nothing satisfies; a reference to one is written as `false`.
    """

    read: Read = lambda node: node.keywords
    adapt: Callable[[Json], None] = lambda written: None
    impossible: frozenset[Node] = frozenset()
    _root: Node | None = None
    _names: dict[Node, str] = field(default_factory=dict)
    _pending: list[Node] = field(default_factory=list)
    _inlined: set[Node] = field(default_factory=set)
    _num_inlined: int = 0

    def write(self, root: Schema) -> Json | bool:
        """Return the document of a schema."""
        if isinstance(root, bool) or root.get("$ref") in self.impossible:
            return root is True
        self._root = root
        document = self._write_node(root)
        definitions: Json = {}
        while self._pending:
            node = self._pending.pop()
            definitions[self._names[node]] = self._write_node(node)
        return {**document, "$defs": definitions} if definitions else document

    def list_referred(self) -> list[Node]:
        return list(self._names)

    def copy_write(self, root: Schema) -> Json | bool:
        """Return the document of another schema, in the same form."""
        return Emitter(self.read, self.adapt, self.impossible).write(root)

    def list_keywords(self, node: Node) -> set[str]:
        found = set(self.read(node))
        return found | {"pattern"} if "format" in found else found

    def refer(self, node: Node) -> str:
        """Return the reference to a node, which becomes a part of the document."""
        if node is self._root:
            return "#"
        if node not in self._names:
            self._names[node] = f"d{len(self._names)}"
            self._pending.append(node)
        return f"#/$defs/{self._names[node]}"

    def _write_node(self, node: Node) -> Json:
        written = {keyword: self._write_value(keyword, value) for keyword, value in self.read(node).items()}
        self.adapt(written)
        return written

    def _write_value(self, keyword: str, value: Any) -> Any:
        if keyword == "$ref":
            return self.refer(value)
        if keyword == "oneOf":
            return [self._write_branch(branch) for branch in value]
        return map_subschemas(keyword, value, self._write_schema)

    def _write_branch(self, branch: Schema) -> Json | bool:
        """Return a branch of `oneOf`, in place of a reference alone, with which llguidance compares nothing."""
        keywords = self.read(branch) if isinstance(branch, Node) else {}
        target = keywords.get("$ref")
        is_full = self._num_inlined >= MAX_NUM_INLINED
        if is_full or len(keywords) != 1 or target is None or target in self._inlined | self.impossible:
            return self._write_schema(("oneOf", 0), branch)
        self._num_inlined += 1
        self._inlined.add(target)
        written = self._write_node(target)
        self._inlined.discard(target)
        return written

    def _write_schema(self, path: Path, value: Any) -> Any:
        """Return a subschema as JSON; other values, such as the names in `dependencies`, stay."""
        if not isinstance(value, Node):
            return value
        return False if value.get("$ref") in self.impossible else self._write_node(value)


def write_for_validator(root: Schema) -> Json | bool:
    return Emitter().write(root)


def adapt_for_llguidance(written: Json) -> None:
    """Bring what is written of one node into a form that llguidance reads exactly."""
    written.pop(GROUNDED, None)
    if "pattern" in written:
        # The pattern may exclude U+0000 in addition, unless a row of the table forbids that.
        written["pattern"] = make_safe(written["pattern"]) or written["pattern"]
    if written.get("format") in EXACT_PATTERNS:
        add_pattern(written, EXACT_PATTERNS[written.pop("format")])
    if not _BRANCHING.isdisjoint(written) and not _MEMBERS.isdisjoint(written):
        put_members_first(written)
    if "multipleOf" in written:
        list_multiples(written)
    if "enum" in written or "const" in written:
        spell_numbers(written)


def list_multiples(written: Json) -> None:
    """Write few multiples of a fraction as an `enum`.

    llguidance computes the first and last one in doubles, in which 3 * 0.1 is more than 0.3, and between 0.2 and 0.4 it
    wants two digits, of which the multiples of 0.1 have one.
    """
    if written.get("type") != "number" or not {"enum", "const"}.isdisjoint(written):
        return
    step = Fraction(str(written["multipleOf"]))
    bounds = {name: Fraction(str(written[name])) / step for name in NUMERIC_BOUNDS if name in written}
    firsts = {"minimum": ceil, "exclusiveMinimum": lambda bound: floor(bound) + 1}
    lasts = {"maximum": floor, "exclusiveMaximum": lambda bound: ceil(bound) - 1}
    first = max((find(bounds[name]) for name, find in firsts.items() if name in bounds), default=None)
    last = min((find(bounds[name]) for name, find in lasts.items() if name in bounds), default=None)
    if step.denominator == 1 or first is None or last is None or not first <= last < first + MAX_NUM_MULTIPLES:
        return
    for name in ("multipleOf", *bounds):
        del written[name]
    multiples = [step * factor for factor in range(first, last + 1)]
    written["enum"] = [float(each) if each % 1 else int(each) for each in multiples]


def add_pattern(written: Json, pattern: str) -> None:
    """Add a pattern: directly if the node has none, else in `allOf`."""
    if "pattern" not in written and "$ref" not in written:
        written["pattern"] = pattern
    else:
        written["allOf"] = [*written.get("allOf", []), {"pattern": pattern}]


def put_members_first(written: Json) -> None:
    """Put what decides about names before the applicators: llguidance reads what stands around them as two schemas.

    So all branches keep the order of the schema's own `properties`.
    """
    later = {keyword: written.pop(keyword) for keyword in list(written) if keyword in _BRANCHING}
    written.update(later)


def spell_numbers(schema: dict[str, Any]) -> None:
    """Let a whole number in `const` or `enum` be written with a fraction of zero too: 2.0 is the same number as 2.

    llguidance writes the values of `enum` in one way. Where a number is meant, a range around it does the same and
    takes both spellings: the only multiple of 0.5 within 0.25 of 2 is 2. Types that say `integer` keep the short one.
    """
    types = schema.get("type", "number")
    if not {"number", "array", "object"}.intersection([types] if isinstance(types, str) else types):
        return
    keyword = "enum" if "enum" in schema else "const"
    values = schema["enum"] if keyword == "enum" else [schema["const"]]
    if len(values) > MAX_NUM_VALUES:
        return
    spelled = [make_schema(value, has_whole_number) for value in values if has_whole_number(value)]
    if not spelled:
        return
    kept = [value for value in values if not has_whole_number(value)]
    branches = [{"enum": kept}, *spelled] if kept else spelled
    del schema[keyword]
    if "anyOf" in schema or "$ref" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
    else:
        schema["anyOf"] = branches


def has_whole_number(value: Any) -> bool:
    """Return whether a number with two spellings is in a value."""
    if isinstance(value, dict):
        return any(map(has_whole_number, value.values()))
    if isinstance(value, list):
        return any(map(has_whole_number, value))
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < MAX_NUMBER
        and not value % 1
    )


def make_schema(value: Any, is_spelt_out: Callable[[Any], bool]) -> Json:
    """Return a schema of which only this value is an instance.

    Args:
        is_spelt_out: returns whether a value is described by more than `const`.
    """
    if not is_spelt_out(value):
        return {"const": value}
    if isinstance(value, dict):
        properties = {name: make_schema(child, is_spelt_out) for name, child in value.items()}
        closed: Json = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**closed, "required": list(value)}
    if isinstance(value, list):
        items = [make_schema(child, is_spelt_out) for child in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    # Zero has no sign: beside 0, which is the same number, -0 would be a dead end where items are distinct.
    least = value - 0.25 if value else 0
    return {"type": "number", "multipleOf": 0.5, "minimum": least, "maximum": value + 0.25}
