"""Identifiers: the names that a document gives its schemas, and where its references lead."""

import re
from typing import Any
from urllib.parse import quote, unquote, urljoin

import jsonschema_rs

from ..errors import InvalidGrammar
from .dialect import DRAFT_4, Dialect, find_named
from .keywords import iterate_subschemas, join_pointer, split_pointer

# Stands for the address of a document: identifiers in it may be relative.
BASE_URI = "http://document.troupe.invalid/-"
# Documents that contain none of these have no identifiers.
SIGNS = re.compile(r'"(?:\$?id|\$(?:dynamic|recursive)?[aA]nchor)"')
_URI_CHARACTERS = re.compile(r"[\w\-.~:/?\[\]@!$&'()*+,;=%]*", re.ASCII)
# What stands for itself in the fragment of a URI, beside letters and digits.
_FRAGMENT_CHARACTERS = "/?:@!$&'()*+,;=-._~"


class Identifiers:
    """The identifiers and anchors of one document.

    Attributes:
        dynamic: pointer of a resource -> its dynamic anchors, each with the pointer of its schema. The anchor of
            `$recursiveAnchor` is "".
    """

    def __init__(self, document: Any, dialect: Dialect) -> None:
        self.dynamic: dict[str, dict[str, str]] = {}
        # Pointer of a schema with an identifier -> the URI that references in and below it are relative to.
        self._bases: dict[str, str] = {"": BASE_URI}
        # URI, or URI with anchor -> pointer of the schema of that name, None for several.
        self._places: dict[str, str | None] = {BASE_URI: ""}
        self._scan(document, "", dialect, is_in_place=True)

    def add(self, schema: Any, pointer: str, dialect: Dialect) -> None:
        """Read the identifiers below a schema that stands where the document does not say that a schema is."""
        self._scan(schema, pointer, dialect, is_in_place=False)

    def find_resource(self, pointer: str) -> str:
        """Return the pointer of the innermost schema with an identifier around a place, or at it."""
        while pointer and pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return pointer

    def find_target(self, pointer: str, ref: str) -> str | None:
        """Return the pointer to what the `$ref` of a schema leads to, None for nothing within the document."""
        try:
            uri, _, fragment = join_uri(self._bases[self.find_resource(pointer)], ref).partition("#")
        except ValueError:
            return None
        if _URI_CHARACTERS.fullmatch(ref.partition("#")[0]) is None:
            return None
        if fragment and not fragment.startswith("/"):
            is_known = self._places.get(uri) is not None
            return self._places.get(f"{uri}#{unquote(fragment)}") if is_known else None
        start = self._places.get(uri)
        return None if start is None else start + read_fragment(fragment)

    def _scan(self, schema: Any, pointer: str, dialect: Dialect, is_in_place: bool) -> None:
        if not isinstance(schema, dict):
            return
        dialect = find_named(schema) or dialect
        if not (dialect.ignores_ref_siblings and isinstance(schema.get("$ref"), str)):
            self._take_names(schema, pointer, dialect, is_in_place)
        for path, child in iterate_subschemas(schema, dict):
            self._scan(child, join_pointer(pointer, *path), dialect, is_in_place)

    def _take_names(self, schema: dict[str, Any], pointer: str, dialect: Dialect, is_in_place: bool) -> None:
        identifier = schema.get("id" if dialect is DRAFT_4 else "$id", "")
        if not isinstance(identifier, str):
            return
        if not is_reference(identifier):
            raise InvalidGrammar(f"$id at {pointer or '#'}: {identifier!r} is no URI reference", pointer)
        base = self._bases[self.find_resource(pointer)]
        uri, _, anchor = join_uri(base, identifier).partition("#")
        if identifier.partition("#")[0]:
            self._bases[pointer] = uri
            if is_in_place:
                self._name(uri, pointer)
        anchors = {} if dialect.ignores_ref_siblings else schema
        dynamic, static = anchors.get("$dynamicAnchor"), anchors.get("$anchor")
        for name in filter(None, (anchor, static, dynamic) if is_in_place else ()):
            self._name(f"{uri}#{name}", pointer)
        if dynamic or anchors.get("$recursiveAnchor") is True:
            resource = self.find_resource(pointer)
            self.dynamic.setdefault(resource, {}).setdefault(dynamic or "", pointer)

    def _name(self, name: str, pointer: str) -> None:
        self._places[name] = pointer if self._places.get(name, pointer) == pointer else None


def is_reference(identifier: str) -> bool:
    """Return whether an identifier is a URI reference; others a validator could not read."""
    try:
        return not identifier or bool(jsonschema_rs.Draft7Validator({"$id": identifier}, offline=True))
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError):
        return False


def join_uri(base: str, ref: str) -> str:
    """Return the URI that a reference means beside a base, which has no fragment."""
    # `urljoin` would forget a base such as urn:a:b.
    return base + ref if not ref or ref.startswith("#") else urljoin(base, ref)


def read_fragment(fragment: str) -> str:
    return join_pointer("", *split_pointer(unquote(fragment)))


def write_reference(pointer: str) -> str:
    return "#" + quote(pointer, _FRAGMENT_CHARACTERS, errors="surrogatepass")


def encode_reference(ref: str) -> str:
    """Return a `$ref` whose JSON pointer is written as URIs demand: people write `#/$defs/Größe`."""
    uri, _, fragment = ref.partition("#")
    return uri + write_reference(read_fragment(fragment)) if fragment.startswith("/") else ref
