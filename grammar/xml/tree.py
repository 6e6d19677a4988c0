"""XML documents as a tree of elements: the format of such a description, its validation, and its JSON form.

element    {"name": "order", "attributes": {name: value, ...}, "text": value | "children": [particle, ...]}
particle   an element, {"ref": name}, {"choice": [particle, ...]} or {"sequence": [particle, ...]};
           with "min" and "max" (None: without end) it is repeated
value      {"type": "string"|"integer"|"number"|"boolean"|"date"}, with "min_length" and "max_length" for strings;
           {"enum": [text, ...]}; or {"pattern": regex}. Attributes may have "required": true

An element with neither text nor children is empty. Mixed content, namespaces, comments, processing instructions,
CDATA sections and document types are not written.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.parsers import expat

from ..csv_table import SCALAR_PATTERNS
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..schema.keywords import join_pointer

DECLARATIONS = ("none", "optional", "required")
XML_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'
VALUE_TYPES = ("string", *SCALAR_PATTERNS)
MAX_DEPTH = 32
MAX_REPEAT = 10_000
MAX_LENGTH = 100_000
_ELEMENT_KEYS = {"name", "attributes", "text", "children", "min", "max"}
_VALUE_KEYS = {"type", "enum", "pattern", "min_length", "max_length", "required"}
# Characters that XML 1.0 cannot contain, not even escaped.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

Json = dict[str, Any]


def describe_document(root: Any, definitions: Any = None, declaration: str = "none") -> Json:
    """Return a document as a JSON value, checked.

    Args:
        root: the element that is the whole document.
        definitions: name -> element, for {"ref": name}; they may contain themselves.
        declaration: whether the text begins with `<?xml version="1.0" encoding="UTF-8"?>`.
    """
    if declaration not in DECLARATIONS:
        raise InvalidGrammar(f"an XML declaration is one of {list(DECLARATIONS)}, not {declaration!r}")
    definitions = {} if definitions is None else definitions
    if not isinstance(definitions, Mapping):
        raise InvalidGrammar("the definitions of an XML document are an object: name -> element")
    reader = _Reader(frozenset(definitions))
    known = {
        name: reader.read_root(each, join_pointer("/definitions", name)) for name, each in definitions.items()
    }
    check_endings(known)
    return {"root": reader.read_root(root, "/root"), "definitions": known, "declaration": declaration}


class _Reader:
    """Checks a description from the outside in and copies what it knows."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def read_root(self, element: Any, where: str) -> Json:
        read = self._read_element(check_object(element, where, _ELEMENT_KEYS, "XML element"), where, 0)
        if "min" in read or "max" in read:
            raise InvalidGrammar(f"the XML element at {where} stands alone: it has no min or max")
        return read

    def _read_element(self, element: Mapping[str, Any], where: str, depth: int) -> Json:
        attributes = element.get("attributes", {})
        if not isinstance(attributes, Mapping):
            raise InvalidGrammar(f"the attributes at {where} are an object: name -> value")
        if "text" in element and "children" in element:
            raise UnsupportedGrammar(
                where, "text", "mixed content: an element has text or children, not both"
            )
        read: Json = {"name": check_name(element.get("name"), where), "attributes": []}
        for name, value in attributes.items():
            place = f"{where}/attributes"
            read["attributes"].append([check_name(name, place), read_value(value, join_pointer(place, name))])
        if "text" in element:
            read["text"] = read_value(element["text"], f"{where}/text")
        if "children" in element:
            read["children"] = self._read_particles(element["children"], f"{where}/children", depth)
        return read | read_counts(element, where)

    def _read_particles(self, particles: Any, where: str, depth: int) -> list[Json]:
        if not isinstance(particles, list | tuple) or not particles:
            raise InvalidGrammar(f"{where} is a list with at least one entry")
        if depth >= MAX_DEPTH:
            raise InvalidGrammar(f"the XML tree is nested deeper than {MAX_DEPTH} levels; use a ref")
        return [self._read_particle(each, f"{where}/{i}", depth + 1) for i, each in enumerate(particles)]

    def _read_particle(self, particle: Any, where: str, depth: int) -> Json:
        found = [
            key for key in ("choice", "sequence", "ref") if isinstance(particle, Mapping) and key in particle
        ]
        keys = {found[0], "min", "max"} if found else _ELEMENT_KEYS
        particle = check_object(particle, where, keys, "XML particle")
        if not found:
            return self._read_element(particle, where, depth)
        (key, value), counts = (found[0], particle[found[0]]), read_counts(particle, where)
        if key != "ref":
            return {key: self._read_particles(value, f"{where}/{key}", depth)} | counts
        if value not in self._names:
            raise InvalidGrammar(f"{where}/ref names {value!r}, which is not among the definitions")
        return {"ref": value} | counts


def check_object(found: Any, where: str, known: set[str], kind: str) -> Mapping[str, Any]:
    """Refuse values other than objects, and keys that would be ignored."""
    if not isinstance(found, Mapping):
        raise InvalidGrammar(f"the {kind} at {where} is {type(found).__name__}, not an object")
    unknown = [str(key) for key in found if key not in known]
    if unknown:
        raise InvalidGrammar(f"{where} has the unknown key {unknown[0]!r}; known are {sorted(known)}")
    return found


def check_name(name: Any, where: str) -> str:
    """Return an element's or attribute's name that XML 1.0 allows and no namespace claims."""
    if not isinstance(name, str) or not name:
        raise InvalidGrammar(f"{where} needs a name that is not empty")
    if ":" in name or name.lower().startswith("xml"):
        reason = f"{name!r}: namespaces and names beginning with xml are not written"
        raise UnsupportedGrammar(where, "name", reason)
    try:
        if re.search(r"[\s/<>&=\"']", name):
            raise expat.ExpatError
        expat.ParserCreate("utf-8").Parse(f"<{name}/>".encode(), True)
    except (expat.ExpatError, UnicodeEncodeError) as error:
        raise InvalidGrammar(f"{name!r} at {where} is not an XML name") from error
    return name


def read_value(value: Any, where: str) -> Json:
    """Return a text's or attribute's type, checked."""
    value = check_object({"type": value} if isinstance(value, str) else value, where, _VALUE_KEYS, "value")
    kinds = [kind for kind in ("type", "enum", "pattern") if kind in value]
    if len(kinds) != 1:
        raise InvalidGrammar(f"{where} needs exactly one of type, enum and pattern")
    if not isinstance(value.get("required", False), bool):
        raise InvalidGrammar(f"{where}/required is true or false")
    if "enum" in value:
        check_enum(value["enum"], where)
    elif "pattern" in value:
        check_pattern(value["pattern"], where)
    elif value["type"] not in VALUE_TYPES:
        raise InvalidGrammar(f"{where} has type {value['type']!r}; choose from {list(VALUE_TYPES)}")
    bounds = {key: value[key] for key in ("min_length", "max_length") if value.get(key) is not None}
    if bounds and value.get("type") != "string":
        raise UnsupportedGrammar(where, next(iter(bounds)), "only the type string has lengths")
    for key, bound in bounds.items():
        check_count(bound, f"{where}/{key}", MAX_LENGTH)
    if bounds.get("min_length", 0) > bounds.get("max_length", MAX_LENGTH):
        raise InvalidGrammar(f"{where}: min_length is larger than max_length")
    return {kinds[0]: value[kinds[0]], "required": value.get("required", False)} | bounds


def check_pattern(pattern: Any, where: str) -> None:
    """Refuse a pattern that the final validation cannot read or would read differently."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidGrammar(f"{where}/pattern is a regex that is not empty")
    if (found := re.search(r"\[\[|\[:|&&|--|~~", pattern)) is not None:
        raise UnsupportedGrammar(
            where, "pattern", f"{found[0]!r} means different things to different engines"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UnsupportedGrammar(where, "pattern", f"it cannot be checked after the end: {error}") from error


def check_enum(values: Any, where: str) -> None:
    """Refuse a list of values that is empty or holds what XML cannot write."""
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise InvalidGrammar(f"{where}/enum is a list with at least one text")
    for value in values:
        if not isinstance(value, str):
            raise InvalidGrammar(f"{where}/enum holds {value!r}; all its values are texts")
        if (found := FORBIDDEN.search(value)) is not None:
            raise InvalidGrammar(f"{where}/enum: XML cannot write U+{ord(found[0]):04X} of {value!r}")


def read_counts(particle: Mapping[str, Any], where: str) -> Json:
    """Return "min" and "max" where they are given."""
    read: Json = {key: particle[key] for key in ("min", "max") if key in particle}
    for key, count in read.items():
        if key == "min" or count is not None:
            check_count(count, f"{where}/{key}", MAX_REPEAT)
    least, most = counts_of(read)
    if most is not None and least > most:
        raise InvalidGrammar(f"{where}: min={least} is larger than max={most}")
    return read


def check_count(count: Any, where: str, limit: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= limit:
        raise InvalidGrammar(f"{where} is an integer from 0 to {limit}, not {count!r}")


def counts_of(particle: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return how often a particle may occur: minimum, and maximum or None."""
    least = particle.get("min", 1)
    return least, particle.get("max", max(least, 1))


def check_endings(definitions: Mapping[str, Json]) -> None:
    """Refuse a definition that always contains itself."""
    ending: set[str] = set()

    def can_end(particle: Json) -> bool:
        if counts_of(particle)[0] == 0:
            return True
        if "ref" in particle:
            return particle["ref"] in ending
        if "choice" in particle:
            return any(can_end(each) for each in particle["choice"])
        return all(can_end(each) for each in particle.get("sequence") or particle.get("children") or ())

    while more := {name for name, element in definitions.items() if name not in ending and can_end(element)}:
        ending |= more
    for name in definitions.keys() - ending:
        raise InvalidGrammar(f"/definitions/{name} contains itself without end")
