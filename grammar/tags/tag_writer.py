"""A structural tag as rules of Lark: fixed texts and free text up to its marks, and references to the values' grammars.

What has no end of its own, as free text and patterns, is written together with the fixed text behind it, at which it
ends. So llguidance's lexer, which takes the longest lexeme and never goes back, knows where each part ends.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidGrammar, UnsupportedGrammar
from ..regex.dialects import read_classes
from ..regex.text import quote, write_terminal
from .free_text import ANY
from .lark_text import LarkText
from .structural_tag import list_children

MAX_NUM_PARTS = 20_000
MAX_PATTERN_CHARS = 16_384
NO_END = "nothing marks its end; put a const_string behind it"
_COMPOSED = ("sequence", "or", "optional", "star", "plus", "repeat")
_NUMBER = re.compile(r"[0-9.eE+\-]")

Json = dict[str, Any]
# The fixed texts of which one ends a part and is written with it; none at the end of the answer, None elsewhere.
Ends = tuple[str, ...] | None


@dataclass
class TagWriter:
    """Writes the rules of one structural tag.

    Attributes:
        write_value: returns the expression of a schema or grammar at a place, with the text before it, and whether
            it may be a number.
        limit_text: returns the expression of a text with a limit of its tokens, of the text before it and its ends.
        is_spaced: llguidance takes white space behind a value where another one follows.
    """

    text: LarkText
    write_value: Callable[[Json, str, str], tuple[str, bool]]
    limit_text: Callable[[str, int, str, Sequence[str]], str]
    is_spaced: bool
    _num_parts: int = 0

    def write(self, part: Json, where: str, ends: Ends = (), lead: str = "") -> str:
        """Return the expression of a format and its end, "" for no text.

        Args:
            lead: the text right before it, "" where it may be another.

        Raises:
            UnsupportedGrammar: the text does not determine where a part ends.
        """
        self._count(1)
        kind = part["type"]
        if kind == "const_string":
            return join(self.text.literal(part["value"]), self._end(ends))
        if (ends is not None or not has_pattern(part)) and (terminal := self._write_terminal(part)) is not None:
            return self._close(terminal, ends)
        match kind:
            case "regex":
                raise UnsupportedGrammar(where, kind, NO_END)
            case "json_schema":
                return self._write_schema(part, where, ends, lead)
            case "grammar":
                return self._write_grammar(part, where, ends)
            case "sequence":
                return self._sequence(part["elements"], where, ends, lead)
            case "or":
                parts = enumerate(part["elements"])
                return group(self.write(each, f"{where}/elements/{i}", ends, lead) for i, each in parts)
            case "optional":
                return group([self.write(part["content"], f"{where}/content", ends, lead), self._end(ends)])
            case "star" | "plus" | "repeat":
                return join(self._repeat(part, where), self._end(ends))
            case "tag":
                return join(self.text.literal(part["begin"]), self._tag_rest(part, where, ends))
            case "any_text":
                text = self._free_text(part, {}, part["excludes"], where, ends)
                most = part["max_tokens"]
                return text if most is None else self.limit_text(text, most, lead, ends or ())
            case "triggered_tags":
                return self._triggered(part, where, ends)
            case "dispatch":
                return self._dispatch(part, where, ends)
            case "tags_with_separator":
                return self._separated(part, where, ends)
        raise AssertionError(f"{kind} was let through by the reader")

    def _count(self, num_parts: int) -> None:
        self._num_parts += num_parts
        if self._num_parts > MAX_NUM_PARTS:
            raise InvalidGrammar(f"the structural tag unfolds into more than {MAX_NUM_PARTS} parts")

    def _end(self, ends: Ends) -> str:
        return group(map(self.text.literal, ends)) if ends else ""

    # Regular formats

    def _write_terminal(self, part: Json) -> str | None:
        """Return the terminal of a format of fixed texts and patterns, without special tokens; None for any other."""
        kind = part["type"]
        if kind == "const_string":
            return quote(part["value"]) if self.text.split(part["value"])[1] is None else None
        if kind == "regex":
            return write_terminal(read_classes(part["pattern"]))
        if kind not in _COMPOSED:
            return None
        num_before = self._num_parts
        inside = [self._write_terminal(child) for _, child in list_children(part, "")]
        self._count(1)
        if None in inside:
            return None
        if kind in ("sequence", "or"):
            return f"({(' ' if kind == 'sequence' else ' | ').join(map(str, inside))})"
        least, most = count_repeats(part)
        self._count((self._num_parts - num_before) * max(most, least))
        return f"({inside[0]}){{{least},{most if most >= 0 else ''}}}"

    def _close(self, terminal: str, ends: Ends) -> str:
        """Return the expression of a terminal up to the first of the ends."""
        ways = []
        for end in ends or ():
            others = " | ".join(quote(each) for each in ends or () if each != end)
            ways.append(self.text.close(f"{terminal} & ~({ANY} ({others}) {ANY})" if others else terminal, end))
        return group(ways) if ways else self.text.name(terminal)

    # Values

    def _write_schema(self, part: Json, where: str, ends: Ends, lead: str) -> str:
        value, is_number = self.write_value(part, where, lead)
        if (is_number and any(map(_NUMBER.match, ends))) if ends is not None else (is_number or self.is_spaced):
            raise UnsupportedGrammar(where, part["type"], f"{NO_END}, or give the schema a type")
        return join(value, self._end(ends))

    def _write_grammar(self, part: Json, where: str, ends: Ends) -> str:
        """Return the expression of GBNF and its end, written letter by letter, so that no lexeme is the longer one."""
        if ends is None:
            raise UnsupportedGrammar(where, part["type"], NO_END)
        value, _ = self.write_value(part, where, "")
        return group(join(value, *map(quote, end)) for end in ends or ("",))

    # Composed formats

    def _sequence(self, elements: Sequence[Json], where: str, ends: Ends, lead: str) -> str:
        found, is_begun = [], False
        starts = [each.get("value") or each.get("begin", "") for each in elements[1:]]
        follow: list[Ends] = [*((start,) if start else None for start in starts), ends]
        for index, (element, after) in enumerate(zip(elements, follow, strict=True)):
            place = f"{where}/elements/{index}"
            if not is_begun:
                found.append(self.write(element, place, after, lead))
            else:
                is_tag = element["type"] == "tag"
                found.append(self._tag_rest(element, place, after) if is_tag else self._end(after))
            is_begun, lead = bool(after), find_end(element)
        return join(*found)

    def _tag_rest(self, tag: Json, where: str, ends: Ends) -> str:
        """Return the expression of a tag behind its beginning."""
        if tag["end"] == [""]:
            return self.write(tag["content"], f"{where}/content", ends, tag["begin"])
        if "" in tag["end"]:
            raise UnsupportedGrammar(where, "end", "an empty end stands alone")
        return join(self.write(tag["content"], f"{where}/content", tuple(tag["end"]), tag["begin"]), self._end(ends))

    def _repeat(self, part: Json, where: str) -> str:
        least, most = count_repeats(part)
        num_before = self._num_parts
        inner = self.write(part["content"], f"{where}/content", None)
        self._count((self._num_parts - num_before) * max(most, least))
        return f"({inner}){{{least},{most if most >= 0 else ''}}}"

    def _separated(self, part: Json, where: str, ends: Ends) -> str:
        tags = group(self.write(tag, f"{where}/tags/{i}", None) for i, tag in enumerate(part["tags"]))
        if not part["stop_after_first"]:
            tags = f"{tags} ({join(self.text.literal(part['separator']), tags)})*"
        return join(tags if part["at_least_one"] else f"({tags})?", self._end(ends))

    # Free text

    def _triggered(self, part: Json, where: str, ends: Ends) -> str:
        triggers, firsts = part["triggers"], []
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        name = self.text.rule("")
        after, behind = ("", ends) if part["stop_after_first"] else (name, None)
        for index, tag in enumerate(part["tags"]):
            place, begin = f"{where}/tags/{index}", tag["begin"]
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(found) != 1:
                raise InvalidGrammar(f"{place}: {len(found)} triggers fit {begin[:80]!r}; one must")
            rest = join(self._tag_rest(tag, place, behind), after)
            firsts.append(join(self.text.literal(begin), rest))
            rests[found[0]].append(join(self.text.literal(begin.removeprefix(found[0])), rest))
        self.text.rules[name] = self._free_text(part, rests, part["excludes"], where, ends)
        return group(firsts) if part["at_least_one"] else name

    def _dispatch(self, part: Json, where: str, ends: Ends) -> str:
        name, rests = self.text.rule(""), dict[str, list[str]]()
        for index, (pattern, content) in enumerate(part["rules"]):
            place = f"{where}/rules/{index}/1"
            found = join(self.write(content, place, None), name) if part["loop"] else self.write(content, place, ends)
            rests.setdefault(pattern, []).append(found)
        self.text.rules[name] = self._free_text(part, rests, part["excludes"], where, ends)
        return name

    def _free_text(
        self, part: Json, triggers: Mapping[str, list[str]], excludes: Sequence[str], where: str, ends: Ends
    ) -> str:
        """Return the expression of free text: triggers and ends go on elsewhere, excluded patterns are forbidden."""
        if ends is None:
            raise UnsupportedGrammar(where, part["type"], NO_END)
        led = {trigger: list(found) for trigger, found in triggers.items()}
        for end in ends:
            # An end stays possible behind a trigger that it begins with.
            mark = next((trigger for trigger in triggers if end.startswith(trigger)), end)
            led.setdefault(mark, []).append(self.text.literal(end.removeprefix(mark)))
        forbidden = [each for each in dict.fromkeys(excludes) if not any(mark in each for mark in led)]
        check_patterns([*led, *forbidden], where)
        ways = [(mark, group(found)) for mark, found in led.items()]
        return self.text.until(ways, None if ends else "", forbidden)


def join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def group(parts: Any) -> str:
    """Return the expression of alternatives, "" where all are empty."""
    found = list(dict.fromkeys(parts))
    if len(found) < 2:
        return found[0] if found else ""
    return f"({' | '.join(each or chr(34) * 2 for each in found)})"


def count_repeats(part: Json) -> tuple[int, int]:
    """Return how often a part is repeated, at most -1 for any number."""
    return {"optional": (0, 1), "star": (0, -1), "plus": (1, -1)}.get(part["type"]) or (part["min"], part["max"])


def has_pattern(part: Json) -> bool:
    return part["type"] == "regex" or any(has_pattern(child) for _, child in list_children(part, ""))


def find_end(part: Json) -> str:
    """Return the fixed text at the end of a format, "" for none."""
    if part["type"] == "tag" and len(part["end"]) == 1:
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
