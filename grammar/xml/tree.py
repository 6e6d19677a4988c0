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
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from xml.parsers import expat

from msgspec import UNSET, Meta, Struct, UnsetType

from ..csv_table import Type
from ..description import read_description
from ..errors import InvalidGrammar, UnsupportedGrammar
from ..regex.dialects import read_classes
from ..schema.keywords import join_pointer

XML_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>'
MAX_DEPTH = 32
MAX_REPEAT = 10_000
MAX_LENGTH = 100_000
# Characters that XML 1.0 cannot contain, not even escaped.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
# What says of which kind a particle is, and the keys that it may have beside that, min and max.
_KINDS = {"name": ("attributes", "text", "children"), "ref": (), "choice": (), "sequence": ()}

Json = dict[str, Any]
Length = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
Count = Annotated[int, Meta(ge=0, le=MAX_REPEAT)]
Particles = Annotated[list["Particle"], Meta(min_length=1)]


class Value(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A text or an attribute."""

    type: Type | None = None
    enum: Annotated[list[str], Meta(min_length=1)] | None = None
    pattern: Annotated[str, Meta(min_length=1)] | None = None
    min_length: Length | None = None
    max_length: Length | None = None
    required: bool | UnsetType = UNSET


class Particle(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An element, a reference, a choice or a sequence."""

    name: str | None = None
    attributes: dict[str, str | Value] | None = None
    text: str | Value | None = None
    children: Particles | None = None
    ref: str | None = None
    choice: Particles | None = None
    sequence: Particles | None = None
    min: Count | UnsetType = UNSET
    max: Count | UnsetType | None = UNSET


class Document(Struct, forbid_unknown_fields=True):
    """A whole description.

    Attributes:
        root: the element that is the whole document.
        definitions: name -> element, for {"ref": name}; they may contain themselves.
        declaration: whether the text begins with `<?xml version="1.0" encoding="UTF-8"?>`.
    """

    root: Particle
    definitions: dict[str, Particle] = {}
    declaration: Literal["none", "optional", "required"] = "none"


def describe_document(written: Any) -> Json:
    """Return a document, or its root alone, as a JSON value, checked."""
    if isinstance(written, Mapping) and "name" in written:
        written = {"root": written}
    document = read_description(written, Document, "XML document")
    known = document["definitions"]
    places = {"/root": document["root"]} | {join_pointer("/definitions", name): known[name] for name in known}
    for where, element in places.items():
        if "name" not in element or "min" in element or "max" in element:
            raise InvalidGrammar(f"the XML element at {where} stands alone: it has a name, and no min or max")
        check_particle(element, where, known.keys(), 0)
    check_endings(known)
    return document


def check_particle(particle: Json, where: str, names: Any, depth: int) -> None:
    """Check what the classes do not say, and write attributes as a list and values in full."""
    kinds = [kind for kind in _KINDS if kind in particle]
    if len(kinds) != 1 or particle.keys() - {kinds[0], *_KINDS[kinds[0]], "min", "max"}:
        raise InvalidGrammar(f"{where} needs exactly one of {list(_KINDS)}, and only a name has more keys")
    least, most = counts_of(particle)
    if most is not None and least > most:
        raise InvalidGrammar(f"{where}: min={least} is larger than max={most}")
    if "ref" in particle and particle["ref"] not in names:
        raise InvalidGrammar(f"{where}/ref names {particle['ref']!r}, which is not among the definitions")
    if "name" in particle:
        check_name(particle["name"], where)
        place = f"{where}/attributes"
        particle["attributes"] = [
            [check_name(name, place), read_value(value, join_pointer(place, name))]
            for name, value in particle.get("attributes", {}).items()
        ]
        if "text" in particle:
            particle["text"] = read_value(particle["text"], f"{where}/text")
            if "children" in particle:
                reason = "mixed content: an element has text or children, not both"
                raise UnsupportedGrammar(where, "text", reason)
    for key in ("children", "choice", "sequence"):
        if key in particle and depth >= MAX_DEPTH:
            raise InvalidGrammar(f"the XML tree is nested deeper than {MAX_DEPTH} levels; use a ref")
        for index, child in enumerate(particle.get(key, ())):
            check_particle(child, f"{where}/{key}/{index}", names, depth + 1)


def check_name(name: str, where: str) -> str:
    """Return an element's or attribute's name that XML 1.0 allows and no namespace claims."""
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


def read_value(value: Json | str, where: str) -> Json:
    """Return a text's or attribute's type, checked."""
    if isinstance(value, str):
        value = read_description({"type": value}, Value, f"value at {where}")
    if len(value.keys() & {"type", "enum", "pattern"}) != 1:
        raise InvalidGrammar(f"{where} needs exactly one of type, enum and pattern")
    bounds = [key for key in ("min_length", "max_length") if key in value]
    if bounds and value.get("type") != "string":
        raise UnsupportedGrammar(where, bounds[0], "only the type string has lengths")
    if value.get("min_length", 0) > value.get("max_length", MAX_LENGTH):
        raise InvalidGrammar(f"{where}: min_length is larger than max_length")
    for text in value.get("enum", ()):
        if (found := FORBIDDEN.search(text)) is not None:
            raise InvalidGrammar(f"{where}/enum: XML cannot write U+{ord(found[0]):04X} of {text!r}")
    if "pattern" in value:
        check_pattern(value["pattern"], where)
    return {"required": False} | value


def check_pattern(pattern: str, where: str) -> None:
    """Refuse a pattern that the final validation cannot read or would read differently."""
    if "[:" in pattern:
        raise UnsupportedGrammar(where, "pattern", "'[:' means different things to different engines")
    try:
        re.compile(read_classes(pattern))
    except re.error as error:
        raise UnsupportedGrammar(where, "pattern", f"it cannot be checked after the end: {error}") from error


def counts_of(particle: Mapping[str, Any]) -> tuple[int, int | None]:
    least = particle.get("min", 1)
    return least, particle.get("max", max(least, 1))


def list_refs(particle: Json) -> Iterator[str]:
    """Yield the names of the definitions that a particle uses."""
    if "ref" in particle:
        yield particle["ref"]
    for key in ("children", "choice", "sequence"):
        for child in particle.get(key, ()):
            yield from list_refs(child)


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

    users: defaultdict[str, set[str]] = defaultdict(set)
    for name, element in definitions.items():
        for ref in list_refs(element):
            users[ref].add(name)
    pending = {*definitions}
    while pending:
        found = {name for name in pending if can_end(definitions[name])}
        ending |= found
        pending = set[str]().union(*(users[name] for name in found)) - ending
    for name in definitions.keys() - ending:
        raise InvalidGrammar(f"/definitions/{name} contains itself without end")
