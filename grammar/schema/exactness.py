"""The table of keywords that llguidance 1.9 does not enforce exactly. All others it enforces.

A row gives a keyword, the values concerned and the reason; residual checks enforce it instead, or it is refused.
To add a keyword, add a row and a test.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ..regex.text import UnknownSyntax, list_sets
from .formats import CHECKED_FORMATS
from .keywords import NUMERIC_BOUNDS
from .node import Node
from .patterns import make_safe
from .rules import GROUNDED

Verdict = Literal["checked", "refused"]

# The largest double below 2**63.
MAX_COUNTED = 2**63 - 1024
# Below this number, doubles distinguish neighbouring integers.
MAX_BOUND = 2**53
# 10**22 is the last power of ten that a double represents exactly.
MAX_EXPONENT = 22
# llguidance follows a number by its remainder: 0.05 s and 5 MB for 9973, 1.2 s for 99991.
MAX_NUM_REMAINDERS = 20_000
# Characters that llguidance writes only as \uXXXX in JSON strings.
LONG_ESCAPED = frozenset(map(chr, {*range(0x20), 0x7F} - set(map(ord, "\b\f\n\r\t"))))


@dataclass(frozen=True)
class Surroundings:
    """Facts about the whole document that the rows need.

    Attributes:
        nodes: all its nodes.
    """

    nodes: tuple[Node, ...]

    @cached_property
    def has_open_names(self) -> bool:
        """Whether an object may have both listed names and others."""
        return any(map(is_open, self.nodes))

    @cached_property
    def has_one_of(self) -> bool:
        """Whether branches must exclude each other."""
        return any("oneOf" in node.keywords for node in self.nodes)

    @cached_property
    def fractions(self) -> frozenset[float]:
        bounds = (node.get(keyword, 0) for node in self.nodes for keyword in NUMERIC_BOUNDS)
        return frozenset(bound for bound in bounds if bound % 1)

    @cached_property
    def num_remainders(self) -> int:
        """The number of states that all steps of `multipleOf` take together, alone or where schemas meet."""
        steps = {Fraction(str(step)) for node in self.nodes if 0 < (step := node.get("multipleOf", 0)) < math.inf}
        is_combined = any("allOf" in node.keywords or "$ref" in node.keywords for node in self.nodes)
        return (math.prod if is_combined else sum)(map(count_remainders, steps))


Reason = str | None
Predicate = Callable[[Node, Any, Surroundings], Reason]


class Gap(NamedTuple):
    """A keyword of a node that llguidance does not enforce exactly."""

    node: Node
    keyword: str
    verdict: Verdict
    reason: str


class Row(NamedTuple):
    """When llguidance does not enforce a keyword: `why` returns the reason, None where it does."""

    keyword: str
    why: Predicate
    verdict: Verdict = "checked"


INEXACT = "that cannot be represented exactly as a double"
PATTERN_REASON = "one of its character classes would match other characters than JSON Schema requires"
LONG_ESCAPE_REASON = ("it needs a \\uXXXX escape, which is disabled in schemas with open property names")


def always(reason: str) -> Predicate:
    return lambda node, value, around: reason


def is_bound_inexact(node: Node, value: Any, around: Surroundings) -> Reason:
    """Numbers are read as doubles and counted in 64 bits; 79-bit integers end the process."""
    return None if abs(value) < MAX_BOUND and is_exact(value) else f"{value} is a bound {INEXACT}"


def lets_bound_through(node: Node, value: Any, around: Surroundings) -> Reason:
    """With a whole excluded bound and an opposite one less than 1 away, the excluded number itself is accepted."""
    is_near = any(abs(value - bound) < 1 for bound in around.fractions)
    is_meant = not value % 1 and is_near and node.get("type") != "integer"
    return ("next to a bound less than 1 away, the excluded number itself would be let through" if is_meant else None)


def is_step_large(node: Node, value: Any, around: Surroundings) -> Reason:
    """llguidance enumerates all remainders when it compiles."""
    if around.num_remainders <= MAX_NUM_REMAINDERS:
        return None
    return f"digits are followed by their remainder, and there are more than {MAX_NUM_REMAINDERS} of them"


def has_inexact_value(node: Node, value: Any, around: Surroundings) -> Reason:
    """As `is_bound_inexact`, for numbers in listed values."""
    inexact = find_inexact(value)
    return None if inexact is None else f"{inexact} is {INEXACT}"


def needs_long_escape(node: Node, value: Any, around: Surroundings) -> Reason:
    """With open names only short escapes are written, because `\\u0061` could repeat a listed `a`."""
    return LONG_ESCAPE_REASON if around.has_open_names and has_long_escape(value) else None


def needs_long_escape_in_pattern(node: Node, value: Any, around: Surroundings) -> Reason:
    return LONG_ESCAPE_REASON if around.has_open_names and is_long_escaped(value) else None


def is_pattern_inexact(node: Node, value: Any, around: Surroundings) -> Reason:
    """A pattern without a safe form; under `oneOf` also one whose safe form is narrower."""
    safe = make_safe(value)
    return PATTERN_REASON if safe is None or (safe != value and around.has_one_of) else None


def are_patterns_inexact(node: Node, value: Any, around: Surroundings) -> Reason:
    """The patterns of names are used as they are."""
    return PATTERN_REASON if any(make_safe(pattern) != pattern for pattern in value) else None


def is_duplicate_prone(node: Node, value: Any, around: Surroundings) -> Reason:
    """A text may repeat a name that is not listed; a parser keeps the last one."""
    num_sure = max(len(set(node.get("required", ()))), 1)
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node.keywords
    if is_closed or value <= num_sure:
        return None
    return "names outside properties may repeat in the text, so their number is not enforced"


def is_format_checked(node: Node, value: Any, around: Surroundings) -> Reason:
    """No engine knows these."""
    return f"the format {value} is checked where the string ends" if value in CHECKED_FORMATS else None


_NEVER_ENFORCED = (*("not", "if", "contains", "uniqueItems", "dependencies", "dependentRequired", "dependentSchemas"),)
_UNEVALUATED = "only enforced without $ref, allOf, anyOf and the like in the same schema"
ROWS = (
    *(Row(keyword, always("not enforced token by token")) for keyword in _NEVER_ENFORCED),
    Row("propertyNames", always("names are not enforced token by token")),
    *(Row(keyword, always(_UNEVALUATED)) for keyword in ("unevaluatedItems", "unevaluatedProperties")),
    *(Row(keyword, is_bound_inexact) for keyword in (*NUMERIC_BOUNDS, "multipleOf")),
    Row("exclusiveMinimum", lets_bound_through),
    Row("exclusiveMaximum", lets_bound_through),
    Row("multipleOf", is_step_large),
    Row("enum", has_inexact_value),
    Row("const", has_inexact_value),
    Row("enum", needs_long_escape, "refused"),
    Row("const", needs_long_escape, "refused"),
    Row("pattern", needs_long_escape_in_pattern, "refused"),
    Row("pattern", is_pattern_inexact),
    Row("patternProperties", are_patterns_inexact),
    Row("minProperties", is_duplicate_prone),
    Row("format", is_format_checked),
    Row(GROUNDED, always("it needs a source text to quote from"), "refused"),
)
_BY_KEYWORD: dict[str, list[Row]] = {}
for _row in ROWS:
    _BY_KEYWORD.setdefault(_row.keyword, []).append(_row)


def find_gaps(node: Node, around: Surroundings) -> Iterator[Gap]:
    """Yield what llguidance does not enforce of one node, each keyword once."""
    if _BY_KEYWORD.keys().isdisjoint(node.keywords):
        return
    for keyword in [keyword for keyword in node.keywords if keyword in _BY_KEYWORD]:
        for row in _BY_KEYWORD[keyword]:
            reason = row.why(node, node.keywords[keyword], around)
            if reason is not None:
                yield Gap(node, keyword, row.verdict, reason)
                break


def is_exact(value: int | float) -> bool:
    """Return whether llguidance, which reads numbers as doubles and counts in 64 bits, reads this one exactly."""
    return abs(value) < MAX_COUNTED and (
        is_read_exactly(value) if isinstance(value, float) else int(float(value)) == value
    )


def is_read_exactly(value: float) -> bool:
    """Return whether llguidance reads this double from its text: it multiplies all digits by a power of ten.

    Where a double does not hold both, it reads one next to it: 102.79329386273996 for 102.79329386273997.
    """
    digits, _, power = repr(abs(value)).partition("e")
    whole, _, fraction = digits.partition(".")
    number = int(whole + fraction)
    return int(float(number)) == number and abs(int(power or 0) - len(fraction)) <= MAX_EXPONENT


def find_inexact(value: Any) -> int | float | None:
    """Return the first number in a value that llguidance does not read exactly."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list) and not are_strings(value):
        return next((found for found in map(find_inexact, value) if found is not None), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and not is_exact(value) else None


def count_remainders(step: Fraction) -> int:
    """Return about how many states of llguidance the multiples of a number take; powers of ten take few."""
    while step.denominator > 1:
        step *= 10
    digits = str(step.numerator)
    mantissa = digits.rstrip("0")
    return min(step.numerator, int(mantissa) * (1 + 20 * (len(digits) - len(mantissa))))


def is_open(node: Node) -> bool:
    """Return whether a node lists some names and allows others."""
    if node.get("additionalProperties") is False and "patternProperties" not in node.keywords:
        return False
    return any(node.get(keyword) for keyword in ("properties", "patternProperties", "required"))


def are_strings(values: list[Any]) -> bool:
    """Return whether all values are strings, without a call for each: lists of thousands nearly always are."""
    return {str}.issuperset(map(type, values))


def has_long_escape(value: Any) -> bool:
    """Return whether a string in a value needs a long escape; names of properties are not escaped."""
    if isinstance(value, list) and are_strings(value):
        value = "".join(value)
    if isinstance(value, str):
        return not LONG_ESCAPED.isdisjoint(value)
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(has_long_escape, children))


def is_long_escaped(pattern: str) -> bool:
    """Return whether a part of a pattern matches only characters with long escapes."""
    try:
        return any(members and LONG_ESCAPED.issuperset(map(chr, members)) for _, members in list_sets(pattern))
    except UnknownSyntax:
        return False
