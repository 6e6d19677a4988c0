"""A structural tag as a graph: each node reads a text, a token or a value, and names its successors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidGrammar, UnsupportedGrammar
from ..vocabulary import Vocabulary

MAX_NUM_NODES = 20_000
MAX_PATTERN_CHARS = 16_384
ACCEPT = 0

Json = dict[str, Any]
# Literals at which free text inside a tag ends, each with the node that follows.
Exits = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Reads one part of the text.

    Attributes:
        kind: literal, regex, token, or a value with a grammar of its own: json_schema or grammar.
        value: the text, the pattern, the id of the token or the pointer of the value.
        next: its successor.
    """

    kind: str
    value: Any
    next: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Continues at one of several nodes."""

    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeText:
    """Reads any characters until a pattern is complete.

    Attributes:
        patterns: (pattern, its successor); None for a forbidden pattern.
        tokens: nodes of the special tokens whose names are a prefix of a pattern.
        next: successor at which the text may end at any point; None if only a pattern ends it.
    """

    patterns: tuple[tuple[str, int | None], ...]
    tokens: tuple[int, ...]
    next: int | None


Node = Step | Fork | FreeText
END = Step("end", None, 0)


class TagGraph:
    """The nodes of one structural tag; ACCEPT is the first, `start` is the entry."""

    def __init__(self, part: Json, vocabulary: Vocabulary) -> None:
        self.nodes: list[Node] = [END]
        self._known: dict[Node, int] = {END: ACCEPT}
        self._vocabulary = vocabulary
        # Names of special tokens, longest first.
        self._names = sorted(vocabulary.special_tokens, key=len, reverse=True)
        self.start = self._build(part, "/format", ACCEPT, ())

    def find_lead(self, target: int) -> str:
        """Return the text right before a node; "" where it may be another."""
        found, pending, seen = set(), [target], {target}
        while pending:
            each = pending.pop()
            for index, node in enumerate(self.nodes):
                if isinstance(node, Fork) and each in node.targets and index not in seen:
                    seen.add(index)
                    pending.append(index)
                elif isinstance(node, Step) and node.next == each and node is not END:
                    found.add(node.value if node.kind == "literal" else self._name_token(node))
                elif isinstance(node, FreeText) and each in (*(next for _, next in node.patterns), node.next):
                    found.add("" if each == node.next else next(p for p, n in node.patterns if n == each))
            if each == self.start:
                found.add("")
        return found.pop() if len(found) == 1 else ""

    def _name_token(self, node: Step) -> str:
        """Return the name of a special token, "" for other nodes."""
        specials = self._vocabulary.special_tokens
        return next((name for name in specials if node.kind == "token" and specials[name] == node.value), "")

    def _add(self, node: Node) -> int:
        if node not in self._known:
            self._known[node] = self._append(node)
        return self._known[node]

    def _append(self, node: Node) -> int:
        if len(self.nodes) >= MAX_NUM_NODES:
            raise InvalidGrammar(f"the structural tag unfolds into more than {MAX_NUM_NODES} parts")
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _literal(self, text: str, target: int) -> int:
        """Return the node of a text. A special token's name in it may be written as text or as that token."""
        found = [(text.find(name), name) for name in self._names if name in text]
        if not found:
            return self._add(Step("literal", text, target)) if text else target
        # Choose the earliest name in the text; among equal positions, the longest.
        start, name = min(found, key=lambda pair: pair[0])
        rest = self._literal(text[start + len(name) :], target)
        token = self._add(Step("token", self._vocabulary.special_tokens[name], rest))
        node = self._fork([self._add(Step("literal", name, rest)), token])
        return self._add(Step("literal", text[:start], node)) if start else node

    def _fork(self, targets: Sequence[int]) -> int:
        unique = tuple(dict.fromkeys(targets))
        return unique[0] if len(unique) == 1 else self._add(Fork(unique))

    def _build(self, part: Json, where: str, target: int, exits: Exits) -> int:
        """Return the first node of a format that is followed by `target`."""
        match part["type"]:
            case "const_string":
                return self._literal(part["value"], target)
            case "token":
                return self._mark(part, where, target)
            case "regex":
                return self._add(Step("regex", part["pattern"], target))
            case "json_schema" | "grammar" as kind:
                return self._add(Step(kind, where, target))
            case "sequence":
                last = len(part["elements"]) - 1
                for index, element in reversed(list(enumerate(part["elements"]))):
                    target = self._build(element, f"{where}/elements/{index}", target, exits if index == last else ())
                return target
            case "or":
                parts = enumerate(part["elements"])
                return self._fork([self._build(e, f"{where}/elements/{i}", target, exits) for i, e in parts])
            case "optional":
                return self._fork([self._build(part["content"], f"{where}/content", target, exits), target])
            case "star" | "plus" | "repeat":
                return self._repeat(part, f"{where}/content", target)
            case "tag":
                return self._mark(part["begin"], where, self._tag_content(part, where, target))
            case "any_text":
                return self._free_text({}, part["excludes"], where, target, exits, target)
            case "triggered_tags" | "token_triggered_tags":
                return self._triggered(part, where, target, exits)
            case "dispatch":
                return self._dispatch(part, where, target, exits)
            case "tags_with_separator":
                return self._separated(part, where, target)
            case kind:
                raise AssertionError(f"{kind} was let through by the reader")

    def _find_token(self, token: int | str, where: str) -> int:
        vocabulary = self._vocabulary
        if isinstance(token, str):
            named = vocabulary.special_tokens.get(token)
            same = [i for i, data in enumerate(vocabulary.token_bytes) if data == token.encode()]
            ids = [named] if named is not None else same
            if len(ids) != 1:
                raise InvalidGrammar(f"{where}: the vocabulary has {len(ids)} tokens {token[:80]!r}, not one")
            token = ids[0]
        if not 0 <= token < vocabulary.size or token in vocabulary.eos_token_ids:
            raise InvalidGrammar(f"{where}: token {token} is not a text token (0..{vocabulary.size - 1}, no EOS)")
        return token

    def _mark(self, mark: str | Json, where: str, target: int) -> int:
        if isinstance(mark, str):
            return self._literal(mark, target)
        return self._add(Step("token", self._find_token(mark["token"], where), target))

    def _tag_content(self, tag: Json, where: str, target: int) -> int:
        end = self._fork([self._mark(each, f"{where}/end", target) for each in tag["end"]])
        exits: Exits = ()
        if all(isinstance(each, str) and each for each in tag["end"]):
            exits = tuple((each, target) for each in tag["end"])
        return self._build(tag["content"], f"{where}/content", end, exits)

    def _repeat(self, part: Json, where: str, target: int) -> int:
        least: int = {"star": 0, "plus": 1}.get(part["type"]) or part.get("min", 0)
        most: int = part.get("max", -1)
        if most < 0:
            loop = self._append(Fork(()))
            again = self._build(part["content"], where, loop, ())
            self.nodes[loop] = Fork((again, target))
            target = loop
        end = target
        for number in range(max(most, least), 0, -1):
            inner = self._build(part["content"], where, target, ())
            target = inner if number <= least else self._fork([inner, end])
        return target

    def _separated(self, part: Json, where: str, target: int) -> int:
        """Return the node of `tag (separator tag)*`, or of the empty text."""
        after = target
        if not part["stop_after_first"]:
            after = self._append(Fork(()))
        tags = [self._build(tag, f"{where}/tags/{i}", after, ()) for i, tag in enumerate(part["tags"])]
        first = self._fork(tags)
        if after != target:
            self.nodes[after] = Fork((self._literal(part["separator"], first), target))
        return first if part["at_least_one"] else self._fork([first, target])

    def _triggered(self, part: Json, where: str, target: int, exits: Exits) -> int:
        after = target if part["stop_after_first"] else self._append(Fork(()))
        triggers = part.get("triggers", ())
        ids = [self._find_token(each, where) for each in part.get("trigger_tokens", ())]
        rests: dict[str, list[int]] = {trigger: [] for trigger in triggers}
        firsts, tokens = [], []
        for index, tag in enumerate(part["tags"]):
            place, begin = f"{where}/tags/{index}", tag["begin"]
            if isinstance(begin, str) != bool(triggers):
                raise UnsupportedGrammar(place, "begin", f"it begins with a {'text' if triggers else 'token'}")
            content = self._tag_content(tag, place, after)
            firsts.append(self._mark(begin, place, content))
            if not triggers:
                if self._find_token(begin["token"], place) not in ids:
                    raise InvalidGrammar(f"{place}: none of the trigger_tokens begins it")
                tokens.append(firsts[-1])
                continue
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                raise InvalidGrammar(f"{place}: {len(found)} triggers fit {begin[:80]!r}; one must")
            rests[found[0]].append(self._literal(begin.removeprefix(found[0]), content))
        if not set(ids) <= {*self._vocabulary.special_tokens.values()}:
            raise UnsupportedGrammar(
                where, "trigger_tokens", "only special tokens, which no text contains, may open tags"
            )
        text = self._free_text(rests, part.get("excludes", ()), where, target, exits, after, tokens)
        return self._fork(firsts) if part["at_least_one"] else text

    def _dispatch(self, part: Json, where: str, target: int, exits: Exits) -> int:
        after = self._append(Fork(())) if part["loop"] else target
        rests: dict[str, list[int]] = {}
        for index, (pattern, content) in enumerate(part["rules"]):
            if not pattern:
                raise InvalidGrammar(f"{where}/rules/{index} has an empty pattern")
            found = self._build(content, f"{where}/rules/{index}/1", after, ())
            rests.setdefault(pattern, []).append(found)
        return self._free_text(rests, part["excludes"], where, target, exits, after)

    def _free_text(
        self, triggers: Mapping[str, list[int]], excludes: Sequence[str], where: str, target: int,
        exits: Exits, after: int, tokens: Sequence[int] = (),
    ) -> int:
        """Return the node of free text: triggers and exits continue at other nodes, excluded patterns are forbidden.

        Args:
            after: a node that leads back to this text; `target` where there is none.
        """
        patterns = {trigger: list(nodes) for trigger, nodes in triggers.items()}
        ends: dict[str, list[int]] = {}
        for text, node in exits:
            trigger = next((each for each in triggers if text.startswith(each)), None)
            if trigger is None:
                ends.setdefault(text, []).append(node)
            else:
                # Keep an end possible after a trigger that is its prefix.
                patterns[trigger].append(self._literal(text.removeprefix(trigger), node))
        for text, nodes in ends.items():
            patterns.setdefault(text, []).extend(nodes)
        led = {pattern: self._fork(nodes) for pattern, nodes in patterns.items()}
        forbidden = dict.fromkeys(each for each in excludes if not any(pattern in each for pattern in led))
        check_patterns([*led, *forbidden], where)
        text_node = FreeText(
            (*led.items(), *((each, None) for each in forbidden)), (*tokens, *self._find_tokens(led)),
            None if exits else target,
        )
        index = self._append(text_node)
        if after != target:
            self.nodes[after] = Fork((index,))
        return index

    def _find_tokens(self, led: Mapping[str, int]) -> Iterator[int]:
        """Yield the nodes of special tokens whose names are a prefix of a pattern."""
        for pattern, node in led.items():
            name = next((each for each in self._names if pattern.startswith(each)), None)
            if name is not None:
                rest = self._literal(pattern.removeprefix(name), node)
                yield self._add(Step("token", self._vocabulary.special_tokens[name], rest))


def check_patterns(patterns: Sequence[str], where: str) -> None:
    """Refuse patterns that contain another pattern, which always completes first."""
    if sum(map(len, patterns)) > MAX_PATTERN_CHARS:
        raise InvalidGrammar(
            f"{where}: its triggers, ends and excludes are longer than {MAX_PATTERN_CHARS} characters"
        )
    for inner in patterns:
        for outer in patterns:
            if inner != outer and inner in outer:
                raise InvalidGrammar(
                    f"{where}: {outer!r} can never be written, because it contains {inner!r}, which completes first"
                )
