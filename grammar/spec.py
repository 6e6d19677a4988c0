"""GrammarSpec: the constraint that a request puts on its output."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, get_args

from .csv_table import describe_table
from .engines.lark import check_lark, remove_quoted
from .errors import InvalidGrammar, naming
from .regex.text import ends_in_escape
from .schema.dialect import check_well_formed
from .tags.structural_tag import describe_tags, list_leaves, name_place
from .xml.tree import describe_document

Kind = Literal[
    "json_schema", "json_object", "regex", "choice", "ebnf", "lark", "csv", "xml", "structural_tag", "tool_calls"
]
# "spaced", "compact", "any", or a class of white space with a count.
Whitespace = str
PropertyOrder = Literal["schema", "any"]
WHITESPACES = ("spaced", "compact", "any")
SPACES = re.compile(r"\[(?: |\\[trn])+\]\{[1-9][0-9]{0,2}(?:,[0-9]{1,3})?\}")
PROPERTY_ORDERS = get_args(PropertyOrder)

# What files and requests write; "grammar" is EBNF or Lark, whichever it proves to be.
KINDS = ("json_schema", "regex", "choice", "grammar", "ebnf", "lark", "csv", "xml", "structural_tag")
BACKENDS = ("llguidance", "xgrammar", "outlines_core")
MAX_SPEC_BYTES = 256 * 1024
MAX_NESTING_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before the text that a grammar describes.

    Attributes:
        start: the mark that begins it; None where the prompt has begun it.
        end: the mark that ends it.
        allows_breaks: up to two line feeds may stand between it and the grammar's text.
    """

    start: str | None
    end: str
    allows_breaks: bool

    def __post_init__(self) -> None:
        if self.start == "" or not self.end:
            raise InvalidGrammar(f"the marks of reasoning are not empty: start={self.start!r}, end={self.end!r}")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One constraint on the output; make it with a constructor below, which validates it.

    Attributes:
        kind: what `text` is.
        text: the schema, the choices or the table as JSON, the pattern, the EBNF or the Lark grammar.
        whitespace: what separates JSON values: "spaced" as json.dumps does, "compact", "any" (bounded), or what may
            stand between them, such as "[ \\n]{1,4}" (see `read_spaces`).
        backend: the engine to use, or None for the one that is faithful.
        source: the text of which strings with `"x-grounded": true` have to be parts.
        property_order: of JSON objects: that of the schema, or any.
        reasoning: what stands before the text that the grammar describes; any kind may have it.
    """

    kind: Kind
    text: str
    whitespace: Whitespace = "spaced"
    backend: str | None = None
    source: str | None = None
    property_order: PropertyOrder = "schema"
    _document: Any = field(default=None, init=False, repr=False, compare=False)
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        if self.backend is not None and self.backend not in BACKENDS:
            raise InvalidGrammar(f"unknown grammar backend {self.backend!r}; choose from {list(BACKENDS)}")
        if self.whitespace not in WHITESPACES and SPACES.fullmatch(self.whitespace) is None:
            raise InvalidGrammar(f"unknown whitespace {self.whitespace!r}; choose from {list(WHITESPACES)}")
        if self.property_order not in PROPERTY_ORDERS:
            raise InvalidGrammar(f"unknown property order {self.property_order!r}; choose schema or any")
        check_size(self.text, self.kind)
        if self.source is not None:
            check_size(self.source, "source")

    @classmethod
    def json_schema(
        cls, schema: dict[str, Any] | str | bool, whitespace: Whitespace = "spaced",
        backend: str | None = None, source: str | None = None, property_order: PropertyOrder = "schema",
    ) -> "GrammarSpec":
        """Accept the JSON texts that are valid for a JSON Schema.

        Args:
            source: strings of schemas with `"x-grounded": true` have to be parts of this text (see
                schema/quotations.py).
            property_order: "schema" writes properties in its order, "any" in all (see schema/rule_writer.py).
        """
        parsed = parse_json(schema, "json_schema") if isinstance(schema, str) else schema
        if not isinstance(parsed, dict | bool):
            raise InvalidGrammar(f"a JSON schema is an object or a boolean, not {type(parsed).__name__}")
        # The order of keys is significant (properties are generated in it), so keys are not sorted.
        spec = cls("json_schema", dump_json(parsed, "json_schema"), whitespace, backend, source, property_order)
        check_depth(spec.document)
        check_well_formed(spec.document)
        return spec

    @property
    def document(self) -> Any:
        """The text as JSON, parsed once; it belongs to the spec and must not be changed."""
        if self._document is None:
            object.__setattr__(self, "_document", json.loads(self.text))
        return self._document

    @classmethod
    def json_object(cls, whitespace: Whitespace = "spaced", backend: str | None = None) -> "GrammarSpec":
        """Accept any JSON object."""
        return cls("json_object", '{"type": "object"}', whitespace, backend)

    @classmethod
    def regex(cls, pattern: str, backend: str | None = None) -> "GrammarSpec":
        """Accept the texts that a regular expression matches from start to end."""
        if not isinstance(pattern, str) or not pattern:
            raise InvalidGrammar("a regex is a string that is not empty")
        if ends_in_escape(pattern):
            raise InvalidGrammar("the regex ends with a backslash that escapes nothing")
        return cls("regex", pattern, backend=backend)

    @classmethod
    def choice(cls, choices: Sequence[str], backend: str | None = None) -> "GrammarSpec":
        """Accept exactly one of the given texts."""
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            raise InvalidGrammar("a choice is a list of strings")
        if not any(choices):
            raise InvalidGrammar("a choice needs at least one string that is not empty")
        return cls("choice", dump_json(list(dict.fromkeys(choices)), "choice"), backend=backend)

    @classmethod
    def ebnf(cls, text: str, backend: str | None = None) -> "GrammarSpec":
        """Accept the sentences of a GBNF grammar (llama.cpp's EBNF) whose start rule is `root`."""
        if not isinstance(text, str) or not text.strip():
            raise InvalidGrammar("an EBNF grammar is a string that is not empty")
        return cls("ebnf", text, backend=backend)

    @classmethod
    def lark(cls, text: str, backend: str | None = None) -> "GrammarSpec":
        """Accept the sentences of a Lark grammar whose start rule is `start`."""
        if not isinstance(text, str) or not text.strip():
            raise InvalidGrammar("a Lark grammar is a string that is not empty")
        check_lark(text)
        return cls("lark", text, backend=backend)

    @classmethod
    def csv(
        cls, columns: Mapping[str, str | Sequence[str]], backend: str | None = None, **options: Any
    ) -> "GrammarSpec":
        """Accept CSV tables with these columns: name -> type, or a list of the values allowed.

        Args:
            options: the other fields of a `csv_table.Table`.
        """
        return cls("csv", dump_json(describe_table({"columns": columns, **options}), "csv"), backend=backend)

    @classmethod
    def xml(
        cls, root: Mapping[str, Any], whitespace: Whitespace = "spaced", backend: str | None = None, **options: Any
    ) -> "GrammarSpec":
        """Accept XML documents with this tree of elements, whose format xml/tree.py documents.

        Args:
            options: the other fields of an `xml.tree.Document`.
        """
        return cls("xml", dump_json(describe_document({"root": root, **options}), "xml"), whitespace, backend)

    @classmethod
    def structural_tag(
        cls, tags: Mapping[str, Any] | str, whitespace: Whitespace = "spaced", backend: str | None = None
    ) -> "GrammarSpec":
        """Accept text with tagged parts that fit schemas; tags/structural_tag.py documents the format.

        Args:
            backend: the engine of the schemas in it.
        """
        parsed = parse_json(tags, "structural_tag") if isinstance(tags, str) else tags
        described = describe_tags(parsed)
        spec = cls("structural_tag", dump_json(described, "structural_tag"), whitespace, backend)
        for pointer, leaf in list_leaves(described["format"], "/format"):
            spec.make_leaf(name_place(pointer, described["is_legacy"]), leaf)
        return spec

    def make_leaf(self, pointer: str, leaf: Mapping[str, Any]) -> "GrammarSpec":
        """Return the spec of a schema, pattern or grammar in a structural tag, or say what is wrong with it there."""
        with naming(pointer):
            if leaf["type"] == "regex":
                # Automata for many patterns would take long to build; llguidance builds states on demand.
                return GrammarSpec.regex(leaf["pattern"], "llguidance")
            if leaf["type"] == "grammar":
                return GrammarSpec.ebnf(leaf["grammar"])
            order: PropertyOrder = "any" if leaf["any_order"] else "schema"
            return GrammarSpec.json_schema(leaf["json_schema"], self.whitespace, self.backend, property_order=order)


_SPACES = re.compile(r"(?:\[((?: |\\[trn]|\s)+)\]|( |\\[trn])|(\\s))(\*|\?|\{0,([1-9][0-9]{0,2})\})")
_ESCAPED = {"\t": r"\t", "\r": r"\r", "\n": r"\n"}


def read_spaces(pattern: str) -> Whitespace:
    """Return the white space of a pattern for what may stand between JSON values, such as "[ \\n]?"; at most 64 of it.

    Raises:
        InvalidGrammar: it is no class of white space with *, ? or {0,n}.
    """
    found = _SPACES.fullmatch(pattern)
    if found is None:
        raise InvalidGrammar(
            f"the white space {pattern[:80]!r} must be one class of white space with *, ? or {{0,n}}, such as '[ \\n]?'"
        )
    inside = found[1] or found[2] or r" \t\r\n"
    inside = "".join(_ESCAPED.get(char, char) for char in inside)
    most = {"*": "64", "?": "1"}.get(found[4], found[5])
    return f"[{inside}]{{1,{most}}}"


NAMES = {"json_schema": "JSON Schema", "structural_tag": "structural tag"}


def make_depth_error(kind: str) -> InvalidGrammar:
    return InvalidGrammar(f"the {NAMES.get(kind, kind)} is nested deeper than {MAX_NESTING_DEPTH} levels")


def parse_json(text: str, kind: str) -> Any:
    """Parse JSON text; raise InvalidGrammar with line and column for other text."""
    check_size(text, kind)
    try:
        return json.loads(text, parse_constant=refuse_constant, object_pairs_hook=reject_duplicate_keys)
    except RecursionError as error:
        raise make_depth_error(kind) from error
    except ValueError as error:
        raise InvalidGrammar(f"the {NAMES.get(kind, kind)} is not valid JSON: {error}") from error


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a duplicate key, of which Python's parser would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise InvalidGrammar(f"an object has the key {twice[:80]!r} twice")
    return found


def refuse_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which Python's parser accepts but JSON forbids."""
    raise InvalidGrammar(f"{name} is not a JSON number")


def dump_json(value: Any, kind: str) -> str:
    """Serialise a value. Raises InvalidGrammar if it is not a JSON value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise make_depth_error(kind) from error
    except (TypeError, ValueError) as error:
        raise InvalidGrammar(f"{kind} is not a JSON value: {error}") from error


def check_size(text: str, kind: str) -> None:
    """Refuse a text over the size limit or one that UTF-8 cannot carry."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidGrammar(f"{kind} holds a lone surrogate at character {error.start}") from error
    if num_bytes > MAX_SPEC_BYTES:
        raise InvalidGrammar(f"{kind} is {num_bytes} bytes long; the limit is {MAX_SPEC_BYTES} bytes")


def check_depth(value: Any) -> None:
    """Refuse a schema nested deeper than the limit, without recursion of our own."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_NESTING_DEPTH + 1):
        if not level:
            return
        found = chain.from_iterable([node.values() if isinstance(node, dict) else node for node in level])
        level = [node for node in found if isinstance(node, (dict, list))]
    raise make_depth_error("json_schema")


def read_spec(
    kind: str, value: Any, whitespace: Whitespace = "spaced", backend: str | None = None,
    property_order: PropertyOrder = "schema",
) -> GrammarSpec:
    """Return the spec of a kind from its value in a file or request, or raise GrammarError.

    Args:
        kind: one of KINDS.
        value: a text, or for kinds that are JSON the value or its text: {"columns": ...} for csv;
            {"root": ..., "definitions": ..., "declaration": ...} or an element alone for xml.
    """
    if kind not in KINDS:
        raise InvalidGrammar(f"unknown kind of grammar {kind!r}; choose from {list(KINDS)}")
    if kind == "grammar":
        # EBNF has ::= in every rule, Lark in none; the first one precedes any string.
        kind = "ebnf" if isinstance(value, str) and "::=" in remove_quoted(value) else "lark"
    match kind:
        case "json_schema":
            return GrammarSpec.json_schema(value, whitespace, backend, property_order=property_order)
        case "structural_tag":
            return GrammarSpec.structural_tag(value, whitespace, backend)
        case "regex":
            return GrammarSpec.regex(value, backend)
        case "ebnf" | "lark":
            return (GrammarSpec.ebnf if kind == "ebnf" else GrammarSpec.lark)(value, backend)
    parsed = parse_json(value, kind) if isinstance(value, str) else value
    if kind == "choice":
        if not isinstance(parsed, list):
            raise InvalidGrammar("a choice is a list of strings")
        return GrammarSpec.choice(parsed, backend)
    described = describe_table(parsed) if kind == "csv" else describe_document(parsed)
    return GrammarSpec("csv" if kind == "csv" else "xml", dump_json(described, kind), whitespace, backend)
