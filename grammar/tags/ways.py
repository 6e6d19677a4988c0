"""What may come next in a structural tag: the rules that may follow, each with the text up to it."""

from dataclasses import dataclass, field

from ..errors import InvalidGrammar

MAX_TEXT_CHARS = 256 * 1024

# The name of a rule, "" for the end -> a terminal of the text up to it, "" for none.
Ways = dict[str, str]
END: Ways = {"": ""}


def prefix(text: str, ways: Ways) -> Ways:
    """Return ways with a text before them."""
    if sum(map(len, ways.values())) + len(ways) * len(text) > MAX_TEXT_CHARS:
        raise InvalidGrammar(f"the structural tag unfolds into texts of more than {MAX_TEXT_CHARS} characters")
    return {border: f"{text} {rest}".strip() for border, rest in ways.items()} if text else dict(ways)


def unite(*found: Ways) -> Ways:
    """Return all ways; of two texts to one border, either."""
    ways: Ways = {}
    for border, text in (pair for each in found for pair in each.items()):
        known = ways.get(border, text)
        ways[border] = text if known == text else f"({known} | {text})" if known and text else f"({known or text})?"
    return ways


@dataclass
class Loops:
    """Parts that may lead back to their own beginning, which has a name until it is known."""

    _begins: dict[str, Ways] = field(default_factory=dict)

    def expand(self, ways: Ways) -> Ways:
        """Return the ways with those of each loop in place of its beginning."""
        while (loop := next((each for each in ways if each in self._begins), None)) is not None:
            ways = self.enter(loop, ways)
        return ways

    def enter(self, loop: str, ways: Ways) -> Ways:
        """Return the ways with those of a loop in place of its beginning, outside of which none leads to it by text."""
        if loop not in ways or loop not in self._begins:
            return ways
        others = {border: text for border, text in ways.items() if border != loop}
        return unite(others, prefix(ways[loop], self._begins[loop]))

    def close(self, loop: str, ways: Ways) -> Ways:
        """Note what a loop begins with, and return it."""
        again = ways.pop(loop, "")
        self._begins[loop] = prefix(f"({again})*", ways) if again else ways
        return self._begins[loop]
