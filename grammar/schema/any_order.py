"""Properties in any order: objects as Lark rules for llguidance that remember which names are written.

llguidance writes properties in the order of the schema. Here an object becomes one rule with a number, each bit of
which stands for a listed name; the rule goes on with a name whose bit is clear, with another name where those are
allowed, or with the end when the bits of all that is required are set. Everything in which no order is fixed stays a
JSON schema of its own.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from ..errors import UnsupportedGrammar
from ..regex.text import escape
from .keywords import ASSERTIONS, iterate_children, join_pointer
from .references import find_targets
from .weaken import find_at

# Bits of a rule's number, less one.
MAX_NUM_NAMES = 63
MAX_NUM_RULES = 8_192
JSON_TYPES = ("array", "boolean", "null", "number", "string")
# A string as llguidance writes it; names that are listed are cut out of it.
_NAME = r'"(?:[^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"'
_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_OBJECT_KEYWORDS = frozenset(["properties", "required", "additionalProperties", "type"])
_ARRAY_KEYWORDS = frozenset(["items", "prefixItems", "minItems", "maxItems", "type"])

Json = dict[str, Any]


def make_any_order(schema: Json, separators: tuple[str, str] | None) -> tuple[str, list[Json]]:
    """Return a Lark grammar with the start rule `start`, and the schemas it calls @v0, @v1, ...

    Args:
        schema: normalised, so that what a keyword says does not depend on a draft.
        separators: what stands between items, and after a name; None allows white space around plain ones.

    Raises:
        UnsupportedGrammar: for a keyword beside or around an object whose order it would fix.
    """
    writer = _Writer(schema, separators)
    return writer.write(), writer.values


class _Writer:
    def __init__(self, schema: Json, separators: tuple[str, str] | None) -> None:
        self.values: list[Json] = []
        self._schema = schema
        self._gap = " ws?" if separators is None else ""
        self._comma, self._colon = separators or (",", ":")
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._orders: dict[str, bool] = {}
        self._num_rules = 0

    def write(self) -> str:
        start = self._value(self._schema, "")
        lines = [f"start: {start}", *self._lines]
        if self._gap:
            lines.append(f"ws: /{_SPACE}/")
        return "\n".join(lines)

    def _new_rule(self, pointer: str, keyword: str) -> str:
        self._num_rules += 1
        if self._num_rules > MAX_NUM_RULES:
            reason = f"it would take more than {MAX_NUM_RULES} rules"
            raise UnsupportedGrammar(pointer, keyword, f"property order any: {reason}")
        return f"r{self._num_rules}"

    def _value(self, schema: Any, pointer: str) -> str:
        """Return what stands for a value of this schema in a rule."""
        if not has_order(schema, self._schema, set()):
            return self._leaf(schema, pointer)
        if pointer not in self._names:
            self._names[pointer] = name = self._new_rule(pointer, "properties")
            self._lines.append(f"{name}: {self._write_value(schema, pointer)}")
        return self._names[pointer]

    def _leaf(self, schema: Any, pointer: str) -> str:
        schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
        document = {**{k: v for k, v in self._schema.items() if k in ("$defs", "definitions")}, **schema}
        if pointer and has_other_reference(document):
            raise UnsupportedGrammar(
                pointer, "$ref", "property order any: it leads out of $defs and definitions"
            )
        if not schema:
            document = {}
        if document not in self.values:
            self.values.append(document)
        return f"@v{self.values.index(document)}"

    def _write_value(self, schema: Json, pointer: str) -> str:
        assertions = [keyword for keyword in schema if keyword in ASSERTIONS]
        if assertions == ["$ref"]:
            for target in find_targets(schema):
                return self._value(find_at(self._schema, target), target)
        for keyword in ("anyOf", "allOf"):
            if assertions == [keyword] and (keyword == "anyOf" or len(schema[keyword]) == 1):
                branches = [(i, each) for i, each in enumerate(schema[keyword]) if each is not False]
                return " | ".join(
                    self._value(each, join_pointer(pointer, keyword, i)) for i, each in branches
                )
        if assertions in (["enum"], ["const"]):
            return self._listed(schema["enum"] if "enum" in schema else [schema["const"]], pointer)
        types = schema.get("type", ["object", *JSON_TYPES])
        types = [types] if isinstance(types, str) else list(types)
        if "array" in types and len(types) > 1 and is_countless(schema):
            others = {keyword: value for keyword, value in schema.items() if keyword not in _ARRAY_KEYWORDS}
            others["type"] = [name for name in types if name != "array"]
            is_ordered_still = has_order(others, self._schema, set())
            return self._write_value(others, pointer) if is_ordered_still else self._leaf(others, pointer)
        found = []
        for kind, keywords, write in (
            ("object", _OBJECT_KEYWORDS, self._object),
            ("array", _ARRAY_KEYWORDS, self._array),
        ):
            own = {keyword: schema[keyword] for keyword in assertions if keyword in keywords}
            if kind in types and has_order({**own, "type": kind}, self._schema, set()):
                types.remove(kind)
                found.append(write(own, pointer))
                assertions = [keyword for keyword in assertions if keyword not in keywords]
        if not found:
            raise UnsupportedGrammar(
                pointer, assertions[0], "property order any: it fixes the order of properties"
            )
        if types:
            rest = {keyword: schema[keyword] for keyword in assertions}
            self._check_rest(rest, pointer)
            found.append(self._leaf({**rest, "type": types}, pointer))
        else:
            self._check_rest(dict.fromkeys(assertions), pointer)
        return " | ".join(found)

    def _listed(self, values: list[Any], pointer: str) -> str:
        """Return the ways to write one of some values."""
        plain = [value for value in values if not is_ordered(value)]
        found = [self._leaf({"enum": plain}, pointer)] if plain else []
        for value in values:
            if is_ordered(value):
                if not isinstance(value, dict):
                    reason = "property order any: it fixes the order of properties in an array"
                    raise UnsupportedGrammar(pointer, "enum", reason)
                properties = {name: {"enum": [each]} for name, each in value.items()}
                same = {"properties": properties, "required": list(value), "additionalProperties": False}
                # What is inside has no place in the schema of its own; a rule is named by its value.
                found.append(self._object(same, f"{pointer}={json.dumps(value)}"))
        return " | ".join(found)

    def _check_rest(self, rest: Mapping[str, Any], pointer: str) -> None:
        """Refuse what speaks about the objects and arrays that are written here, too."""
        for keyword in rest:
            if keyword in _ABOUT_CONTAINERS:
                raise UnsupportedGrammar(
                    pointer, keyword, "property order any: not beside properties in any order"
                )

    def _object(self, schema: Json, pointer: str) -> str:
        required = dict.fromkeys(schema.get("required", ()))
        extra = schema.get("additionalProperties", True)
        listed = dict(schema.get("properties", {}))
        listed.update({name: extra for name in required if name not in listed})
        names = [name for name, value in listed.items() if value is not False]
        if len(names) > MAX_NUM_NAMES:
            reason = f"property order any: {len(names)} properties are more than {MAX_NUM_NAMES}"
            raise UnsupportedGrammar(pointer.partition("=")[0], "properties", reason)
        if any(name not in names for name in required):
            raise UnsupportedGrammar(
                pointer, "required", "property order any: a required property is forbidden"
            )
        values = {name: self._value(listed[name], self._place(schema, pointer, name)) for name in names}
        other = None if extra is False else self._other(list(listed), extra, pointer)
        # Those that must come have the first bits.
        names.sort(key=lambda name: name not in required)
        ways = [f"{self._key(name)} {values[name]}{self._gap}" for name in names]
        rest = self._new_rule(pointer, "properties")
        comma = f"{json.dumps(self._comma)}{self._gap} "
        end = f" %if is_ones([0:{len(required)}])" if required else ""
        lines = [f'{rest}::_: "}}"{end}']
        lines += [
            f"| {comma}{way} {rest}::set_bit({bit}) %if bit_clear({bit})" for bit, way in enumerate(ways)
        ]
        firsts = [f"{way} {rest}::{1 << bit}" for bit, way in enumerate(ways)]
        if other is not None:
            lines.append(f"| {comma}{other}{self._gap} {rest}::_")
            firsts.append(f"{other}{self._gap} {rest}::0")
        if not required:
            firsts.append('"}"')
        self._lines.append("\n".join(lines))
        first = self._new_rule(pointer, "properties")
        self._lines.append(f"{first}: {' | '.join(firsts)}")
        return f'"{{"{self._gap} {first}'

    def _place(self, schema: Json, pointer: str, name: str) -> str:
        if name in schema.get("properties", {}):
            return join_pointer(pointer, "properties", name)
        return join_pointer(pointer, "additionalProperties")

    def _key(self, name: str) -> str:
        text = json.dumps(name, ensure_ascii=False)
        return f"{json.dumps(text, ensure_ascii=False)}{self._gap} {json.dumps(self._colon)}{self._gap}"

    def _other(self, listed: list[str], extra: Any, pointer: str) -> str:
        """Return a name that is not listed, and its value."""
        terminal = f"OTHER{self._num_rules}_{len(self._lines)}"
        known = "|".join(escape(json.dumps(name, ensure_ascii=False)) for name in listed)
        cut = f" & ~/{regex_to_lark(f'(?:{known})')}/" if known else ""
        self._lines.append(f"{terminal}: /{regex_to_lark(_NAME)}/{cut}")
        value = self._value(extra, join_pointer(pointer, "additionalProperties"))
        return f"{terminal}{self._gap} {json.dumps(self._colon)}{self._gap} {value}"

    def _array(self, schema: Json, pointer: str) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if "prefixItems" in schema:
            raise UnsupportedGrammar(
                pointer, "prefixItems", "property order any: not around properties in any order"
            )
        if is_countless(schema):
            # The engine finds that nothing satisfies it, as in the order of the schema.
            return self._leaf({"type": "array", "minItems": least, "maxItems": most}, pointer)
        item = self._value(schema.get("items", True), join_pointer(pointer, "items"))
        comma = f"{json.dumps(self._comma)}{self._gap}"
        if most == 0:
            return f'"["{self._gap} "]"'
        rest = ""
        # A repetition of nothing but zero times is malformed there.
        if most != 1:
            count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            rule = self._new_rule(pointer, "items")
            self._lines.append(f"{rule}: {comma} {item}{self._gap}")
            rest = f" {rule}{count}"
        full = f'"["{self._gap} {item}{self._gap}{rest} "]"'
        return full if least else f'{full} | "["{self._gap} "]"'


_ABOUT_CONTAINERS = (
    *("anyOf", "allOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "enum", "const"),
    *(
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependencies",
        "dependentRequired",
    ),
    *(
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "contains",
        "minContains",
        "maxContains",
    ),
    *("uniqueItems", "additionalItems"),
)


def has_order(schema: Any, document: Json, seen: set[str]) -> bool:
    """Tell whether a schema, alone, would fix the order of properties anywhere in its values."""
    if not isinstance(schema, dict):
        return False
    names = {**schema.get("properties", {}), **dict.fromkeys(schema.get("required", ()))}
    is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
    if len(names) + is_open > 1 and names:
        return True
    if any(is_ordered(value) for value in (schema.get("const"), *schema.get("enum", ()))):
        return True
    for target in find_targets(schema):
        if target not in seen:
            seen.add(target)
            if has_order(find_at(document, target), document, seen):
                return True
    children = iterate_children({k: v for k, v in schema.items() if k not in ("$defs", "definitions")})
    return any(has_order(child, document, seen) for _, child in children)


def is_countless(schema: Json) -> bool:
    """Tell whether no array has as many items as a schema demands."""
    return schema.get("minItems", 0) > schema.get("maxItems", math.inf)


def is_ordered(value: Any) -> bool:
    """Tell whether a value that is listed as a whole holds an object of several properties."""
    if isinstance(value, list):
        return any(map(is_ordered, value))
    return isinstance(value, dict) and (len(value) > 1 or any(map(is_ordered, value.values())))


def has_other_reference(schema: Any) -> bool:
    """Tell whether a reference leads to anything but a definition at the root."""
    if isinstance(schema, list):
        return any(map(has_other_reference, schema))
    if not isinstance(schema, dict):
        return False
    ref = schema.get("$ref")
    if isinstance(ref, str) and not re.match(r"#/(?:\$defs|definitions)/", ref):
        return True
    return any(map(has_other_reference, schema.values()))
