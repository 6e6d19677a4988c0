"""Structural tags as requests write them: free text with tagged parts that fit a schema, validated and copied.

{"type": "structural_tag", "format": FORMAT}                                     xgrammar's and OpenAI's form
{"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}   the older form

FORMAT is an object with a `type`; FORMATS lists them. Formats have xgrammar's meaning, but are always enforced
exactly: inner schemas, patterns and grammars are compiled as they would be alone, or refused with their pointer.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any

from msgspec import Meta, Struct, defstruct

from ..description import Malformed, read_description
from ..errors import InvalidGrammar, UnsupportedGrammar

MAX_NUM_FORMATS = 4096
MAX_DEPTH = 32
MAX_REPEAT = 256
# Types of xgrammar, and fields, that are known but not enforced.
_BY_TOKENS = ("exclude_token", "any_tokens", "token_dispatch", "token_triggered_tags", "token")
_ONLY_DEFAULT = ("style", "max_whitespace_cnt", "max_chars", "exclude_tokens", "excludes")
LEAVES = ("json_schema", "regex", "grammar")

Json = dict[str, Any]
_Name = Annotated[str, Meta(min_length=1)]
_Names = Annotated[list[_Name], Meta(min_length=1)]
_Nothing = Annotated[list[Any], Meta(max_length=0)]
_Formats = "Annotated[list[Format], Meta(min_length=1)]"
_Tags = "Annotated[list[Tag], Meta(min_length=1)]"
_ONCE = (("at_least_one", bool, False), ("stop_after_first", bool, False))
_EXCLUDES: tuple[Any, ...] = ("excludes", list[_Name], [])
# Type -> its fields: name, type and, where it may be left out, default.
FORMATS: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "const_string": (("value", str),),
    "json_schema": (
        ("json_schema", Any), ("style", Annotated[str, Meta(pattern="^json$")], "json"),
        ("any_order", bool, False), ("max_whitespace_cnt", None, None), ("excludes", _Nothing, []),
    ),
    "any_text": (
        _EXCLUDES, ("max_tokens", Annotated[int, Meta(ge=1)] | None, None), ("max_chars", None, None)
    ),
    "regex": (("pattern", str),),
    "grammar": (("grammar", str),),
    "sequence": (("elements", _Formats),),
    "or": (("elements", _Formats),),
    "tag": (("begin", str), ("content", "Format"), ("end", str | Annotated[list[str], Meta(min_length=1)])),
    "triggered_tags": (("triggers", _Names), ("tags", _Tags), *_ONCE, _EXCLUDES),
    "tags_with_separator": (("tags", _Tags), ("separator", str), *_ONCE),
    "optional": (("content", "Format"),),
    "star": (("content", "Format"),),
    "plus": (("content", "Format"),),
    "repeat": (
        ("min", Annotated[int, Meta(ge=0, le=MAX_REPEAT)]),
        ("max", Annotated[int, Meta(ge=-1, le=MAX_REPEAT)]), ("content", "Format"),
    ),
    "dispatch": (
        ("rules", "Annotated[list[tuple[_Name, Format]], Meta(min_length=1)]"), ("loop", bool, True), _EXCLUDES,
    ),
}
_STRICT: Any = {"tag_field": "type", "forbid_unknown_fields": True, "module": __name__}
_CLASSES = {kind: defstruct(kind, fields, tag=kind, **_STRICT) for kind, fields in FORMATS.items()}
Format = reduce(or_, _CLASSES.values())  # type: ignore[arg-type]
Tag = _CLASSES["tag"]
_Request = defstruct("_Request", [("format", Format)], tag="structural_tag", **_STRICT)
_Structure = defstruct("_Structure", [("begin", str), ("schema", Any), ("end", str)], **_STRICT | {"tag_field": None})
_Legacy = defstruct(
    "_Legacy",
    [("structures", Annotated[list[_Structure], Meta(min_length=1)]), ("triggers", _Names)],  # type: ignore[valid-type]
    tag="structural_tag",
    **_STRICT,
)


def describe_tags(value: Any) -> Json:
    """Validate a structural tag and return it as a JSON value in the newer form."""
    is_legacy = isinstance(value, Mapping) and ("structures" in value or "triggers" in value)
    described = _convert(value, _Legacy if is_legacy else _Request)
    if is_legacy:
        tags = [
            {"type": "tag", "content": {"type": "json_schema", "json_schema": each["schema"]}}
            | {"begin": each["begin"], "end": each["end"]}
            for each in described["structures"]
        ]
        part = {"type": "triggered_tags", "triggers": described["triggers"], "tags": tags}
        described = _convert({"format": part}, _Request)
    _check(described["format"], "/format")
    return described | {"is_legacy": is_legacy}


def _convert(value: Any, kind: type[Struct]) -> Json:
    try:
        return read_description(value, kind, "structural tag")
    except Malformed as error:
        above, _, key = (error.pointer or "").rpartition("/")
        by_tokens = next((name for name in _BY_TOKENS if f"'{name}'" in error.reason), None)
        if key == "type" and by_tokens is not None:
            reason = "texts are described by characters; a special token may be named in a text"
            raise UnsupportedGrammar(above, by_tokens, reason) from error
        if key in _ONLY_DEFAULT and (key != "excludes" or "<= 0" in error.reason):
            raise UnsupportedGrammar(above, key, f"only its default is enforced: {error.reason}") from error
        if key != "type" and "field `type`" not in error.reason:
            raise
        hint = f"; choose from {list(FORMATS)}"
        raise Malformed("structural tag", error.pointer or "", error.reason, hint) from error


def _check(part: Json, where: str) -> None:
    """Check what the classes do not say, and write one end of a tag as a list."""
    level, num_formats = [(where, part)], 0
    for _ in range(MAX_DEPTH + 1):
        num_formats += len(level)
        for place, each in level:
            if each["type"] == "tag" and not isinstance(each["end"], list):
                each["end"] = [each["end"]]
            if each["type"] == "repeat" and -1 < each["max"] < each["min"]:
                raise InvalidGrammar(f"{place}: min={each['min']} and max={each['max']} allow nothing")
        level = [child for place, each in level for child in list_children(each, place)]
    if level or num_formats > MAX_NUM_FORMATS:
        raise InvalidGrammar(f"a structural tag has at most {MAX_NUM_FORMATS} formats, {MAX_DEPTH} levels deep")


def list_leaves(part: Json, pointer: str) -> Iterator[tuple[str, Json]]:
    """Yield (JSON pointer, format) of every schema, pattern and grammar."""
    if part["type"] in LEAVES:
        yield pointer, part
    for where, child in list_children(part, pointer):
        yield from list_leaves(child, where)


def list_children(part: Json, pointer: str) -> Iterator[tuple[str, Json]]:
    """Yield (JSON pointer, format) of the formats directly inside a format."""
    for name in ("elements", "tags"):
        for index, child in enumerate(part.get(name, ())):
            yield f"{pointer}/{name}/{index}", child
    for index, (_, child) in enumerate(part.get("rules", ())):
        yield f"{pointer}/rules/{index}/1", child
    if "content" in part:
        yield f"{pointer}/content", part["content"]


def name_place(pointer: str, is_legacy: bool) -> str:
    """Return the JSON pointer in the user's request."""
    if is_legacy and pointer.startswith("/format/tags/"):
        _, _, _, index, rest = [*pointer.split("/", 4), ""][:5]
        rest = rest.replace("content", "schema", 1)
        return f"/structures/{index}/{rest}".rstrip("/")
    return pointer
