"""Tool calls as one Lark grammar: only the tools that exist, with arguments that fit their schemas, in a model's form.

The text between values is written as literals and free text as lexemes that end with a mark, so that llguidance's
lexer, which takes the longest lexeme, always knows where a part ends. Each different schema is a grammar of its own.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from llguidance import regex_to_lark

from ..backend import CompiledGrammar
from ..engines.llguidance_backend import Complaint, LLGuidanceBackend
from ..engines.llguidance_json import HEADER, SEPARATORS, find_pattern, is_flexible, join_grammars, take_parts
from ..errors import InvalidGrammar, UnsupportedGrammar, naming
from ..match.checks import ResidualChecks
from ..plan import PlanEntry
from ..regex.text import escape
from ..schema.formats import ASSERTED_FORMATS, EXACT_PATTERNS
from ..schema.keywords import join_pointer
from ..schema.plain import ANNOTATIONS, check_plain, is_note
from ..spec import GrammarSpec, dump_json
from ..validator import SchemaValidator
from .arguments import ArgumentReader, CallCheck, extract, find_kind, find_types, resolve, strip_notes
from .checked import CheckedValue, CheckedVocabulary, add_values
from .free_text import ANY, make_lexemes, make_tail
from .regular import quote
from .text_value import TextCheck
from .tool_styles import ANSWER, MESSAGES, ToolStyle

Json = dict[str, Any]
NAME: Literal["tool_calls"] = "tool_calls"
MAX_CALLS = 16  # of an answer that has to call
MAX_LEAD = 24  # bytes
MAX_BITS = 63  # of a rule's number
_PLACE = re.compile(r"\{(?:name|index|id|key)\}")
_IDS = {"{index}": "/[0-9]{1,4}/", "{id}": "/[A-Za-z0-9_-]{1,64}/"}
_MISTRAL_ID = "/[A-Za-z0-9]{9}/"
_ROOT = re.compile(r".*/(?:\$defs|definitions)/root(?=/)")
_COPIED = re.compile(r"^/(?:properties/[^/]+|additionalProperties)(?=/(?:\$defs|definitions)/)")
_JSON_NAME = r'"(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"'
_XML_NAME = r"[\w.$@-]{1,128}"
_SPACE = "[ ]{1}"  # the whitespace of a loose style
# The spellings of what is no string, number or list.
_WORDS = ("true", "false", "null")
_OTHER_WORDS = {"true": "True", "false": "False", "null": "None"}
_PYTHON_STRING = r"""/'(?:[^'\\\n]|\\.)*'/ | /"(?:[^"\\\n]|\\.)*"/"""
_NUMBERS = {
    "integer": r"/-?(?:0|[1-9][0-9]{0,19})/",
    "number": r"/-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,20})?(?:[eE][-+]?[0-9]{1,2})?/",
}
_SIMPLE = frozenset(["type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"])
_RAW_FORMATS = {
    **EXACT_PATTERNS,
    "uuid": r"^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": r"^(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])$".replace(
        "1?[0-9]?[0-9]", "1[0-9]{2}|[1-9]?[0-9]"
    ),
}
# What a pattern may have to be read alike in JSON Schema and by llguidance.
_PLAIN_PATTERN = re.compile(
    r"(?:[^\\^$|(.\[]|\[\^?(?:[^\]\[\\&~]|\\[\]\\^/.-])+\]|\\[.^$*+?()\[\]{}|/-]|\\d|\((?!\?)|\(\?:)*"
)


def make_tool_spec(
    style: ToolStyle,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    is_forced: bool = False,
    is_parallel: bool = True,
    answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar of an answer that may call tools.

    Args:
        tools: the name and the schema of the arguments of each; the schemas are well formed.
        is_forced: the answer is calls and nothing else.
        is_parallel: whether there may be more than one call.
        answer: an answer without calls; None for any text, which may also stand beside calls.
    """
    if not tools:
        raise InvalidGrammar("tool calls need at least one tool")
    given = None if answer is None else {"kind": answer.kind, "text": answer.text, "order": answer.property_order}
    described = {
        "style": asdict(style), "tools": [*map(list, tools)], "is_forced": is_forced, "is_parallel": is_parallel,
        "answer": given,
    }  # fmt: skip
    options = () if answer is None else (answer.whitespace, answer.backend)
    return GrammarSpec(NAME, dump_json(described, "tools"), *options)


def is_surely_enforced(style: ToolStyle, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of arguments can be enforced in a style, as far as its keywords tell at once."""
    keys = list_keys(schema)
    is_known = style.dialect == "json" and all(re.fullmatch(_XML_NAME, name) for name in schema.get("properties", {}))
    return (style.parameter is None or (is_known and keys <= _SIMPLE)) and check_plain(schema) is not None


def read_style(described: Mapping[str, Any]) -> ToolStyle:
    fields: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in described.items()}
    return ToolStyle(**fields)


Route = Callable[[GrammarSpec, str, bool], CompiledGrammar]


def compile_tool_calls(
    spec: GrammarSpec, backend: LLGuidanceBackend, route: Route, tables: CheckedVocabulary, max_seconds: float
) -> CompiledGrammar:
    """Compile the description of tool calls, or raise GrammarError with a pointer into it.

    Each schema's grammar is first written and not built, which costs little. Where llguidance refuses the whole, each
    is built alone: that names the faulty one, or leaves to checks what llguidance cannot enforce.
    """
    deadline = time.monotonic() + max_seconds
    for is_built in (False, True):
        writer = ToolWriter(spec, partial(_route, route, is_built), tables, deadline)
        grammar = writer.write()
        try:
            program = backend.compile_text(grammar, is_json=True)
        except Complaint as error:
            complaint = error
            continue
        return CompiledGrammar(NAME, writer.make_plan, add_values(program, tables, writer.values))
    raise InvalidGrammar(f"the tool calls cannot be used: {complaint}")


def _route(route: Route, is_built: bool, spec: GrammarSpec, name: str) -> CompiledGrammar:
    return route(spec, name, is_built)


@dataclass(slots=True)
class Leaf:
    """A schema with a grammar of its own."""

    number: int
    compiled: CompiledGrammar
    pointers: list[str]


@dataclass
class ToolWriter:
    """Writes the grammar of one description of tool calls.

    Attributes:
        values: the values with checks.
        is_bounded: no check wants a longer number than `NumberBound` lets through.
    """

    spec: GrammarSpec
    route: Callable[[GrammarSpec, str], CompiledGrammar]
    tables: CheckedVocabulary
    deadline: float
    values: list[CheckedValue] = field(default_factory=list)
    is_bounded: bool = True
    _marks_values: bool = True
    _lines: dict[str, str] = field(default_factory=dict)
    _terminals: dict[str, str] = field(default_factory=dict)
    _leaves: dict[str, Leaf] = field(default_factory=dict)
    _arguments: list[str] = field(default_factory=list)
    _keys: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        described = self.spec.document
        self.style = read_style(described["style"])
        self._tools: list[tuple[str, Json]] = described["tools"]
        self._is_parallel: bool = described["is_parallel"]
        specials = self.tables.backend.vocabulary.special_tokens
        text = json.dumps(described["style"], ensure_ascii=False).replace('\\"', '"')
        # Names of special tokens in the style, longest first.
        self._specials = {name: specials[name] for name in sorted(specials, key=len, reverse=True) if name in text}
        self._whitespace = _SPACE if self.style.is_loose else self.spec.whitespace
        self._gap = " gap?" if is_flexible(self.spec.whitespace) else ""
        self._comma, self._colon = SEPARATORS.get(self._whitespace, SEPARATORS["any"])

    def write(self) -> str:
        """Return the whole grammar in llguidance's format.

        Raises:
            UnsupportedGrammar: a schema cannot be enforced in this form.
        """
        described = self.spec.document
        calls = [self._write_call(index) for index in range(len(self._tools))]
        self._lines["calls"] = " | ".join(calls)
        if "" in self.style.openings and not self.style.channel:
            marks = dict.fromkeys(head.partition("{name}")[0] for head in self.style.heads)
            self._lines["calls"] = " | ".join(f"{self._literal(mark)} {self._write_known(mark)}" for mark in marks)
        if self.style.channel:
            start = self._write_messages(described)
        elif described["is_forced"]:
            start = self._write_sections(MAX_CALLS)
        elif described["answer"] is not None or self.style.is_whole:
            start = self._write_whole(described["answer"])
        else:
            start = self._write_among_text()
        if self._gap:
            self._lines["gap"] = f"/{find_pattern(self._whitespace)}/"
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._lines.items())]
        lines += [f"{name}: {text}" for text, name in self._terminals.items()]
        parts = [take_parts(leaf.compiled.program.grammar) for leaf in self._leaves.values()]
        return join_grammars([json.dumps({"lark_grammar": HEADER + "\n".join(lines)}), *parts])

    def make_plan(self) -> tuple[PlanEntry, ...]:
        return tuple(
            entry._replace(pointer=pointer + entry.pointer)
            for leaf in self._leaves.values()
            for pointer in leaf.pointers
            for entry in leaf.compiled.plan
        )

    # Text

    def _name(self, terminal: str) -> str:
        return self._terminals.setdefault(terminal, f"T{len(self._terminals)}")

    def _rule(self, body: str) -> str:
        name = f"r{len(self._lines)}"
        self._lines[name] = body
        return name

    def _share(self, key: str, make: Callable[[], str]) -> str:
        """Return the rule of something that is written once."""
        if key not in self._lines:
            self._lines[key] = ""
            self._lines[key] = make()
        return key

    def _split(self, text: str) -> tuple[str, str | None, str]:
        """Return what stands before the first special token in a text, its name, and the rest."""
        found = [(text.find(name), name) for name in self._specials if name in text]
        if not found:
            return text, None, ""
        start, name = min(found, key=lambda pair: (pair[0], -len(pair[1])))
        return text[:start], name, text[start + len(name) :]

    def _literal(self, text: str) -> str:
        """Return the expression of a fixed text, "" for none; a special token may also be written as text."""
        parts = []
        while text:
            before, name, text = self._split(text)
            parts += [self._name(quote(before))] if before else []
            parts += [f"(<[{self._specials[name]}]> | {self._name(quote(name))})"] if name is not None else []
        return " ".join(parts)

    def _template(self, text: str, tool: str = "") -> str:
        """Return the expression of a text with places for a name, an id or a number."""
        parts, at = [], 0
        for found in [*_PLACE.finditer(text.replace("{name}", tool)), None]:
            filled = text.replace("{name}", tool)
            parts.append(self._literal(filled[at : found.start() if found else None]))
            if found is not None:
                is_mistral = found[0] == "{id}" and "[TOOL_CALLS]" in self.style.openings[0]
                parts.append(self._name(_MISTRAL_ID if is_mistral else _IDS[found[0]]))
                at = found.end()
        return " ".join(filter(None, parts))

    def _until(self, ways: Sequence[tuple[str, str]], tail: str | None = None) -> str:
        """Return the expression of free text up to the first of some marks, each with what follows it.

        Args:
            tail: what may follow the text where no mark comes; None where one has to come.
        """
        marks = [mark for mark, _ in ways]
        lexemes = make_lexemes(marks)
        rest = self._name(lexemes.tail)
        found = []
        for (mark, following), hit in zip(ways, lexemes.hits, strict=True):
            found.append(f"{self._name(hit)} {following}")
            before, name, after = self._split(mark)
            if name is not None:
                token = f"<[{self._specials[name]}]> {self._literal(after)} {following}"
                before_token = f"{ANY} {quote(before)} & {make_tail(marks)}" if before else ""
                found.append(f"{self._name(before_token) if before else f'{rest}?'} {token}")
        if tail is not None:
            found.append(f"{rest}? {tail}")
        parts = f"{self._name(lexemes.part)}* " if lexemes.part else ""
        return f"{parts}({' | '.join(found)})"

    # The whole answer

    def _write_sections(self, max_calls: int | None) -> str:
        """Return the expression of one section of calls, or of several in a row."""
        style = self.style
        section = self._share("section", lambda: " | ".join(self._write_section(each) for each in style.openings))
        has_end = bool(style.end or style.tail.strip("}"))
        if style.separator is not None or not (style.is_repeated and self._is_parallel and has_end):
            return section
        gap = f"{self._name(quote(chr(10)))}?"
        return f"{section} ({gap} {section})" + (f"{{0,{max_calls - 1}}}" if max_calls else "*") + f" {gap}"

    def _write_section(self, opening: str) -> str:
        """Return the expression of a section from what is left of its opening on."""
        style, more = self.style, ""
        tail = self._share("tail", lambda: self._template(style.tail) or '""')
        if style.separator is not None and self._is_parallel:
            # A separator that the end begins with is a part of the literal behind it.
            start = style.separator if style.end.startswith(style.separator or "\0") else ""
            later = "calls"
            if start:
                later = self._share("later", lambda: self._write_after([start + head for head in style.heads]))
            more = f"({tail} {'' if start else self._literal(style.separator)} {later})"
            more += f"{{0,{MAX_CALLS - 1}}}" if self.spec.document["is_forced"] else "*"
        return f"{self._literal(opening)} calls {more} {tail} {self._literal(style.end)}"

    def _write_whole(self, answer: Json | None) -> str:
        """Return the expression of an answer that is either calls or something else."""
        starts = {opening[0] for opening in self.style.openings if opening}
        excluded = "".join(map(escape, sorted(starts)))
        text = self._name(f"/[^{excluded}](?s:.*)/") + "?" if answer is None else self._write_answer(answer)
        sections = [self._write_section(each) for each in self.style.openings if each]
        self._lines["section"] = " | ".join(sections)
        return f"{text} | {self._write_sections(None)}" if sections else text

    def _write_answer(self, answer: Json) -> str:
        if answer["kind"] == "choice":
            return "(" + " | ".join(self._name(quote(each)) for each in json.loads(answer["text"])) + ")"
        if answer["kind"] == "regex":
            return self._name(f"/{regex_to_lark(answer['text'])}/")
        leaf = GrammarSpec(answer["kind"], answer["text"], self.spec.whitespace, property_order=answer["order"])
        return self._leaf(leaf, "/answer", "")

    def _write_among_text(self) -> str:
        style = self.style
        is_again = style.is_repeated and self._is_parallel
        ways: list[tuple[str, str]] = []
        for mark in style.marks:
            openings = [each for each in style.openings if each and each.startswith(mark)]
            if openings:
                sections = [self._write_section(each.removeprefix(mark)) for each in openings]
                ways.append((mark, f"({' | '.join(sections)}) {'text' if is_again else ''}"))
            else:
                ways.append((mark, self._write_unmarked(mark, is_again)))
        self._lines["text"] = self._until(ways, "")
        return "text"

    def _write_unmarked(self, mark: str, is_again: bool) -> str:
        """Return what follows the beginning of a call's head: a known name goes on as a call, another one as text."""
        calls = self._write_known(mark)
        names = " | ".join(quote(f'{name}"') for name, _ in self._tools)
        other = self._name(f"{ANY} & ~(({names}) {ANY})")
        tail = self._share("tail", lambda: self._template(self.style.tail) or '""')
        return f"({calls} {tail} {self._literal(self.style.end)} {'text' if is_again else ''} | {other})"

    def _write_known(self, mark: str) -> str:
        """Return the rule of what follows the beginning of a head that all calls have."""
        heads = [head.removeprefix(mark) for head in self.style.heads if head.startswith(mark)]
        return self._share(f"after{self._key(repr(heads))}", lambda: self._write_after(heads))

    def _write_after(self, heads: Sequence[str]) -> str:
        """Return the expression of all calls from their names on."""
        pairs = zip(self._tools, self._arguments, strict=True)
        return " | ".join(
            f"({' | '.join(self._template(head, name) for head in heads)}) {rule}" for (name, _), rule in pairs
        )

    def _write_messages(self, described: Json) -> str:
        style, answer = self.style, described["answer"]
        begins = [self._literal(style.channel.replace("{channel}", name)) for name in (*MESSAGES, ANSWER)]
        message = self._until([(style.next_message, "")])
        before = " | ".join(f"{begin} {message}" for begin in begins[:-1])
        final = f"{self._name('/(?s:.+)/')}?" if answer is None else self._write_answer(answer)
        last = "" if described["is_forced"] else f"{begins[-1]} {final} | "
        return f"({before})* ({last}{self._write_sections(1)})"

    # Calls and their arguments

    def _write_call(self, index: int) -> str:
        """Return the expression of a call up to the end of its arguments."""
        name, schema = self._tools[index]
        if time.monotonic() > self.deadline:
            raise InvalidGrammar("the schemas of the tools take too long to compile")
        place = f"/tools/{index}/parameters"
        try:
            body = self._write_object(schema, place)
        except UnsupportedGrammar as error:
            # An argument's schema is a document of its own, with the definitions of the whole.
            pointer = _COPIED.sub("", _ROOT.sub("", error.pointer))
            raise UnsupportedGrammar(place + pointer, error.keyword, error.reason) from error
        except InvalidGrammar as error:
            raise InvalidGrammar(f"{place}: {error}") from error
        arguments = self._rule(body or '""')
        self._arguments.append(arguments)
        return f"({' | '.join(self._template(head, name) for head in self.style.heads)}) {arguments}"

    def _write_object(self, schema: Json, place: str) -> str:
        """Return the expression of the arguments, which may come in any order."""
        keys = list_keys(schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_simple = keys <= _SIMPLE and set(required) <= properties.keys() and len(set(required)) <= MAX_BITS
        if self.style.parameter is None:
            if is_simple and "$schema" not in schema:
                return self._write_json_object(schema, place)
            text = json.dumps(strip_notes(schema), ensure_ascii=False)
            leaf = GrammarSpec("json_schema", text, self._whitespace, property_order="any")
            return self._leaf(leaf, place, "" if len(self.style.heads) > 1 else self.style.heads[0].rpartition("}")[2])
        keyword = next(iter(keys - _SIMPLE - self._list_idle(schema)), None)
        if keyword is not None:
            return self._write_checked_object(schema, place, keyword)
        other = schema.get("additionalProperties", True)
        properties = {**properties, **{name: other for name in required if name not in properties}}
        if len(set(required)) > MAX_BITS:
            raise UnsupportedGrammar("", "required", f"more than {MAX_BITS} arguments are required")
        members = []
        for name, child in properties.items():
            if child is False and name not in required:
                continue
            with naming(join_pointer("/properties", name)):
                members.append((*self._join_ways(self._write_argument(name, child, schema, place)), name in required))
        more = None
        if other is not False:
            more = self._join_ways(self._write_other_argument(other, schema, place))
        return self._write_members(members, "", more)

    def _join_ways(self, ways: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Return the expressions of the first argument and of a later one, whose separator is a part of its literal.

        Args:
            ways: the text before the value, and the expression of the rest.
        """
        starts = ("", self.style.parameter_separator)
        first, later = (" | ".join(f"{self._literal(start + way)} {rest}" for way, rest in ways) for start in starts)
        return (first, later) if len(ways) == 1 else (f"({first})", f"({later})")

    def _write_checked_object(self, schema: Json, place: str, keyword: str) -> str:
        """Return the expression of arguments with keywords about all of them, which are checked at their end."""
        end = self.style.tail or self.style.end
        if not self.style.writes_text or self.style.dialect != "json" or not end:
            raise UnsupportedGrammar("", keyword, "this model writes arguments one by one")
        is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        kept: Json = {key: schema[key] for key in ("properties", "$defs", "definitions", "$schema") if key in schema}
        listed = [name for name in schema.get("required", ()) if name in schema.get("properties", {})]
        self._marks_values = False
        body = self._write_object({**kept, "required": listed, "additionalProperties": not is_closed}, place)
        self._marks_values = True
        try:
            validator = SchemaValidator(schema)
        except InvalidGrammar as error:
            raise UnsupportedGrammar("", keyword, "no check reads it") from error
        tokens = self.tables.list_with(end[-1:].encode())
        reader = ArgumentReader(self.style, schema)
        check = CallCheck(end.encode(), validator, tokens, self.tables.spellings, False, reader)
        lead = "" if len(self.style.heads) > 1 else self.style.heads[0].rpartition("}")[2]
        return self._mark(f"({body})" if body else '""', lead, check)

    def _list_idle(self, schema: Json) -> set[str]:
        """Return the keywords of all arguments that hold for any that are written."""
        found = {key for key in schema if schema[key] is True or (schema[key] in ({}, []) and key != "anyOf")}
        if schema.get("minProperties", 1) <= len(set(schema.get("required", ()))):
            found.add("minProperties")
        if schema.get("maxProperties", 0) >= len(schema.get("properties", {})) and not self._is_open(schema):
            found.add("maxProperties")
        if not self._is_open(schema):
            found.add("unevaluatedProperties")
        if not {"then", "else"} & schema.keys():
            found.add("if")
        if "if" not in schema:
            found |= {"then", "else"}
        known = {"properties", "required", "allOf", "oneOf", "not", "enum", "const", "$ref", "dependentSchemas"}
        return found | {key for key in schema if key not in known and not _asserts(key)}

    def _is_open(self, schema: Json) -> bool:
        return schema.get("additionalProperties", True) is not False

    def _write_json_object(self, schema: Json, place: str) -> str:
        required, gap = schema.get("required", []), self._gap
        comma = self._name("/, ?/") if self.style.is_loose and not gap else f"{self._name(quote(self._comma))}{gap}"
        members = []
        for name, child in schema.get("properties", {}).items():
            if child is False and name not in required:
                continue
            key = json.dumps(name, ensure_ascii=False)
            lead = f"{key}{self._colon}"
            if gap:
                before, lead = f"{self._name(quote(key))}{gap} {self._name(quote(self._colon))}{gap}", ""
            elif self.style.is_loose:
                before, lead = self._name(f"/{escape(key)}: ?/"), ""
            else:
                before = self._name(quote(lead))
            with naming(join_pointer("/properties", name)):
                value = self._write_value(child, schema, name, place, lead)
            way = f"{before} {value}{gap}"
            members.append((way, f"{comma} {way}", name in required))
        other = schema.get("additionalProperties", True)
        more = None
        if other is not False:
            known = "|".join(escape(json.dumps(name, ensure_ascii=False)) for name in schema.get("properties", {}))
            cut = f" & ~/{regex_to_lark(f'(?:{known})')}/" if known else ""
            key = self._name(f"/{regex_to_lark(_JSON_NAME)}/{cut}")
            with naming("/additionalProperties"):
                value = self._write_value(other, schema, None, place, "")
            colon = self._name("/: ?/") if self.style.is_loose and not gap else f"{self._name(quote(self._colon))}{gap}"
            way = f"{key}{gap} {colon} {value}{gap}"
            more = (way, f"{comma} {way}")
        opening = f"{self._name(quote('{'))}{gap}"
        return f"{opening} {self._write_members(members, self._name(quote('}')), more)}"

    def _write_members(
        self, members: Sequence[tuple[str, str, bool]], close: str, other: tuple[str, str] | None = None
    ) -> str:
        """Write the rules of members in any order, each at most once, and return how they begin.

        Args:
            members: each as the first one and as a later one, with whether it has to be there.
            other: a member that is not listed, which may come several times.
        """
        ways = sorted(members, key=lambda member: not member[2])
        if not ways and other is None:
            return close
        num_required = sum(is_needed for _, _, is_needed in ways)
        close = close or '""'
        rest = f"r{len(self._lines)}"
        self._lines[f"{rest}::_"] = ""
        end = f" %if is_ones([0:{num_required}])" if num_required else ""
        lines, firsts = [f"{close}{end}"], [] if num_required else [close]
        for bit, (first, later, _) in enumerate(ways):
            once = f"{rest}::set_bit({bit}) %if bit_clear({bit})" if bit < MAX_BITS else f"{rest}::_"
            lines.append(f"{later} {once}")
            firsts.append(f"{first} {rest}::{1 << bit if bit < MAX_BITS else 0}")
        if other is not None:
            lines.append(f"{other[1]} {rest}::_")
            firsts.append(f"{other[0]} {rest}::0")
        self._lines[f"{rest}::_"] = "\n| ".join(lines)
        is_alike = all(first == later for first, later, _ in ways) and (other is None or other[0] == other[1])
        return f"{rest}::0" if is_alike else self._rule(" | ".join(firsts))

    # Values

    def _leaf(self, spec: GrammarSpec, place: str, lead: str) -> str:
        """Return the expression of a schema with a grammar of its own."""
        key = json.dumps([spec.kind, spec.text, spec.whitespace, spec.property_order])
        leaf = self._leaves.get(key)
        if leaf is None:
            number = len(self._leaves)
            leaf = self._leaves[key] = Leaf(number, self.route(spec, f"v{number}"), [])
            self.is_bounded &= leaf.compiled.program.is_bounded
        leaf.pointers.append(place)
        checks = leaf.compiled.program.checks
        call = f"@v{leaf.number}"
        return call if checks is None else self._mark(call, lead, checks)

    def _mark(self, expression: str, lead: str, checks: ResidualChecks | TextCheck) -> str:
        """Return the expression of a value with checks, which a marker may replace."""
        if not self._marks_values:
            return expression
        value = CheckedValue(len(self.values), lead.encode()[-MAX_LEAD:], checks)
        self.values.append(value)
        return f'({expression} | <[{self.tables.marker}]> {self._name(quote(f"{value.number};"))})'

    def _write_value(self, child: Any, root: Json, name: str | None, place: str, lead: str) -> str:
        """Return the expression of a value as JSON."""
        simple = self._write_simple(resolve(child, root))
        if simple is not None:
            return simple
        document = strip_notes(extract(child, root, name))
        text = json.dumps(document, ensure_ascii=False)
        inside = f"{place}/additionalProperties" if name is None else join_pointer(f"{place}/properties", name)
        return self._leaf(GrammarSpec("json_schema", text, self._whitespace), inside, lead)

    def _write_simple(self, schema: Any) -> str | None:
        """Return the expression of a number or a word without further keywords, None for any other value."""
        kind = schema.get("type") if isinstance(schema, dict) and list_keys(schema) == {"type"} else None
        if not isinstance(kind, str):
            return None
        if kind in ("boolean", "null"):
            every = _WORDS[:2] if kind == "boolean" else _WORDS[2:]
            # Where it writes arguments one by one, a model may use Python's names; the parser knows both.
            if self.style.parameter is not None:
                every = (*every, *(_OTHER_WORDS[word] for word in every))
            return f"({' | '.join(self._name(quote(word)) for word in every)})"
        return self._name(_NUMBERS[kind]) if kind in _NUMBERS and self.style.parameter is not None else None

    def _write_argument(self, name: str, child: Any, root: Json, place: str) -> list[tuple[str, str]]:
        """Return the ways to write one argument: the text before its value, and the expression of the rest."""
        style = self.style
        if not re.fullmatch(_XML_NAME, name):
            raise UnsupportedGrammar("", "properties", f"this model writes no argument named {name!r}")
        kind = find_kind(child, root)
        if kind == "other" or not style.writes_text:
            before, _, after = style.find_parameter(is_text=False).replace("{key}", name).partition("{value}")
            lead = before
            value = self._write_literal(child, root, name, place, lead)
            return [(before, f"{value} {self._literal(after)}")]
        before, _, after = style.find_parameter(is_text=True).replace("{key}", name).partition("{value}")
        end = after.rstrip("\n")
        found, document = resolve(child, root), extract(child, root, name)
        rest = None
        if kind == "either" and style.other_parameter is not None:
            found, rest = split_types(found), split_types(found, False)
            document = {"type": "string", "allOf": [document]}
        text = self._write_text(found, document, end, before, kind == "text" or rest is not None)
        ways = [(before, f"{text} {self._literal(after[len(end) :])}")]
        if rest is None:
            return ways
        before, _, after = style.find_parameter(is_text=False).replace("{key}", name).partition("{value}")
        other = self._write_literal(extract(rest, root, name), root, name, place, before)
        return [*ways, (before, f"{other} {self._literal(after)}")]

    def _write_other_argument(self, child: Any, root: Json, place: str) -> list[tuple[str, str]]:
        """Return the way to write an argument that the schema does not list, as `_write_argument` does."""
        kind = find_kind(child, root) if self.style.writes_text else "other"
        before, _, after = self.style.find_parameter(is_text=kind != "other").partition("{value}")
        start, _, middle = before.partition("{key}")
        known = "|".join(map(escape, root.get("properties", {})))
        cut = f" & ~/{regex_to_lark(f'(?:{known})')}/" if known else ""
        key = self._name(f"/{regex_to_lark(_XML_NAME)}/{cut}")
        lead = middle
        if kind == "other":
            value = self._write_literal(child, root, None, place, lead) + " " + self._literal(after)
        else:
            end = after.rstrip("\n")
            value = self._write_text(resolve(child, root), extract(child, root, None), end, lead, kind == "text")
            value += " " + self._literal(after[len(end) :])
        return [(start, f"{key} {self._literal(middle)} {value}")]

    def _write_text(self, schema: Any, document: Any, end: str, lead: str, is_string: bool) -> str:
        """Return the expression of a text up to the end behind it.

        Args:
            is_string: the text is a string, whatever it spells.
        """
        free = self._share(f"free{self._key(end)}", lambda: self._until([(end, "")]))
        body = write_body(schema)
        if body == "":
            return free
        if body is not None:
            return self._close(body, end)
        try:
            validator = SchemaValidator(document)
        except InvalidGrammar as error:
            keyword = "$ref" if "$ref" in json.dumps(document) else "pattern"
            raise UnsupportedGrammar("", keyword, "no check reads it") from error
        tokens = self.tables.list_with(end[-1:].encode())
        check = TextCheck(end.encode(), validator, tokens, self.tables.spellings, is_string)
        return self._mark(free, lead, check)

    def _key(self, text: str) -> str:
        return f"_{self._keys.setdefault(text, len(self._keys))}"

    def _close(self, body: str, end: str) -> str:
        """Return the expression of a text that a terminal describes, up to the end behind it."""
        inside = f"(({body}) & ~({ANY} {quote(end)} {ANY}))"
        before, name, after = self._split(end)
        ways = [self._name(f"{inside} {quote(end)}")]
        if name is not None:
            ways.append(f"{self._name(f'{inside} {quote(before)}')} <[{self._specials[name]}]> {self._literal(after)}")
        return f"({' | '.join(ways)})"

    # Literals of other languages than JSON

    def _write_literal(self, child: Any, root: Json, name: str | None, place: str, lead: str) -> str:
        """Return the expression of a value in the dialect."""
        dialect = self.style.dialect
        if dialect != "json":
            written = self._write_dialect(child, root, 0)
            if written is not None:
                return written
            if dialect == "gemma":
                raise UnsupportedGrammar("", "type", "this model's literals cannot follow all of this schema")
        simple = self._write_simple(resolve(child, root))
        return simple if simple is not None else self._write_value(child, root, name, place, lead)

    def _write_dialect(self, schema: Any, root: Json, depth: int) -> str | None:
        """Return the expression of a value in Python or in Gemma's notation; None where it has to be JSON."""
        schema = resolve(schema, root)
        if schema is True or schema == {}:
            schema = {"type": ["string", "number", "boolean", "null"]}
        if not isinstance(schema, dict) or depth > 6:
            return None
        keys = list_keys(schema) - {"$defs", "definitions"}
        if keys == {"anyOf"}:
            ways = [self._write_dialect(each, root, depth + 1) for each in schema["anyOf"]]
            return None if None in ways else f"({' | '.join(map(str, ways))})"
        if isinstance(schema.get("type"), list) and keys == {"type"}:
            ways = [self._write_dialect({"type": kind}, root, depth + 1) for kind in schema["type"]]
            return None if None in ways else f"({' | '.join(map(str, ways))})"
        simple = self._write_simple(schema)
        if simple is not None:
            return simple
        kind = schema.get("type")
        if isinstance(kind, list):
            return None
        if kind == "string" or (kind is None and keys <= {"enum", "const"} and keys):
            return self._write_string(schema, keys)
        if kind in _NUMBERS and keys <= {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
            leaf = GrammarSpec("json_schema", json.dumps(strip_notes(schema)), "spaced")
            compiled = self._leaf(leaf, "", "")
            return compiled if compiled.startswith("@") else None
        if kind == "array" and keys <= {"type", "items", "minItems", "maxItems"}:
            return self._write_list(schema, root, depth)
        if kind == "object" and keys <= {"type", "properties", "required", "additionalProperties"}:
            return self._write_mapping(schema, root, depth)
        return None

    def _write_string(self, schema: Json, keys: set[str]) -> str | None:
        quoted = self.style.quote
        if keys <= {"type", "enum", "const"} and keys != {"type"}:
            values = schema.get("enum", [schema.get("const")])
            if not all(isinstance(value, str) and not (quoted and quoted in value) for value in values):
                return None
            if quoted:
                return f"({' | '.join(self._literal(f'{quoted}{value}{quoted}') for value in values)})"
            ways = [spelling for value in values for spelling in {json.dumps(value, ensure_ascii=False), repr(value)}]
            return f"({' | '.join(self._name(quote(way)) for way in ways)})"
        if not quoted:
            return self._name(_PYTHON_STRING) if keys == {"type"} else None
        body = write_body(schema)
        if body is None:
            return None
        free = self._until([(quoted, "")]) if body == "" else self._close(body, quoted)
        return f"{self._literal(quoted)} {free}"

    def _write_list(self, schema: Json, root: Json, depth: int) -> str | None:
        item = self._write_dialect(schema.get("items", True), root, depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if item is None or most == 0:
            return None
        comma = self._name(quote("," if self.style.quote else ", "))
        more = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}" if most != 1 else ""
        body = f"{item} {more}" if least else f"({item} {more})?"
        return f"{self._name(quote('['))} {body} {self._name(quote(']'))}"

    def _write_mapping(self, schema: Json, root: Json, depth: int) -> str | None:
        members, required = [], schema.get("required", [])
        comma = self._name(quote("," if self.style.quote else ", "))
        if not set(required) <= schema.get("properties", {}).keys() or len(required) > MAX_BITS:
            return None
        for name, child in schema.get("properties", {}).items():
            value = self._write_dialect(child, root, depth + 1)
            if value is None:
                return None
            spelt = [f"{name}:"] if self.style.quote else [f"{json.dumps(name, ensure_ascii=False)}: ", f"{name!r}: "]
            way = f"({' | '.join(self._name(quote(each)) for each in spelt)}) {value}"
            members.append((way, f"{comma} {way}", name in required))
        return f"{self._name(quote('{'))} {self._write_members(members, self._name(quote('}')))}"


def list_keys(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that are no annotations."""
    return {key for key in schema if key not in ANNOTATIONS and not is_note(key)}


def _asserts(key: str) -> bool:
    return key in _ASSERTING


_ASSERTING = frozenset(
    [
        *("minProperties", "maxProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas", "additionalProperties", "type", "anyOf"),
        *("if", "then", "else", "$dynamicRef", "$recursiveRef", "x-grounded"),
    ]
)


def split_types(schema: Any, is_string: bool = True) -> Any:
    """Return the part of a schema that is about strings, or about all other values."""
    if isinstance(schema, dict) and "anyOf" in schema and not any(_asserts_type(key) for key in schema):
        kept = [each for each in schema["anyOf"] if ("string" in find_types(each)) == is_string]
        if all(len(find_types(each) - {"string"}) == 0 or not is_string for each in kept):
            return {**schema, "anyOf": kept}
    types = find_types(schema) & {"string"} if is_string else find_types(schema) - {"string"}
    return {**(schema if isinstance(schema, dict) else {}), "type": sorted(types)}


def _asserts_type(key: str) -> bool:
    return key not in ("anyOf", "$defs", "definitions") and key not in ANNOTATIONS and not is_note(key)


def write_body(schema: Any) -> str | None:
    """Return the terminal of the texts that are valid under a schema; "" for any text, None where a check decides."""
    if schema is True or schema == {}:
        return ""
    if not isinstance(schema, dict):
        return None
    keys = list_keys(schema)
    if not keys:
        return ""
    if keys == {"anyOf"}:
        bodies = [write_body(each) for each in schema["anyOf"]]
    elif keys == {"type"} and isinstance(schema["type"], list):
        bodies = [write_body({"type": kind}) for kind in schema["type"]]
    else:
        return _write_branch(schema, keys)
    if "" in bodies:
        return ""
    return None if None in bodies else " | ".join(f"({body})" for body in bodies)


def _write_branch(schema: Json, keys: set[str]) -> str | None:
    types = find_types(schema)
    if keys <= {"type", "enum", "const"} and {"enum", "const"} & keys and types == {"string"}:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(map(quote, values)) if "const" not in keys or "enum" not in keys else None
    if types == {"string"} and keys <= {"type", "minLength", "maxLength", "pattern", "format"}:
        return _write_string_body(schema)
    if keys == {"type"} and types <= {"boolean", "null"}:
        words = ("true", "True", "false", "False") if types == {"boolean"} else ("null", "None")
        return " | ".join(map(quote, words))
    return _NUMBERS.get(str(schema.get("type"))) if keys == {"type"} else None


def _write_string_body(schema: Json) -> str | None:
    parts = []
    if "maxLength" not in schema and list_keys(schema) == {"type", "minLength"}:
        return None  # a check of free text has quicker masks, and any text can get longer
    if "minLength" in schema or "maxLength" in schema:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength", "")
        parts.append(f"/(?s:.{{{least},{int(most) if most != '' else ''}}})/")
    if "format" in schema and schema["format"] in _RAW_FORMATS:
        parts.append(f"/{regex_to_lark(_RAW_FORMATS[schema['format']][1:-1])}/")
    elif schema.get("format") in ASSERTED_FORMATS:
        return None
    if "pattern" in schema:
        pattern = schema["pattern"]
        is_begun, is_ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inside = pattern[is_begun : len(pattern) - is_ended]
        if _PLAIN_PATTERN.fullmatch(inside) is None:
            return None
        body = f"/{regex_to_lark(inside.replace(chr(92) + 'd', '[0-9]'))}/" if inside else '""'
        parts.append(" ".join([*([] if is_begun else [ANY]), body, *([] if is_ended else [ANY])]))
    return " & ".join(f"({part})" for part in parts)
