"""The last check of a finished XML text: an XML parser and a walk over the tree, independent of any grammar engine."""

import json
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

from ..csv_table import SCALAR_PATTERNS
from ..regex.linear_pattern import read_pattern
from .tree import counts_of

Json = dict[str, Any]


class XmlValidator:
    """Validates a document against what `GrammarSpec.xml` describes; entities and document types are refused.

    Args:
        text: the spec's text.
    """

    def __init__(self, text: str) -> None:
        self._document = json.loads(text)

    def first_error(self, text: str) -> str | None:
        """Return what is wrong with a document and where, or None."""
        try:
            root = parse(text)
        except (ElementTree.ParseError, expat.ExpatError, ValueError) as error:
            return f"not XML: {error}"
        has_declaration = text.startswith("<?xml")
        wanted = self._document["declaration"]
        if wanted != "optional" and has_declaration != (wanted == "required"):
            return "the XML declaration is missing" if wanted == "required" else "there is an XML declaration"
        try:
            return self._check_element(root, self._document["root"], f"/{root.tag}")
        except RecursionError:
            return "the elements are nested too deeply to check"

    def is_valid(self, text: str) -> bool:
        """Return whether a document is valid."""
        return self.first_error(text) is None

    def _check_element(self, node: ElementTree.Element, element: Json, path: str) -> str | None:
        if node.tag != element["name"]:
            return f"{path}: expected <{element['name']}>"
        known = dict(element["attributes"])
        for name, value in node.attrib.items():
            if name not in known or not is_value(value, known[name]):
                return f"{path}/@{name}: {value!r} is not allowed"
        missing = [name for name, value in known.items() if value["required"] and name not in node.attrib]
        if missing:
            return f"{path}: the attribute {missing[0]!r} is missing"
        children = list(node)
        if "text" in element:
            if children or not is_value(node.text or "", element["text"]):
                return f"{path}: {node.text!r} is not allowed"
            return None
        texts = (node.text, *(child.tail for child in children))
        if any((text or "").strip() for text in texts):
            return f"{path}: text is not allowed beside elements"
        if len(children) not in self._ends(element.get("children", ()), children, {0}):
            return f"{path}: the elements in it are not what the description allows"
        return None

    def _ends(
        self, particles: Sequence[Json], nodes: Sequence[ElementTree.Element], starts: set[int]
    ) -> set[int]:
        """Return where a sequence of particles may end among the nodes, beginning anywhere in `starts`."""
        for particle in particles:
            starts = self._repeat(particle, nodes, starts)
        return starts

    def _repeat(self, particle: Json, nodes: Sequence[ElementTree.Element], starts: set[int]) -> set[int]:
        least, most = counts_of(particle)
        found: set[int] = set(starts) if least == 0 else set()
        number = 0
        while starts and (most is None or number < most):
            before, starts = starts, self._once(particle, nodes, starts)
            number += 1
            if number >= least:
                if starts <= found and starts == before:
                    break
                found |= starts
        return found

    def _once(self, particle: Json, nodes: Sequence[ElementTree.Element], starts: set[int]) -> set[int]:
        if "choice" in particle:
            return {end for each in particle["choice"] for end in self._repeat(each, nodes, starts)}
        if "sequence" in particle:
            return self._ends(particle["sequence"], nodes, starts)
        element = self._document["definitions"][particle["ref"]] if "ref" in particle else particle
        return {
            start + 1
            for start in starts
            if start < len(nodes) and self._check_element(nodes[start], element, "") is None
        }


def parse(text: str) -> ElementTree.Element:
    """Return the root of a document without a document type, so that no entity can be declared."""
    builder = ElementTree.TreeBuilder()
    parser = expat.ParserCreate("utf-8")

    def refuse(*details: object) -> None:
        raise ValueError("document types are not allowed")

    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = lambda name, attributes: builder.start(name, attributes)
    parser.EndElementHandler = lambda name: builder.end(name)
    parser.CharacterDataHandler = builder.data
    parser.Parse(text.encode(), True)
    return builder.close()


def is_value(text: str, value: Json) -> bool:
    """Return whether a text, entities resolved, is of a type."""
    if "enum" in value:
        return text in value["enum"]
    if "pattern" in value:
        pattern = read_pattern(value["pattern"])
        # What cannot be matched in linear time is left to the grammar.
        return pattern is None or pattern.matches(text) is not False
    if value["type"] != "string":
        return re.fullmatch(SCALAR_PATTERNS[value["type"]], text) is not None
    most = value.get("max_length")
    return value.get("min_length", 0) <= len(text) and (most is None or len(text) <= most)
