"""Identifiers: the names that a document gives its schemas, and where its references lead."""

import re
from collections import Counter
from typing import Any
from urllib.parse import quote, unquote, urljoin

import jsonschema_rs

from ..errors import InvalidGrammar
from .dialect import DRAFT_4, Dialect
from .keywords import join_pointer, split_pointer
from .references import map_schemas

# Stands for the address of a document: identifiers in it may be relative.
BASE_URI = "http://document.troupe.invalid/-"
IDENTIFYING = frozenset(["$id", "id", "$anchor"])
_URI_CHARACTERS = re.compile(r"[\w\-.~:/?\[\]@!$&'()*+,;=%]*", re.ASCII)
# What stands for itself in the fragment of a URI, beside letters and digits.
_FRAGMENT_CHARACTERS = "/?:@!$&'()*+,;=-._~"


class Identifiers:
    """The identifiers and anchors of one document. Add its schemas one by one, outer ones first."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._counts: Counter[str] | None = None
        self._known: Counter[str] = Counter()
        # Pointer of a schema -> the URI that references in and below it are relative to.
        self._bases: dict[str, str] = {}
        # URI, or URI with anchor -> (pointer of the schema of that name, None for several; the name as written).
        self._places: dict[str, tuple[str | None, str]] = {BASE_URI: ("", "")}

    def add(self, schema: dict[str, Any], pointer: str, dialect: Dialect, is_embedded: bool = True) -> None:
        """Take note of a schema.

        Args:
            is_embedded: the schema has a place where schemas stand; elsewhere nothing can ask for it by its name.
        """
        names = {keyword: schema[keyword] for keyword in IDENTIFYING if isinstance(schema.get(keyword), str)}
        if dialect.ignores_ref_siblings and isinstance(schema.get("$ref"), str):
            names = {}
        identifier = names.get("id" if dialect is DRAFT_4 else "$id", "")
        check_identifier(identifier, pointer)
        uri, _, anchor = join_uri(self._find_base(pointer), identifier).partition("#")
        self._bases[pointer] = uri
        if not is_embedded:
            return
        # Now, since the document changes when targets of references are rewritten.
        self._counts = self._counts or count_names(self._document)
        found = [(uri, identifier)] if identifier.partition("#")[0] else []
        anchors = [anchor, "" if dialect.ignores_ref_siblings else names.get("$anchor", "")]
        for name, written in [*found, *((f"{uri}#{each}", each) for each in anchors if each)]:
            self._places[name] = None if name in self._places else pointer, written
            self._known[written.strip("#")] += 1

    def find_target(self, pointer: str, ref: str) -> str | None:
        """Return the pointer to what the `$ref` of a schema leads to, None for nothing within the document."""
        try:
            uri, _, fragment = join_uri(self._find_base(pointer), ref).partition("#")
        except ValueError:
            return None
        if _URI_CHARACTERS.fullmatch(ref.partition("#")[0]) is None:
            return None
        start = self._find_place(uri)
        if start is not None and fragment and not fragment.startswith("/"):
            return self._find_place(f"{uri}#{fragment}")
        return None if start is None else start + read_fragment(fragment)

    def _find_place(self, name: str) -> str | None:
        """Return the pointer of the only schema with a name; None where another may have it, seen from a draft."""
        pointer, written = self._places.get(name, (None, ""))
        counts, written = self._counts or Counter(), written.strip("#")
        return None if written and counts[written] > self._known[written] else pointer

    def _find_base(self, pointer: str) -> str:
        while pointer and pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return self._bases.get(pointer, BASE_URI)


def count_names(document: Any) -> Counter[str]:
    """Return how often each name is given in a document, by a schema or by what only may be one."""
    counts: Counter[str] = Counter()

    def count(schema: dict[str, Any]) -> dict[str, Any]:
        names = (schema.get(keyword) for keyword in IDENTIFYING)
        counts.update(name.strip("#") for name in names if isinstance(name, str))
        return schema

    map_schemas(document, count)
    return counts


def check_identifier(identifier: str, pointer: str) -> None:
    """Refuse an identifier that is no URI reference, which a validator could not read."""
    try:
        if identifier:
            jsonschema_rs.Draft7Validator({"$id": identifier}, offline=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        raise InvalidGrammar(
            f"$id at {pointer or '#'}: {identifier!r} is no URI reference", pointer
        ) from error


def join_uri(base: str, ref: str) -> str:
    """Return the URI that a reference means beside a base, which has no fragment."""
    # `urljoin` would forget a base such as urn:a:b.
    return base + ref if not ref or ref.startswith("#") else urljoin(base, ref)


def read_fragment(fragment: str) -> str:
    """Return the JSON pointer that is written as the fragment of a URI."""
    return "".join(join_pointer("", part) for part in split_pointer(unquote(fragment)))


def write_reference(pointer: str) -> str:
    """Return the `$ref` to a JSON pointer in the same document."""
    return "#" + quote(pointer, _FRAGMENT_CHARACTERS, errors="surrogatepass")


def encode_reference(ref: str) -> str:
    """Return a `$ref` whose JSON pointer is written as URIs demand: people write `#/$defs/Größe`."""
    uri, _, fragment = ref.partition("#")
    return uri + write_reference(read_fragment(fragment)) if fragment.startswith("/") else ref
