"""Borders: whether the text of a structural tag determines where each of its values begins and ends."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .free_text import ANY
from .ways import Ways

ANY_CHARACTER = "(?s:.)"
NO_BEGIN = "nothing marks where it begins; put a const_string before it"
NO_END = "nothing marks its end; put a const_string behind it, or give the schema a type"


class Value(NamedTuple):
    """A value in the rules.

    Attributes:
        text: what the rules write for it.
        first: class of the characters it may begin with.
        more: class of the characters that may follow a complete value as a part of it; "" for none.
        is_checked: something beside llguidance has to know that it is this value which begins.
        is_spaced: llguidance takes white space between it and a value right behind it.
    """

    text: str
    first: str
    more: str = ""
    is_checked: bool = False
    is_spaced: bool = False


class Border(NamedTuple):
    """A rule that begins with a value, a token or free text, to which a lexeme of text leads.

    Attributes:
        value: None for a token or free text.
        first: class of the characters that may come first; "" for a token.
        place: of the value in the structural tag.
        next: what follows the value.
    """

    value: Value | None
    first: str
    place: str = ""
    next: Mapping[str, str] = {}


@dataclass(eq=False)
class Conflict(Exception):
    """The text does not determine where a value begins or ends."""

    place: str
    reason: str


@dataclass
class Borders:
    """The borders of one structural tag, by the names of their rules.

    Attributes:
        is_empty: whether a Lark terminal matches nothing at all.
    """

    is_empty: Callable[[str], bool]
    _found: dict[str, Border] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[Border]:
        return iter(self._found.values())

    def add(self, name: str, border: Border) -> None:
        self._found[name] = border

    def is_end(self, ways: Ways) -> bool:
        tokens = (border for border in ways if border)
        return not any(ways.values()) and all(self._found.get(each, Border(None, "-")).first == "" for each in tokens)

    def find_first(self, border: str) -> str:
        return self._found[border].first if border else ""

    def check_begins(self, ways: Ways) -> None:
        """Raise Conflict if a text that reaches a border could also continue, or reach another border."""
        if len(ways) == 1 and "" in ways.values():
            return
        texts = {border: f"({text})" if text else '""' for border, text in ways.items()}
        wrong = {}
        for border, text in texts.items():
            if first := self.find_first(border):
                rivals = [rest for each, rest in texts.items() if each != border and self._are_confused(border, each)]
                longer = f"{text} /{first}/ {ANY} & ({' | '.join(texts.values())})"
                wrong[border] = [longer, *([f"{text} & ({' | '.join(rivals)})"] if rivals else [])]
        every = " | ".join(f"({each})" for parts in wrong.values() for each in parts)
        if every and not self.is_empty(every):
            faulty = (each for each, parts in wrong.items() if not all(map(self.is_empty, parts)))
            raise Conflict(self._found[next(faulty)].place, NO_BEGIN)

    def _are_confused(self, border: str, rival: str) -> bool:
        """Return whether two alternatives at one position could be confused."""
        firsts = self.find_first(border), self.find_first(rival)
        if not all(firsts):
            return False
        pair = [self._found[each].value for each in (border, rival)]
        if pair[0] is not None and pair[0] == pair[1]:
            return False
        # Free text and GBNF have lexemes of their own, which longer lexemes could override.
        if ANY_CHARACTER in firsts:
            return True
        is_checked = any(value is not None and value.is_checked for value in pair)
        return is_checked and not self.is_empty(f"/{firsts[0]}/ & /{firsts[1]}/")

    def check_ends(self, border: Border, ways: Ways) -> None:
        """Raise Conflict if a complete value could continue with the text after it.

        Args:
            ways: what follows the value, without loops.
        """
        value = border.value
        if value is None or not (value.more or value.is_spaced):
            return
        for each, text in ways.items():
            first = self.find_first(each)
            rest = " ".join(filter(None, (f"({text})" if text else "", f"/{first}/ {ANY}" if first else ""))) or '""'
            is_joined = value.is_spaced and not text and each and self._found[each].value is not None
            if is_joined or (value.more and not self.is_empty(f"({rest}) & (/{value.more}/ {ANY})")):
                raise Conflict(border.place, NO_END)
