"""Writes the arguments of calls: objects in any order, values by their schemas, each different schema once."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engines.llguidance_json import SEPARATORS, find_pattern, is_flexible
from ..errors import InvalidGrammar, UnsupportedGrammar, naming
from ..regex.text import escape, quote
from ..schema.keywords import join_pointer
from ..schema.plain import check_plain
from ..schema.property_order import JSON_NAME, MAX_NUM_BITS, write_members, write_other_name
from ..spec import GrammarSpec
from ..validator import SchemaValidator
from .arguments import ArgumentReader, CallCheck, extract, find_kind, resolve, strip_notes
from .lark_text import LarkText
from .leaves import LeafWriter
from .text_body import ASSERTING, NUMBERS, list_keys, split_types, write_body
from .text_value import TextCheck
from .tool_styles import ToolStyle

Json = dict[str, Any]
_XML_NAME = r"[\w.$@-]{1,128}"
_SPACE = "[ ]{1}"  # the whitespace of a loose style
_WORDS = ("true", "false", "null")
_OTHER_WORDS = {"true": "True", "false": "False", "null": "None"}
# Without what only one of JSON's and Python's readers takes.
_PYTHON_STRING = " | ".join(rf"/{sign}(?:[^{sign}\\\x00-\x1F]|\\[\\{sign}nrtbf])*{sign}/" for sign in ("'", '"'))
_SIMPLE = frozenset(["type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"])


def is_surely_enforced(style: ToolStyle, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema of arguments can be enforced in a style, as far as its keywords tell at once."""
    keys = list_keys(schema)
    is_known = style.dialect == "json" and all(re.fullmatch(_XML_NAME, name) for name in schema.get("properties", {}))
    return (style.parameter is None or (is_known and keys <= _SIMPLE)) and check_plain(schema) is not None


@dataclass
class ArgumentWriter:
    """Writes the arguments of one grammar.

    Attributes:
        whitespace: between the values of JSON, as in a `GrammarSpec`.
    """

    text: LarkText
    style: ToolStyle
    whitespace: str
    leaves: LeafWriter

    def __post_init__(self) -> None:
        self._whitespace = _SPACE if self.style.is_loose else self.whitespace
        self._gap = " gap?" if is_flexible(self.whitespace) else ""
        self._comma, self._colon = SEPARATORS.get(self._whitespace, SEPARATORS["any"])
        if self._gap:
            self.text.rules["gap"] = f"/{find_pattern(self._whitespace)}/"

    def write_object(self, schema: Json, place: str) -> str:
        """Return the expression of the arguments, which may come in any order."""
        keys = list_keys(schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_simple = keys <= _SIMPLE and set(required) <= properties.keys() and len(set(required)) <= MAX_NUM_BITS
        if self.style.parameter is None:
            if is_simple and "$schema" not in schema:
                return self._write_json_object(schema, place)
            text = json.dumps(strip_notes(schema), ensure_ascii=False)
            leaf = GrammarSpec("json_schema", text, self._whitespace, property_order="any")
            return self.write_leaf(leaf, place, self._find_lead())
        keyword = next(iter(keys - _SIMPLE - self._list_idle(schema)), None)
        if keyword is not None:
            return self._write_checked_object(schema, place, keyword)
        other = schema.get("additionalProperties", True)
        properties = {**properties, **{name: other for name in required if name not in properties}}
        if len(set(required)) > MAX_NUM_BITS:
            raise UnsupportedGrammar("", "required", f"more than {MAX_NUM_BITS} arguments are required")
        members = []
        for name, child in properties.items():
            if child is False and name not in required:
                continue
            with naming(join_pointer("/properties", name)):
                members.append((*self._write_argument(name, child, schema, place), name in required))
        more = None if other is False else self._write_argument(None, other, schema, place)
        return self._write_members(members, "", more)

    def _find_lead(self) -> str:
        """Return the text right before the arguments, "" where it may be another."""
        return "" if len(self.style.heads) > 1 else self.style.heads[0].rpartition("}")[2]

    def _write_checked_object(self, schema: Json, place: str, keyword: str) -> str:
        """Return the expression of arguments with keywords about all of them, which are checked at their end."""
        end = self.style.tail or self.style.end
        if not self.style.writes_text or self.style.dialect != "json" or not end:
            raise UnsupportedGrammar("", keyword, "this model writes arguments one by one")
        is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        kept: Json = {key: schema[key] for key in ("properties", "$defs", "definitions", "$schema") if key in schema}
        listed = [name for name in schema.get("required", ()) if name in schema.get("properties", {})]
        self.leaves.marks_values = False
        body = self.write_object({**kept, "required": listed, "additionalProperties": not is_closed}, place)
        self.leaves.marks_values = True
        try:
            validator = SchemaValidator(schema)
        except InvalidGrammar as error:
            raise UnsupportedGrammar("", keyword, "no check reads it") from error
        tokens = self.leaves.tables.list_with(end[-1:].encode())
        reader = ArgumentReader(self.style, schema)
        check = CallCheck(end.encode(), validator, tokens, self.leaves.tables.spellings, False, reader)
        return self.leaves.mark(f"({body})" if body else '""', self._find_lead(), check)

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
        return found | {key for key in schema if key not in known | ASSERTING}

    def _is_open(self, schema: Json) -> bool:
        return schema.get("additionalProperties", True) is not False

    def _write_json_object(self, schema: Json, place: str) -> str:
        required, gap = schema.get("required", []), self._gap
        comma, colon = (f"{self.text.name(quote(sign))}{gap}" for sign in (self._comma, self._colon))
        if self.style.is_loose and not gap:
            comma, colon = self.text.name("/, ?/"), self.text.name("/: ?/")
        members = []
        for name, child in schema.get("properties", {}).items():
            if child is False and name not in required:
                continue
            key = quote(name)
            lead = f"{key}{self._colon}"
            if gap:
                before, lead = f"{self.text.name(quote(key))}{gap} {self.text.name(quote(self._colon))}{gap}", ""
            elif self.style.is_loose:
                before, lead = self.text.name(f"/{escape(key)}: ?/"), ""
            else:
                before = self.text.name(quote(lead))
            with naming(join_pointer("/properties", name)):
                value = self._write_value(child, schema, name, place, lead)
            way = f"{before} {value}{gap}"
            members.append((way, f"{comma} {way}", name in required))
        other = schema.get("additionalProperties", True)
        more = None
        if other is not False:
            key = self.text.name(write_other_name(JSON_NAME, map(quote, schema.get("properties", {}))))
            with naming("/additionalProperties"):
                value = self._write_value(other, schema, None, place, "")
            way = f"{key}{gap} {colon} {value}{gap}"
            more = (way, f"{comma} {way}")
        opening = f"{self.text.name(quote('{'))}{gap}"
        return f"{opening} {self._write_members(members, self.text.name(quote('}')), more)}"

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
        pairs, num_required = [(first, later) for first, later, _ in ways], sum(each[2] for each in ways)
        return write_members(self.text, pairs, num_required, close or '""', other)

    # Values

    def write_leaf(self, spec: GrammarSpec, place: str, lead: str) -> str:
        """Return the expression of a schema with a grammar of its own."""
        return self.leaves.refer(self.leaves.compile(spec, place), lead)

    def _write_value(self, child: Any, root: Json, name: str | None, place: str, lead: str) -> str:
        """Return the expression of a value as JSON."""
        simple = self._write_simple(resolve(child, root))
        if simple is not None:
            return simple
        document = strip_notes(extract(child, root, name))
        text = json.dumps(document, ensure_ascii=False)
        inside = f"{place}/additionalProperties" if name is None else join_pointer(f"{place}/properties", name)
        return self.write_leaf(GrammarSpec("json_schema", text, self._whitespace), inside, lead)

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
            return self.text.share(f"{kind}_", lambda: " | ".join(self.text.name(quote(word)) for word in every))
        return self.text.name(NUMBERS[kind]) if kind in NUMBERS and self.style.parameter is not None else None

    def _write_argument(self, name: str | None, child: Any, root: Json, place: str) -> tuple[str, str]:
        """Return the expressions of an argument as the first one and as a later one.

        Args:
            name: None for any that the schema does not list.
        """
        style, key = self.style, ""
        if name is None:
            key = self.text.name(write_other_name(_XML_NAME, root.get("properties", {})))
        elif not re.fullmatch(_XML_NAME, name):
            raise UnsupportedGrammar("", "properties", f"this model writes no argument named {name!r}")
        kind = find_kind(child, root) if style.writes_text else "other"
        found, document = resolve(child, root), extract(child, root, name)
        # Whether the value is written as text, its schema, and that as a document.
        ways = [(kind != "other", found if kind != "other" else child, document)]
        if kind == "either" and style.other_parameter is not None:
            ways = [(True, split_types(found), {"type": "string", "allOf": [document]})]
            ways.append((False, extract(split_types(found, False), root, name), None))
        found_ways = []
        for is_text, schema, document in ways:
            before, _, after = style.find_parameter(is_text).partition("{value}")
            lead = before.partition("{key}")[2] if name is None else before.replace("{key}", name)
            if is_text:
                end = after.rstrip("\n")
                value = self._write_text(schema, document, end, lead, kind == "text" or len(ways) > 1)
                after = after[len(end) :]
            else:
                value = self._write_literal(schema, root, name, place, lead)
            found_ways.append((before, f"{value} {self.text.literal(after)}"))
        # The separator of a later argument is a part of its literal.
        first, later = (
            " | ".join(f"{self.text.fill(start + before, name or '', key)} {rest}" for before, rest in found_ways)
            for start in ("", style.parameter_separator)
        )
        return (first, later) if len(ways) == 1 else (f"({first})", f"({later})")

    def _write_text(self, schema: Any, document: Any, end: str, lead: str, is_string: bool) -> str:
        """Return the expression of a text up to the end behind it.

        Args:
            is_string: the text is a string, whatever it spells.
        """
        free = self.text.share(f"free{self.text.key(end)}", lambda: self.text.until([(end, "")]))
        body = write_body(schema)
        if body == "":
            return free
        if body is not None:
            return self.text.close(body, end)
        try:
            validator = SchemaValidator(document)
        except InvalidGrammar as error:
            keyword = "$ref" if "$ref" in json.dumps(document) else "pattern"
            raise UnsupportedGrammar("", keyword, "no check reads it") from error
        tokens = self.leaves.tables.list_with(end[-1:].encode())
        check = TextCheck(end.encode(), validator, tokens, self.leaves.tables.spellings, is_string)
        return self.leaves.mark(free, lead, check)

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
        kind = schema.get("type")
        if keys == {"anyOf"} or (isinstance(kind, list) and keys == {"type"}):
            branches = schema["anyOf"] if kind is None else [{"type": each} for each in kind]
            ways = [self._write_dialect(each, root, depth + 1) for each in branches]
            return None if None in ways else f"({' | '.join(map(str, ways))})"
        simple = self._write_simple(schema)
        if simple is not None or isinstance(kind, list):
            return simple
        if kind == "string" or (kind is None and keys <= {"enum", "const"} and keys):
            return self._write_string(schema, keys)
        if kind in NUMBERS and keys <= {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
            leaf = GrammarSpec("json_schema", json.dumps(strip_notes(schema)), "spaced")
            compiled = self.write_leaf(leaf, "", "")
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
                return f"({' | '.join(self.text.literal(f'{quoted}{value}{quoted}') for value in values)})"
            ways = [spelling for value in values for spelling in {quote(value), repr(value)}]
            return f"({' | '.join(self.text.name(quote(way)) for way in ways)})"
        if not quoted:
            return self.text.name(_PYTHON_STRING) if keys == {"type"} else None
        body = write_body(schema)
        if body is None:
            return None
        free = self.text.until([(quoted, "")]) if body == "" else self.text.close(body, quoted)
        return f"{self.text.literal(quoted)} {free}"

    def _write_list(self, schema: Json, root: Json, depth: int) -> str | None:
        item = self._write_dialect(schema.get("items", True), root, depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if item is None or most == 0:
            return None
        comma = self.text.name(quote("," if self.style.quote else ", "))
        more = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}" if most != 1 else ""
        body = f"{item} {more}" if least else f"({item} {more})?"
        return f"{self.text.name(quote('['))} {body} {self.text.name(quote(']'))}"

    def _write_mapping(self, schema: Json, root: Json, depth: int) -> str | None:
        members, required = [], schema.get("required", [])
        comma = self.text.name(quote("," if self.style.quote else ", "))
        if not set(required) <= schema.get("properties", {}).keys() or len(required) > MAX_NUM_BITS:
            return None
        if self.style.quote and not all(re.fullmatch(_XML_NAME, name) for name in schema.get("properties", {})):
            return None
        for name, child in schema.get("properties", {}).items():
            value = self._write_dialect(child, root, depth + 1)
            if value is None:
                return None
            spelt = [f"{name}:"] if self.style.quote else [f"{quote(name)}: ", f"{name!r}: "]
            way = f"({' | '.join(self.text.name(quote(each)) for each in spelt)}) {value}"
            members.append((way, f"{comma} {way}", name in required))
        return f"{self.text.name(quote('{'))} {self._write_members(members, self.text.name(quote('}')))}"
