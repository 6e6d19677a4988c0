"""The last check of a finished XML text: an XML parser and a walk over the tree, independent of any grammar engine."""

import json
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from ..csv_table import SCALAR_PATTERNS
from ..regex.dialects import read_classes
from ..regex.text import read_pattern
from .tree import counts_of

Json = dict[str, Any]


class XmlValidator:
    """Validates a document against what `GrammarSpec.xml` describes; entities and document types are refused.

    Args:
        text: the spec's text.
    """

    def __init__(self, text: str) -> None:
        self._document = json.loads(text)

    def is_valid(self, text: str) -> bool:
        """Return whether a document is valid."""
        try:
            # A document type could declare entities.
            root = ElementTree.fromstring("" if "<!DOCTYPE" in text else text)
            wanted, has_declaration = self._document["declaration"], text.startswith("<?xml")
            is_declared = wanted == "optional" or has_declaration == (wanted == "required")
            return is_declared and self._fits(root, self._document["root"])
        except (ElementTree.ParseError, ValueError, RecursionError):
            return False

    def _fits(self, node: ElementTree.Element, element: Json) -> bool:
        """Return whether an element of the text is one of the description."""
        known = dict(element["attributes"])
        required = {name for name, value in known.items() if value["required"]}
        if node.tag != element["name"] or not required <= node.attrib.keys() <= known.keys():
            return False
        if not all(is_value(value, known[name]) for name, value in node.attrib.items()):
            return False
        children = list(node)
        if "text" in element:
            return not children and is_value(node.text or "", element["text"])
        texts = (node.text, *(child.tail for child in children))
        if any((text or "").strip() for text in texts):
            return False
        return len(children) in self._ends(element.get("children", ()), children, {0})

    def _ends(self, particles: Sequence[Json], nodes: Sequence[ElementTree.Element], starts: set[int]) -> set[int]:
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
        return {start + 1 for start in starts if start < len(nodes) and self._fits(nodes[start], element)}


def is_value(text: str, value: Json) -> bool:
    """Return whether a text, entities resolved, is of a type."""
    if "enum" in value:
        return text in value["enum"]
    if "pattern" in value:
        pattern = read_pattern(read_classes(value["pattern"]))
        # What cannot be matched in linear time is left to the grammar.
        return pattern is None or pattern(text) is not False
    if value["type"] != "string":
        return re.fullmatch(SCALAR_PATTERNS[value["type"]], text) is not None
    most = value.get("max_length")
    return value.get("min_length", 0) <= len(text) and (most is None or len(text) <= most)
