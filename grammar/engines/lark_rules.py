"""LarkRules: the rules and terminals of one Lark grammar, each terminal written once."""

from dataclasses import dataclass, field


@dataclass
class LarkRules:
    """The grammar while it is written.

    Attributes:
        rules: name -> body.
    """

    rules: dict[str, str] = field(default_factory=dict, kw_only=True)
    _terminals: dict[str, str] = field(default_factory=dict, kw_only=True)

    def write(self, start: str) -> str:
        """Return the grammar with this body of its start rule."""
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self.rules.items())]
        return "\n".join([*lines, *(f"{name}: {text}" for text, name in self._terminals.items())])

    def name(self, terminal: str) -> str:
        """Return the name of a terminal with this body."""
        return self._terminals.setdefault(terminal, f"T{len(self._terminals)}")

    def rule(self, body: str) -> str:
        """Write a rule and return its name."""
        name = f"r{len(self.rules)}"
        self.rules[name] = body
        return name
