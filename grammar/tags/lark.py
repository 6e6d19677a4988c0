"""A structural tag as a Lark grammar for llguidance: a lexeme for the text up to each value, and the values' grammars.

The text must determine where each part begins, because the lexer takes the longest lexeme. A structural tag is refused
if a lexeme could continue with the first character of the value after it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from llguidance import regex_to_lark

from ..regex.text import quote
from .free_text import ANY, make_hit, make_lexemes, make_tail
from .graph import ACCEPT, Fork, FreeText, Step, TagGraph

ANY_CHARACTER = "(?s:.)"
# Border -> the text up to it.
Edges = dict[int, str]


class Value(NamedTuple):
    """A leaf in the rules: its name, and where it begins and ends.

    Attributes:
        text: what the rules write for it.
        first: class of the characters it may begin with.
        more: class of the characters that may follow a complete value as a part of it; "" for none.
        is_checked: something beside llguidance has to know that it is this value which begins.
        is_spaced: llguidance takes white space between it and a value right behind it.
    """

    text: str
    first: str
    more: str
    is_checked: bool = False
    is_spaced: bool = False


@dataclass(eq=False)
class Conflict(Exception):
    """The text does not determine where a node begins or ends."""

    node: int
    reason: str


NO_BEGIN = "nothing marks where it begins; put a const_string before it"
NO_END = "nothing marks its end; put a const_string behind it, or give the schema a type"
GBNF_END = "a grammar is followed by fixed text or by the end"


@dataclass(slots=True)
class TagWriter:
    """Writes the rules of one structural tag.

    Attributes:
        values: node of a leaf -> how it is called.
        is_empty: whether a Lark terminal matches nothing at all.
        has_fast_text: free text has rules of its own; without, it is part of the text around it.
    """

    graph: TagGraph
    values: Mapping[int, Value]
    is_empty: Callable[[str], bool]
    has_fast_text: bool
    _rules: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)
    _pending: list[int] = field(default_factory=list)

    def write(self) -> str:
        self._rules["start"] = self._refer(self.graph.start) or '""'
        while self._pending:
            node = self._pending.pop()
            name = f"t{node}" if self._is_fast(node) else f"s{node}"
            if name not in self._rules:
                self._rules[name] = ""  # A rule may refer to itself while it is written.
                self._rules[name] = self._write_free(node) if self._is_fast(node) else self._write_state(node)
        lines = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join([*lines, *(f"{name}: {text}" for text, name in self._terminals.items())])

    def _name(self, text: str) -> str:
        return self._terminals.setdefault(text, f"T{len(self._terminals)}")

    def _refer(self, node: int) -> str:
        """Return the rule for the text after a node, "" at the end."""
        if node == ACCEPT:
            return ""
        self._pending.append(node)
        return f"t{node}" if self._is_fast(node) else f"s{node}"

    def _is_fast(self, index: int) -> bool:
        """Return whether free text has a rule of its own: it ends with a pattern, a token or the end of the text."""
        node = self.graph.nodes[index]
        if not self.has_fast_text or not isinstance(node, FreeText):
            return False
        return node.next is None or all(self._is_end_or_token(target) for target in self._list_next(node.next))

    def _is_end_or_token(self, index: int) -> bool:
        node = self.graph.nodes[index]
        return index == ACCEPT or (isinstance(node, Step) and node.kind == "token")

    def _list_next(self, index: int) -> list[int]:
        """Return the nodes other than forks that a node reaches without text."""
        found, pending = list[int](), [index]
        seen: set[int] = set()
        while pending:
            each = pending.pop()
            node = self.graph.nodes[each]
            if each not in seen and isinstance(node, Fork):
                pending += node.targets
            elif each not in seen:
                found.append(each)
            seen.add(each)
        return found

    def _list_edges(self, index: int) -> Edges | None:
        """Return the successors of a node of regular text; None for a border."""
        node = self.graph.nodes[index]
        if index == ACCEPT or self._is_fast(index):
            return None
        match node:
            case Step(kind="literal", value=text, next=target):
                return {target: quote(text)}
            case Step(kind="regex", value=pattern, next=target):
                return {target: f"/{regex_to_lark(pattern)}/"}
            case Fork(targets=targets):
                return dict.fromkeys(targets, "")
            case FreeText():
                return self._list_text_edges(node)
        return None

    def _list_text_edges(self, node: FreeText) -> Edges:
        patterns = [pattern for pattern, _ in node.patterns]
        ways = [(target, make_hit(patterns, pattern)) for pattern, target in node.patterns]
        ways += [(target, make_tail(patterns)) for target in (*node.tokens, node.next)]
        found: Edges = {}
        for target, text in ways:
            if target is not None:
                found[target] = unite(found[target], f"({text})") if target in found else f"({text})"
        return found

    def _write_free(self, index: int) -> str:
        node = self.graph.nodes[index]
        assert isinstance(node, FreeText), "only free text has such rules"
        lexemes = make_lexemes([pattern for pattern, _ in node.patterns])
        ways = []
        for (_, target), hit in zip(node.patterns, lexemes.hits, strict=True):
            if target is not None:
                ways.append(f"{self._name(hit)} {self._refer(target)}")
        tail = self._name(lexemes.tail)
        ways += [f"{tail}? {self._write_border(target)}" for target in node.tokens]
        if node.next is not None:
            ways.append(f"{tail}? {self._refer(node.next)}")
        parts = f"{self._name(lexemes.part)}* " if lexemes.part else ""
        return f"{parts}({' | '.join(ways)})"

    def _write_state(self, index: int) -> str:
        """Return the rule for all that may follow at a node."""
        ways = find_texts(index, self._list_edges)
        self._check_begins(ways)
        return " | ".join(self._write_way(target, text) for target, text in ways.items())

    def _write_way(self, target: int, text: str) -> str:
        return f"{self._name(text) if text else ''} {self._write_border(target)}".strip() or '""'

    def _write_border(self, target: int) -> str:
        node = self.graph.nodes[target]
        match node:
            case Step(kind="json_schema" | "grammar", next=following):
                self._check_ends(target, node)
                if node.kind == "grammar":
                    return f"{self.values[target].text} {self._write_letters(target, following)}"
                return f"{self.values[target].text} {self._refer(following)}"
            case Step(kind="token", value=token_id, next=following):
                return f"<[{token_id}]> {self._refer(following)}"
        return self._refer(target)

    def _write_letters(self, leaf: int, index: int) -> str:
        """Return the rule of what follows a GBNF grammar, letter by letter, so that no lexeme is the longer one."""
        name, node = f"l{index}", self.graph.nodes[index]
        if name not in self._rules:
            self._rules[name] = ""
            match node:
                case Fork(targets=targets):
                    self._rules[name] = " | ".join(self._write_letters(leaf, target) for target in targets)
                case Step(kind="literal", value=text, next=target):
                    self._rules[name] = " ".join([*map(quote, text), self._write_letters(leaf, target)])
                case _ if self._is_end_or_token(index):
                    self._rules[name] = self._write_border(index) or '""'
                case _:
                    raise Conflict(leaf, GBNF_END)
        return name

    def _find_first(self, target: int) -> str:
        """Return the class of the first characters of a border, "" if it has no text."""
        if target in self.values:
            return self.values[target].first
        return ANY_CHARACTER if self._is_fast(target) else ""

    def _check_begins(self, ways: Edges) -> None:
        """Raise Conflict if a text that reaches a border could also continue, or reach another border."""
        texts = {target: f"({text})" if text else '""' for target, text in ways.items()}
        wrong = {}
        for target, text in texts.items():
            if first := self._find_first(target):
                rivals = [rest for each, rest in texts.items() if each != target and self._are_confused(target, each)]
                longer = f"{text} /{first}/ {ANY} & ({' | '.join(texts.values())})"
                wrong[target] = [longer, *([f"{text} & ({' | '.join(rivals)})"] if rivals else [])]
        every = " | ".join(f"({each})" for parts in wrong.values() for each in parts)
        if every and not self.is_empty(every):
            faulty = (t for t, parts in wrong.items() if not all(map(self.is_empty, parts)))
            raise Conflict(next(faulty), NO_BEGIN)

    def _are_confused(self, target: int, rival: int) -> bool:
        """Return whether two alternatives at one position could be confused."""
        if not self._find_first(target) or not self._find_first(rival):
            return False
        pair = [self.values.get(each) for each in (target, rival)]
        if pair[0] is not None and pair[0] == pair[1]:
            return False
        # Free text and GBNF have lexemes of their own, which longer lexemes could override.
        if any(value is None or value.first == ANY_CHARACTER for value in pair):
            return True
        is_checked = any(value is not None and value.is_checked for value in pair)
        return is_checked and not self._is_apart(*(self._find_first(each) for each in (target, rival)))

    def _check_ends(self, index: int, leaf: Step) -> None:
        """Raise Conflict if a complete value could continue with the text after it."""
        value = self.values[index]
        if leaf.kind == "grammar" or not (value.more or value.is_spaced):
            return
        for target, text in find_texts(leaf.next, self._list_edges).items():
            first = self._find_first(target)
            rest = " ".join(filter(None, (f"({text})" if text else "", f"/{first}/ {ANY}" if first else ""))) or '""'
            is_joined = value.is_spaced and not text and target in self.values
            if is_joined or (value.more and not self.is_empty(f"({rest}) & (/{value.more}/ {ANY})")):
                raise Conflict(index, NO_END)

    def _is_apart(self, first: str, second: str) -> bool:
        return self.is_empty(f"/{first}/ & /{second}/")


# The text between two values as one regular expression, by state elimination (Brzozowski and McCluskey, 1963). A
# language is the text of a Lark terminal, "" for the empty text alone.


def unite(first: str, second: str) -> str:
    """Return the words of either language."""
    if first == second:
        return first
    return f"({first} | {second})" if first and second else f"({first or second})?"


def find_texts(start: int, list_edges: Callable[[int], Mapping[int, str] | None]) -> Edges:
    """Return, for each border that may come next, the text up to it.

    Args:
        list_edges: node -> next node -> the text between them; None for a border.
    """
    edges: dict[int, Edges] = {}
    pending = [start]
    while pending:
        node = pending.pop()
        if node not in edges and (found := list_edges(node)) is not None:
            edges[node] = dict(found)
            pending += found
    if not edges:
        return {start: ""}
    before: dict[int, set[int]] = {}
    for node, targets in edges.items():
        for target in targets:
            before.setdefault(target, set()).add(node)
    for node in [each for each in edges if each != start]:
        eliminate(node, edges, before)
    return close_loop(edges[start], start)


def eliminate(node: int, edges: dict[int, Edges], before: dict[int, set[int]]) -> None:
    """Remove a node: every way through it becomes an edge."""
    targets = close_loop(edges.pop(node), node)
    for source in before.pop(node, set()) - {node}:
        into = edges[source].pop(node)
        for target, text in targets.items():
            way = f"{into} {text}".strip()
            known = edges[source].get(target)
            edges[source][target] = way if known is None else unite(known, way)
            before.setdefault(target, set()).add(source)
    for target in targets:
        before.get(target, set()).discard(node)


def close_loop(targets: Edges, node: int) -> Edges:
    """Return the edges of a node with its edge to itself written into the others."""
    loop = targets.pop(node, None)
    if not loop:
        return targets
    return {target: f"({loop})* {text}".strip() for target, text in targets.items()}
