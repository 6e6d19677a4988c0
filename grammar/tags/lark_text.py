"""Text in a Lark grammar for llguidance: fixed texts, free text up to marks, and rules that are written once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..engines.lark_rules import LarkRules
from ..regex.text import quote
from .free_text import ANY, make_lexemes, make_tail
from .tool_styles import PLACE

IDS = {"{index}": "/[0-9]{1,4}/", "{id}": "/[A-Za-z0-9_-]{1,64}/"}


@dataclass
class LarkText(LarkRules):
    """The rules and terminals of one grammar.

    Attributes:
        specials: the names of special tokens that may stand in a fixed text, longest first, with their ids.
        id_pattern: of the id of a call.
    """

    specials: Mapping[str, int]
    id_pattern: str
    _keys: dict[str, int] = field(default_factory=dict)
    _literals: dict[str, str] = field(default_factory=dict)

    def share(self, key: str, make: Callable[[], str]) -> str:
        """Return the rule of something that is written once."""
        if key not in self.rules:
            self.rules[key] = ""
            self.rules[key] = make()
        return key

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Return what stands before the first special token in a text, its name, and the rest."""
        found = [(text.find(name), name) for name in self.specials if name in text]
        if not found:
            return text, None, ""
        start, name = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        return text[:start], name, text[start + len(name) :]

    def literal(self, text: str) -> str:
        """Return the expression of a fixed text, "" for none; a special token may also be written as text."""
        if text not in self._literals:
            parts, rest = [], text
            while rest:
                before, name, rest = self.split(rest)
                parts += [self.name(quote(before))] if before else []
                if name is not None:
                    token = f"token_{self.specials[name]}"
                    self.rules[token] = f"<[{self.specials[name]}]> | {self.name(quote(name))}"
                    parts.append(token)
            self._literals[text] = " ".join(parts) if len(parts) < 2 else self.rule(" ".join(parts))
        return self._literals[text]

    def fill(self, text: str, key: str, terminal: str = "") -> str:
        """Return the expression of a fixed text with the place {key}, for a key or for a terminal of keys."""
        before, _, after = text.partition("{key}")
        if not terminal and not any(name in text for name in self.specials):
            return self.literal(before + key + after)
        # What stands around a special token is shared.
        return " ".join(filter(None, (self.literal(before), terminal or self.name(quote(key)), self.literal(after))))

    def template(self, text: str, tool: str = "") -> str:
        """Return the expression of a text with places for a name, an id or a number."""
        parts, at = [], 0
        for found in [*PLACE.finditer(text.replace("{name}", tool)), None]:
            filled = text.replace("{name}", tool)
            parts.append(self.literal(filled[at : found.start() if found else None]))
            if found is not None:
                parts.append(self.name(self.id_pattern if found[0] == "{id}" else IDS[found[0]]))
                at = found.end()
        return " ".join(filter(None, parts))

    def until(
        self, ways: Sequence[tuple[str, str]], tail: str | None = None, forbidden: Sequence[str] = ()
    ) -> str:
        """Return the expression of free text up to the first of some marks, each with what follows it.

        Args:
            tail: what may follow the text where no mark comes; None where one has to come.
            forbidden: what does not stand in the text.
        """
        marks = [*(mark for mark, _ in ways), *forbidden]
        lexemes = make_lexemes(marks)
        rest = self.name(lexemes.tail)
        found = []
        for (mark, following), hit in zip(ways, lexemes.hits, strict=False):
            found.append(f"{self.name(hit)} {following}")
            before, name, after = self.split(mark)
            if name is not None:
                token = f"<[{self.specials[name]}]> {self.literal(after)} {following}"
                before_token = f"{ANY} {quote(before)} & {make_tail(marks)}" if before else ""
                found.append(f"{self.name(before_token) if before else f'{rest}?'} {token}")
        if tail is not None:
            found.append(f"{rest}? {tail}")
        parts = f"{self.name(lexemes.part)}* " if lexemes.part else ""
        return f"{parts}({' | '.join(found)})"

    def key(self, text: str) -> str:
        return f"_{self._keys.setdefault(text, len(self._keys))}"

    def close(self, body: str, end: str) -> str:
        """Return the expression of a text that a terminal describes, up to the end behind it."""
        inside = f"(({body}) & ~({ANY} {quote(end)} {ANY}))"
        before, name, after = self.split(end)
        ways = [self.name(f"{inside} {quote(end)}")]
        if name is not None:
            ways.append(f"{self.name(f'{inside} {quote(before)}')} <[{self.specials[name]}]> {self.literal(after)}")
        return f"({' | '.join(ways)})"
