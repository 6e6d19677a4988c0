"""XML documents as a Lark grammar for llguidance: one rule for each element, one terminal for each value.

One spelling for everything: attributes in the order given and in double quotes, one space before each; & < > and
(in attributes) the quote as entities; what may be empty as <a></a> or <a/>. A terminal reaches to the tag after it,
so that no value can swallow its own end.
"""

from typing import Any

from ..csv_table import SCALAR_PATTERNS
from ..engines.lark_rules import LarkRules
from ..regex.dialects import read_classes
from ..regex.text import choices_to_regex, quote, write_terminal
from .tree import XML_DECLARATION, counts_of

# Characters that stand for themselves. A raw carriage return would be read as a line feed, and in attributes all
# white space as a blank.
_PLAIN_TEXT = r"[^<>&\x00-\x08\x0b-\x1f\x{fffe}\x{ffff}]"
_PLAIN_ATTRIBUTE = r'[^<>&"\x00-\x1f\x{fffe}\x{ffff}]'
_TEXT_CHARACTER = f"(?:{_PLAIN_TEXT}|&amp;|&lt;|&gt;)"
_ATTRIBUTE_CHARACTER = f"(?:{_PLAIN_ATTRIBUTE}|&amp;|&lt;|&gt;|&quot;)"
# Between the tags of an element that has children.
_SPACES = {"compact": None, "spaced": r"\n[ \t]{0,63}", "any": r"[ \t\n]{1,64}"}

Json = dict[str, Any]


def make_xml_lark(document: Json, whitespace: str) -> str:
    """Return the Lark grammar of a document that `describe_document` described."""
    return _Writer(document, _SPACES[whitespace]).write()


class _Writer:
    def __init__(self, document: Json, space: str | None) -> None:
        self._document = document
        self._lark = LarkRules()
        self._gap = "" if space is None else f" {self._lark.name(f'/{space}/')}?"
        self._definitions = {name: f"d{i}" for i, name in enumerate(document["definitions"])}

    def write(self) -> str:
        # White space only after a declaration.
        first = f"{quote(XML_DECLARATION)}{self._gap}"
        prolog = {"none": "", "optional": f"({first})? ", "required": f"{first} "}[self._document["declaration"]]
        for name, rule in self._definitions.items():
            self._lark.rules[rule] = self._element(self._document["definitions"][name])
        return self._lark.write(prolog + self._element(self._document["root"]))

    def _element(self, element: Json) -> str:
        name = element["name"]
        head = quote(f"<{name}") + "".join(self._attribute(*each) for each in element["attributes"])
        return self._lark.rule(f"{head} ({self._content(element)})")

    def _attribute(self, name: str, value: Json) -> str:
        body = write_value(value, _ATTRIBUTE_CHARACTER, _PLAIN_ATTRIBUTE, is_attribute=True)
        terminal = self._lark.name(f"{quote(f' {name}=' + chr(34))} {body} {quote(chr(34))}")
        return f" {terminal}" if value["required"] else f" {terminal}?"

    def _content(self, element: Json) -> str:
        name = element["name"]
        if "children" in element:
            parts = " ".join(self._particle(each) for each in element["children"])
            full = f'">"{self._gap} {parts} {quote(f"</{name}>")}'
            return full + (' | "/>"' if all(may_be_absent(each) for each in element["children"]) else "")
        if "text" not in element:
            return f'"/>" | {quote(f"></{name}>")}'
        text = element["text"]
        body = write_value(text, _TEXT_CHARACTER, _PLAIN_TEXT, is_attribute=False)
        terminal = self._lark.name(f'">" {body} {quote(f"</{name}>")}')
        is_empty_fine = (text.get("type") == "string" and not text.get("min_length")) or "" in text.get("enum", ())
        return terminal + (' | "/>"' if is_empty_fine else "")

    def _particle(self, particle: Json) -> str:
        least, most = counts_of(particle)
        if "choice" in particle:
            rule = self._lark.rule(" | ".join(self._particle(each) for each in particle["choice"]))
        elif "sequence" in particle:
            rule = self._lark.rule(" ".join(self._particle(each) for each in particle["sequence"]))
        elif "ref" in particle:
            rule = self._lark.rule(self._definitions[particle["ref"]] + self._gap)
        else:
            rule = self._lark.rule(self._element(particle) + self._gap)
        if (least, most) == (1, 1):
            return rule
        return f"{rule}{{{least},{'' if most is None else most}}}"


def may_be_absent(particle: Json) -> bool:
    least, _ = counts_of(particle)
    if least == 0:
        return True
    if "choice" in particle:
        return any(may_be_absent(each) for each in particle["choice"])
    return "sequence" in particle and all(may_be_absent(each) for each in particle["sequence"])


def write_value(value: Json, character: str, plain: str, is_attribute: bool) -> str:
    """Return the terminal expression of a value as it is written."""
    if "enum" in value:
        texts = dict.fromkeys(escape_text(text, is_attribute) for text in value["enum"])
        return write_terminal(choices_to_regex([*texts]))
    if "pattern" in value:
        # Patterns speak about characters that stand for themselves; & cuts the others out.
        pattern = write_terminal(f"(?:{read_classes(value['pattern'])})")
        return f"({pattern} & {write_terminal(f'{plain}*')})"
    if value["type"] != "string":
        return write_terminal(SCALAR_PATTERNS[value["type"]])
    least, most = value.get("min_length", 0), value.get("max_length")
    count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
    return write_terminal(character + count)


def escape_text(text: str, is_attribute: bool) -> str:
    """Return a text as it stands between tags or in quotes."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")
    if is_attribute:
        text = text.replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;")
    return text
