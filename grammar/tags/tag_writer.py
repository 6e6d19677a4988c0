"""A structural tag as rules of Lark: a lexeme for the text up to each value, and references to the values' grammars.

A format is written from its end, because what follows a part decides how the part is written.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark

from ..errors import InvalidGrammar, UnsupportedGrammar
from ..regex.dialects import read_classes
from ..regex.text import quote
from ..vocabulary import Vocabulary
from .borders import ANY_CHARACTER, Border, Borders, Conflict, Value
from .free_text import make_hit, make_lexemes, make_tail
from .lark_text import LarkText
from .structural_tag import list_children
from .ways import END, Loops, Ways, prefix, unite

MAX_NUM_PARTS = 20_000
MAX_PATTERN_CHARS = 16_384
GBNF_END = "a grammar is followed by one fixed text or by the end"
_REGULAR, _COMPOSED = ("const_string", "regex"), ("sequence", "or", "optional", "star", "plus", "repeat", "tag")
_FIXED = re.compile(r'"(?:[^"\\]|\\.)*"')

Json = dict[str, Any]
# The ends of a tag, at which free text inside it ends, each with what follows.
Exits = tuple[tuple[str, Ways], ...]


@dataclass
class TagWriter:
    """Writes the rules of one structural tag.

    Attributes:
        write_value: describes the value of a place, with the text before it.
        limit_text: returns the expression of a text with a limit of its tokens, of the text before it and its ends.
        borders: to which texts lead; empty before writing.
        has_fast_text: free text has rules of its own; without, it is part of the text around it.
    """

    text: LarkText
    vocabulary: Vocabulary
    write_value: Callable[[Json, str, str], Value]
    limit_text: Callable[[str, int, str, Sequence[str]], str]
    borders: Borders
    has_fast_text: bool
    _loops: Loops = field(default_factory=Loops)
    _states: dict[tuple[tuple[str, str], ...], str] = field(default_factory=dict)
    _num_parts: int = 0

    def write(self, part: Json) -> str:
        """Return the expression of a format, whose rules are in the text then."""
        start = self._refer(self._build(part, "/format", END, ())) or '""'
        for key, name in self._states.items():
            ways = self._loops.expand(dict(key))
            self.borders.check_begins(ways)
            self.text.rules[name] = " | ".join(
                f"{self.text.name(text) if text else ''} {border}".strip() or '""' for border, text in ways.items()
            )
        for border in self.borders:
            self.borders.check_ends(border, self._loops.expand(dict(border.next)))
        return start

    def _refer(self, ways: Ways) -> str:
        """Return the name of the rule for what may come next, "" at the end."""
        border = next(iter(ways))
        if ways == {border: ""} and (not border or border in self.borders):
            return border
        return self._states.setdefault(tuple(ways.items()), f"s{len(self._states)}")

    def _count(self, num_parts: int) -> None:
        self._num_parts += num_parts
        if self._num_parts > MAX_NUM_PARTS:
            raise InvalidGrammar(f"the structural tag unfolds into more than {MAX_NUM_PARTS} parts")

    def _new_name(self, letter: str) -> str:
        return f"{letter}{self._num_parts}"

    def _add(self, letter: str, border: Border, body: str) -> Ways:
        name = self._new_name(letter)
        self.borders.add(name, border)
        self.text.rules[name] = body
        return {name: ""}

    # Formats

    def _build(self, part: Json, where: str, follow: Ways, exits: Exits, lead: str = "") -> Ways:
        """Return what a format begins with.

        Args:
            follow: what follows it.
            exits: the ends of the tag around it, if it is the last part inside.
            lead: the text right before it, "" where it may be another.
        """
        self._count(1)
        match part["type"]:
            case "const_string":
                return self._literal(part["value"], follow)
            case "token":
                return self._token(part["token"], where, follow)
            case "regex":
                return prefix(f"/{regex_to_lark(read_classes(part['pattern']))}/", follow)
            case "json_schema" | "grammar":
                value = self.write_value(part, where, lead)
                body = self._write_value(value, where, follow)
                return self._add("v", Border(value, value.first, where, follow), body)
            case "sequence":
                return self._sequence(part["elements"], where, follow, exits, lead)
            case "or":
                parts = enumerate(part["elements"])
                return unite(*(self._build(e, f"{where}/elements/{i}", follow, exits, lead) for i, e in parts))
            case "optional":
                return unite(self._build(part["content"], f"{where}/content", follow, exits, lead), follow)
            case "star" | "plus" | "repeat":
                return self._repeat(part, f"{where}/content", follow)
            case "tag":
                return self._mark(part["begin"], where, self._tag_content(part, where, follow))
            case "any_text":
                name = self._new_name("t")
                found = self._free_text(name, {}, part["excludes"], where, follow, exits)
                if part["max_tokens"] is not None:
                    self._limit(name, part["max_tokens"], where, lead, exits)
                return found
            case "triggered_tags" | "token_triggered_tags":
                return self._triggered(part, where, follow, exits)
            case "dispatch":
                return self._dispatch(part, where, follow, exits)
            case "tags_with_separator":
                return self._separated(part, where, follow)
            case kind:
                raise AssertionError(f"{kind} was let through by the reader")

    def _write_value(self, value: Value, where: str, follow: Ways) -> str:
        if value.first != ANY_CHARACTER:
            return f"{value.text} {self._refer(follow)}"
        # Behind GBNF a text is written letter by letter, so that no lexeme is the longer one.
        found = []
        for border, text in follow.items():
            if not self.borders.is_end({border: ""}) or _FIXED.sub("", text).strip():
                raise Conflict(where, GBNF_END)
            letters = [quote(char) for each in _FIXED.findall(text) for char in json.loads(each)]
            found.append(" ".join([value.text, *letters, border]))
        return " | ".join(found)

    def _literal(self, text: str, follow: Ways) -> Ways:
        """Return what a text begins with. A special token's name in it may be written as text or as that token."""
        before, name, after = self.text.split(text)
        if name is not None:
            rest = self._literal(after, follow)
            token = self._add_token(self.vocabulary.special_tokens[name], rest)
            follow = unite(prefix(quote(name), rest), token)
        return prefix(quote(before), follow) if before else follow

    def _add_token(self, token_id: int, follow: Ways) -> Ways:
        self._count(1)
        return self._add("k", Border(None, ""), f"<[{token_id}]> {self._refer(follow)}")

    def _token(self, token: int | str, where: str, follow: Ways) -> Ways:
        return self._add_token(self._find_token(token, where), follow)

    def _find_token(self, token: int | str, where: str) -> int:
        vocabulary = self.vocabulary
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

    def _mark(self, mark: str | Json, where: str, follow: Ways) -> Ways:
        return self._literal(mark, follow) if isinstance(mark, str) else self._token(mark["token"], where, follow)

    def _sequence(self, elements: Sequence[Json], where: str, follow: Ways, exits: Exits, lead: str) -> Ways:
        leads = [lead, *map(find_end, elements)]
        for index, element in reversed([*enumerate(elements)]):
            follow = self._build(element, f"{where}/elements/{index}", follow, exits, leads[index])
            exits = ()
        return follow

    def _tag_content(self, tag: Json, where: str, follow: Ways) -> Ways:
        ends = tag["end"]
        end = unite(*(self._mark(each, f"{where}/end", follow) for each in ends))
        is_text = all(isinstance(each, str) and each for each in ends)
        exits = tuple((each, follow) for each in ends) if is_text else ()
        begin = tag["begin"]
        lead = begin if isinstance(begin, str) else str(begin["token"]) if isinstance(begin["token"], str) else ""
        return self._build(tag["content"], f"{where}/content", end, exits, lead)

    def _repeat(self, part: Json, where: str, follow: Ways) -> Ways:
        least: int = {"star": 0, "plus": 1}.get(part["type"]) or part.get("min", 0)
        most: int = part.get("max", -1)
        loop, num_before = self._new_name("l"), self._num_parts
        if self._is_regular(part["content"]):
            text = self._build(part["content"], where, {loop: ""}, ())[loop] or '""'
            self._count((self._num_parts - num_before) * max(most, least))
            return prefix(f"({text}){{{least},{most if most >= 0 else ''}}}", follow)
        found = follow
        if most < 0:
            found = self._loops.close(loop, unite(self._build(part["content"], where, {loop: ""}, ()), follow))
        for number in range(max(most, least), 0, -1):
            inner = self._build(part["content"], where, found, ())
            found = inner if number <= least else unite(inner, follow)
        return found

    def _is_regular(self, part: Json) -> bool:
        """Return whether a format is one terminal: fixed texts and patterns, without special tokens."""
        texts = [part.get("value", ""), part.get("begin", ""), *part.get("end", ())]
        children = [child for _, child in list_children(part, "")]
        return (
            (part["type"] in _REGULAR or (bool(children) and part["type"] in _COMPOSED))
            and all(isinstance(text, str) and self.text.split(text)[1] is None for text in texts)
            and all(map(self._is_regular, children))
        )

    def _separated(self, part: Json, where: str, follow: Ways) -> Ways:
        """Return what `tag (separator tag)*` or the empty text begins with."""
        loop = self._new_name("l")
        after = follow if part["stop_after_first"] else {loop: ""}
        first = unite(*(self._build(tag, f"{where}/tags/{i}", after, ()) for i, tag in enumerate(part["tags"])))
        if not part["stop_after_first"]:
            self._loops.close(loop, unite(self._literal(part["separator"], first), follow))
        first = self._loops.enter(loop, first)
        return first if part["at_least_one"] else unite(first, follow)

    def _triggered(self, part: Json, where: str, follow: Ways, exits: Exits) -> Ways:
        text = self._new_name("t")
        after = follow if part["stop_after_first"] else {text: ""}
        triggers = part.get("triggers", ())
        ids = [self._find_token(each, where) for each in part.get("trigger_tokens", ())]
        rests: dict[str, list[Ways]] = {trigger: [] for trigger in triggers}
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
        if not set(ids) <= {*self.vocabulary.special_tokens.values()}:
            reason = "only special tokens, which no text contains, may open tags"
            raise UnsupportedGrammar(where, "trigger_tokens", reason)
        ways = self._free_text(text, rests, part.get("excludes", ()), where, follow, exits, tokens)
        return self._loops.enter(text, unite(*firsts)) if part["at_least_one"] else ways

    def _dispatch(self, part: Json, where: str, follow: Ways, exits: Exits) -> Ways:
        text = self._new_name("t")
        after = {text: ""} if part["loop"] else follow
        rests: dict[str, list[Ways]] = {}
        for index, (pattern, content) in enumerate(part["rules"]):
            found = self._build(content, f"{where}/rules/{index}/1", after, ())
            rests.setdefault(pattern, []).append(found)
        return self._free_text(text, rests, part["excludes"], where, follow, exits)

    # Free text

    def _free_text(
        self, name: str, triggers: Mapping[str, list[Ways]], excludes: Sequence[str], where: str, follow: Ways,
        exits: Exits, tokens: Sequence[Ways] = (),
    ) -> Ways:
        """Return what free text begins with: triggers and exits go on elsewhere, excluded patterns are forbidden.

        Args:
            name: of this text, by which what follows a trigger may lead back to it.
        """
        patterns = {trigger: list(found) for trigger, found in triggers.items()}
        ends: dict[str, list[Ways]] = {}
        for text, after in exits:
            trigger = next((each for each in triggers if text.startswith(each)), None)
            if trigger is None:
                ends.setdefault(text, []).append(after)
            else:
                # Keep an end possible after a trigger that is its prefix.
                patterns[trigger].append(self._literal(text.removeprefix(trigger), after))
        for text, found in ends.items():
            patterns.setdefault(text, []).extend(found)
        led = {pattern: unite(*found) for pattern, found in patterns.items()}
        forbidden = dict.fromkeys(each for each in excludes if not any(pattern in each for pattern in led))
        every = [*led, *forbidden]
        check_patterns(every, where)
        opened = list(tokens)
        for pattern, after in led.items():
            if (special := next(filter(pattern.startswith, self.text.specials), None)) is not None:
                rest = self._literal(pattern.removeprefix(special), after)
                opened.append(self._add_token(self.vocabulary.special_tokens[special], rest))
        following = [] if exits else [follow]
        if self.has_fast_text and all(map(self.borders.is_end, following)):
            self.borders.add(name, Border(None, ANY_CHARACTER))
            self.text.rules[name] = self._write_free(every, led, opened, following)
            return {name: ""}
        hits = [prefix(f"({make_hit(every, pattern)})", after) for pattern, after in led.items()]
        tails = [prefix(f"({make_tail(every)})", after) for after in (*opened, *following)]
        return self._loops.close(name, unite(*hits, *tails))

    def _limit(self, name: str, most: int, where: str, lead: str, exits: Exits) -> None:
        """Limit the tokens of a text, which has a rule of its own."""
        if name not in self.borders:
            raise UnsupportedGrammar(where, "max_tokens", "only text that a tag's end or the whole text's end follows")
        self.text.rules[name] = self.limit_text(self.text.rules[name], most, lead, [end for end, _ in exits])

    def _write_free(
        self, patterns: Sequence[str], led: Mapping[str, Ways], tokens: Sequence[Ways], following: Sequence[Ways]
    ) -> str:
        lexemes = make_lexemes(patterns)
        hits = dict(zip(patterns, lexemes.hits, strict=True))
        ways = [f"{self.text.name(hits[pattern])} {self._refer(found)}" for pattern, found in led.items()]
        tail = self.text.name(lexemes.tail)
        ways += [f"{tail}? {self._refer(found)}" for found in (*tokens, *following)]
        parts = f"{self.text.name(lexemes.part)}* " if lexemes.part else ""
        return f"{parts}({' | '.join(ways)})"

def find_end(part: Json) -> str:
    """Return the fixed text at the end of a format, "" for none."""
    if part["type"] == "tag" and len(part["end"]) == 1 and isinstance(part["end"][0], str):
        return str(part["end"][0])
    return str(part.get("value", ""))


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
