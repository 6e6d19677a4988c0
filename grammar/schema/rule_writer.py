"""A JSON Schema as Lark rules for llguidance: for properties in any order, and for quotations from a source.

llguidance writes properties in the order of the schema. For any order, an object becomes one rule with a number, each
bit of which stands for a listed name; the rule goes on with a name whose bit is clear, with another name where those
are allowed, or with the end when the bits of all that is required are set. What needs no rules of its own stays a JSON
schema.

A value is described by the nodes that apply to it. `allOf` and references add nodes; `anyOf` makes alternatives.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ..engines.lark_rules import LarkRules
from ..engines.llguidance_json import SEPARATORS, find_pattern, is_flexible
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..regex.text import quote
from .emit import Emitter, Json, make_schema
from .guides import make, make_validator
from .keywords import TYPES_OF_KEYWORD
from .node import Node, Schema, find_element, find_member
from .property_order import (
    APPLIED,
    CONTAINER_KEYWORDS,
    JSON_NAME,
    MAX_NUM_BITS,
    SCALARS,
    UNIONS,
    find_ordered,
    fixes_order,
    is_large,
    is_ordered,
    join_scalars,
    read_types,
    write_members,
    write_other_name,
)
from .quotations import Source, check_neighbours, check_ways, write_quotation
from .reader import read_schema
from .refusal import Refusal
from .rules import GROUNDED
from .weaken import Weakening

MAX_NUM_RULES = 12_000
MAX_NUM_ALTERNATIVES = 64
_WRITTEN_HERE = frozenset(
    ["properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"]
)
_NEVER = '"a" & ~"a"'  # a terminal that matches nothing
Nodes = frozenset[Node]


@dataclass
class RuleWriter:
    """Writes one schema as a Lark grammar with the start rule `start`, and the schemas it calls @{name}v0 and so on.

    Attributes:
        emitter: writes a node as a document of its own.
        whitespace: what stands between items, and after a name, as in a `GrammarSpec`.
        is_any_order: properties come in any order, not in that of the schema.
        source: what grounded strings are parts of.
        name: of the grammar.
        impossible: schemas as JSON that nothing satisfies.
        values: the schemas that the grammar calls.
    """

    weakening: Weakening
    emitter: Emitter
    whitespace: str
    is_any_order: bool
    source: Source | None
    name: str
    impossible: frozenset[str]
    values: list[Json] = field(default_factory=list)
    _lark: LarkRules = field(default_factory=LarkRules)
    _names: dict[Nodes, str | None] = field(default_factory=dict)
    _leaves: dict[str, str] = field(default_factory=dict)
    _ordered: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        space = f"/{find_pattern(self.whitespace)}/"
        self._gap = f" {self._lark.name(space)}?" if is_flexible(self.whitespace) else ""
        signs = SEPARATORS.get(self.whitespace, SEPARATORS["any"])
        self._comma, self._colon = (f"{quote(sign)}{self._gap} " for sign in signs)

    def write(self, root: Node) -> str:
        """Return the grammar, "" where nothing satisfies the schema.

        Raises:
            Refusal: a keyword has to be left to residual checks.
        """
        self._ordered = find_ordered(root, self.weakening.read, self._needs_rules)
        start = self._write_value(frozenset([root]))
        if start is None:
            return ""
        return "\n".join([self._lark.write(start), *([] if self.source is None else [self.source.write()])])

    def _needs_rules(self, node: Node) -> bool:
        return GROUNDED in node.keywords or is_large(node) or (self.is_any_order and fixes_order(node))

    def _new_rule(self, node: Node, body: str = "") -> str:
        if len(self._lark.rules) >= MAX_NUM_RULES:
            raise UnsupportedGrammar(node.pointer, "properties", f"it would take more than {MAX_NUM_RULES} rules")
        return self._lark.rule(body)

    def _write_value(self, nodes: Nodes) -> str | None:
        """Return what stands for a value to which all these nodes apply, None where nothing satisfies them."""
        if nodes not in self._names and nodes.isdisjoint(self._ordered):
            node = next(iter(nodes)) if len(nodes) == 1 else Node("", {"allOf": sort_nodes(nodes)})
            self._names[nodes] = self._leaf(node)
        if nodes not in self._names:
            self._names[nodes] = name = self._new_rule(sort_nodes(nodes)[0])
            ways = self._list_alternatives(nodes)
            if self.source is not None:
                check_ways(ways)
            found = [text for each in ways for text in self._write_alternative(each)]
            self._lark.rules[name] = " | ".join(dict.fromkeys(found)) or self._lark.name(_NEVER)
            if not found:
                self._names[nodes] = None  # what refers to itself may have used the rule
        return self._names[nodes]

    def _leaf(self, node: Node) -> str | None:
        """Return the reference to a schema that fixes no order."""
        written = self.emitter.copy_write(node)
        text = json.dumps(written)
        if written is False or text in self.impossible:
            return None
        if text not in self._leaves:
            self._leaves[text] = f"@{self.name}v{len(self.values)}"
            self.values.append({} if written is True else dict(written))
        return self._leaves[text]

    def _list_alternatives(self, nodes: Nodes, above: Nodes = frozenset()) -> list[Nodes]:
        """Return sets of nodes, one of which has to apply as a whole, whose `allOf`, `anyOf` and references are done.

        Args:
            above: the nodes whose branches these are; through them nothing new comes.
        """
        found: list[Nodes] = [frozenset()]
        pending = sort_nodes(nodes)
        seen: set[Node] = set()
        while pending:
            node = pending.pop(0)
            if node in above:
                return []
            if node in seen:
                continue
            seen.add(node)
            found = [each | {node} for each in found]
            keywords = self.weakening.read(node)
            applied = [*keywords.get("allOf", ()), *([keywords["$ref"]] if "$ref" in keywords else ())]
            if False in applied or not self.emitter.impossible.isdisjoint(applied):
                return []
            pending += [each for each in applied if isinstance(each, Node)]
            for keyword in UNIONS:
                if keyword in keywords:
                    found = self._multiply(found, node, keyword, above | seen)
        return found

    def _multiply(self, found: list[Nodes], node: Node, keyword: str, above: Nodes) -> list[Nodes]:
        """Return the alternatives with one branch of a union in each."""
        if keyword == "oneOf" and not self.weakening.is_guide(node):
            raise Refusal(node, keyword, "that its branches exclude each other is checked")
        branches: list[Nodes] = []
        for branch in self.weakening.read(node)[keyword]:
            if isinstance(branch, Node):
                branches += self._list_alternatives(frozenset([branch]), above)
            elif branch:
                branches.append(frozenset())
        if len(found) * len(branches) > MAX_NUM_ALTERNATIVES:
            if self.weakening.is_guide(node):
                return found
            raise Refusal(node, keyword, f"there are more than {MAX_NUM_ALTERNATIVES} alternatives")
        return list(dict.fromkeys(each | way for each in found for way in branches))

    def _write_alternative(self, nodes: Nodes) -> Iterable[str]:
        """Yield the ways to write a value to which all these nodes apply; unions among them are decided."""
        parts = [(node, self.weakening.read(node)) for node in sort_nodes(nodes)]
        is_grounded = any(GROUNDED in node.keywords for node in nodes)
        if is_grounded:
            check_neighbours(nodes)
        for node, keywords in parts:
            if "enum" in keywords or "const" in keywords:
                yield from self._write_listed(node, nodes)
                return
        types = set.intersection({"object", "array", *SCALARS}, *(read_types(node) for node, _ in parts))
        for node, keywords in parts:
            for keyword in keywords:
                if keyword in CONTAINER_KEYWORDS - _WRITTEN_HERE and types & {*TYPES_OF_KEYWORD[keyword]}:
                    self._leave_out(node, keyword)
        if "object" in types:
            yield from self._write_object(parts)
        if "array" in types:
            yield from self._write_array(parts)
        if is_grounded and "string" in types:
            types.discard("string")
            yield self._write_quotation(parts)
        rest = sorted(types & {*SCALARS})
        if rest:
            leaf = self._leaf(join_scalars([keywords for _, keywords in parts], rest))
            yield from [leaf] if leaf is not None else []

    def _write_quotation(self, parts: list[tuple[Node, Json]]) -> str:
        """Write the terminal of a grounded string and return its name."""
        assert self.source is not None, "without a source the annotation is refused"
        least = max(int(keywords.get("minLength", 0)) for _, keywords in parts)
        most = min((int(keywords["maxLength"]) for _, keywords in parts if "maxLength" in keywords), default=None)
        if not self.source.has_quotation(least, most):
            at_most = "" if most is None else f" and at most {most}"
            pointer = next(node.pointer for node, _ in parts if GROUNDED in node.keywords)
            reason = f"no part of the source has at least {least}{at_most} characters"
            raise InvalidGrammar(f"{GROUNDED} at {pointer or '#'}: {reason}")
        return self._lark.name(write_quotation(least, most))

    def _leave_out(self, node: Node, keyword: str) -> None:
        if not self.weakening.is_guide(node):
            raise Refusal(node, keyword, "it cannot be written in rules")

    def _write_listed(self, lister: Node, nodes: Nodes) -> Iterable[str]:
        """Yield the ways to write one of the values that a node lists and all these nodes allow."""
        listed = self.weakening.read(lister)
        used = "enum" if "enum" in listed else "const"
        values = listed["enum"] if used == "enum" else [listed["const"]]
        # To validate each value against the list itself would take quadratic time.
        parts = [
            {k: v for k, v in self.weakening.read(node).items() if k not in APPLIED and (node, k) != (lister, used)}
            for node in sort_nodes(nodes)
        ]
        validator = make_validator(make(allOf=[make(**part) for part in parts]))
        fine = [value for value in values if validator is None or validator.is_valid(value)]
        plain = [value for value in fine if not is_ordered(value)]
        leaf = self._leaf(Node("", {"enum": plain})) if plain else None
        yield from [leaf] if leaf is not None else []
        for value in fine:
            if is_ordered(value):
                node = read_schema(make_schema(value, is_ordered), "")
                assert isinstance(node, Node), "it lists an object"
                self._ordered |= find_ordered(node, self.weakening.read, self._needs_rules)
                yield self._write_value(frozenset([node])) or self._lark.name(_NEVER)

    def _write_object(self, parts: list[tuple[Node, Json]]) -> Iterable[str]:
        required = dict.fromkeys(name for _, keywords in parts for name in keywords.get("required", ()))
        listed = dict.fromkeys(
            [*(name for _, keywords in parts for name in keywords.get("properties", ())), *required]
        )
        values = {name: self._write_all(find_member(keywords, name) for _, keywords in parts) for name in listed}
        names = [name for name in listed if values[name] is not None]
        if any(values[name] is None for name in required):
            return
        other = self._write_other(list(listed), parts)
        if not self.is_any_order:
            members = {name: str(values[name]) for name in names}
            yield self._write_in_order(members, required.keys(), other, parts[0][0])
            return
        # Required names get the first bits.
        names.sort(key=lambda name: name not in required)
        if len(required) > MAX_NUM_BITS:
            node = max(parts, key=lambda part: len(part[1].get("required", ())))[0]
            raise Refusal(node, "required", f"more than {MAX_NUM_BITS} names are required")
        yield self._write_members({name: str(values[name]) for name in names}, len(required), other)

    def _write_members(self, values: Mapping[str, str], num_required: int, other: str | None) -> str:
        """Write the rules of an object and return how it begins.

        Args:
            values: name -> rule of its value; the required ones first.
            other: a name that is not listed, and its value.
        """
        ways = [f"{self._write_key(name)}{rule}{self._gap}" for name, rule in values.items()]
        more = None if other is None else (f"{other}{self._gap}", f"{self._comma}{other}{self._gap}")
        first = write_members(self._lark, [(way, self._comma + way) for way in ways], num_required, '"}"', more)
        return f'"{{"{self._gap} {first}'

    def _write_in_order(self, values: dict[str, str], required: Collection[str], other: str | None, node: Node) -> str:
        """Write the rules of an object whose properties come in this order, and return how it begins."""
        rest = self._new_rule(node)
        more = "" if other is None else f"{other}{self._gap} {rest}"
        self._lark.rules[rest] = f'"}}"{more and f" | {self._comma}{more}"}'
        first = self._new_rule(node, f'"}}"{more and f" | {more}"}')
        for name, value in reversed(values.items()):
            way = f"{self._write_key(name)}{value}{self._gap} {rest}"
            skips = ("", "") if name in required else (f" | {first}", f" | {rest}")
            first = self._new_rule(node, f"{way}{skips[0]}")
            rest = self._new_rule(node, f"{self._comma}{way}{skips[1]}")
        return f'"{{"{self._gap} {first}'

    def _write_all(self, schemas: Iterable[Schema | None]) -> str | None:
        """Return what stands for a value to which all these schemas apply."""
        found = list(schemas)
        if False in found:
            return None
        return self._write_value(frozenset(each for each in found if isinstance(each, Node)))

    def _write_key(self, name: str) -> str:
        return f"{quote(quote(name))}{self._gap} {self._colon}"

    def _write_other(self, listed: list[str], parts: list[tuple[Node, Json]]) -> str | None:
        """Return a name that is not listed, and its value; None where there is none."""
        value = self._write_all(keywords.get("additionalProperties", True) for _, keywords in parts)
        if value is None:
            return None
        terminal = self._lark.name(write_other_name(JSON_NAME, map(quote, listed)))
        return f"{terminal}{self._gap} {self._colon}{value}"

    def _write_array(self, parts: list[tuple[Node, Json]]) -> Iterable[str]:
        every = [keywords for _, keywords in parts]
        least = max(keywords.get("minItems", 0) for keywords in every)
        most = min(keywords.get("maxItems", math.inf) for keywords in every)
        num_places = min(max(len(keywords.get("prefixItems", ())) for keywords in every), most)
        places: list[str] = []
        while len(places) < num_places:
            value = self._write_all(find_element(keywords, len(places)) for keywords in every)
            if value is None:
                break
            places.append(value)
        item = None
        if len(places) == num_places < most:
            item = self._write_all(keywords.get("items", True) for keywords in every)
        most = most if item is not None else len(places)
        if least > most:
            return
        tail = ""
        if item is not None and most - len(places) > 0:
            first = not places
            rule = self._new_rule(parts[0][0], f"{self._comma}{item}{self._gap}")
            low, high = max(least - len(places) - first, 0), most - len(places) - first
            # A repetition of nothing but zero times is malformed there.
            count = f" {rule}{{{low},{'' if high == math.inf else high}}}" if high else ""
            tail = f"{item}{self._gap}{count}" if first else count
            tail = f"({tail})?" if first and not least else tail
        for number in range(len(places) - 1, -1, -1):
            lead = self._comma if number else ""
            tail = f"{lead}{places[number]}{self._gap} {tail}"
            tail = tail if number < least else f"({tail})?"
        yield f'"["{self._gap} {tail} "]"'


def sort_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return nodes in the order of the schema, as far as their pointers determine it."""
    return sorted(nodes, key=lambda node: node.pointer)
