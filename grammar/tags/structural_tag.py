"""Structural tags as requests write them: free text with tagged parts that fit a schema, validated and copied.

{"type": "structural_tag", "format": FORMAT}                                     xgrammar's and OpenAI's form
{"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}   the older form

FORMAT is an object with a `type`; FORMATS lists them. Formats have xgrammar's meaning, but are always enforced
exactly: inner schemas, patterns and grammars are compiled as they would be alone, or refused with their pointer.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidGrammar, UnsupportedGrammar
from ..schema.keywords import join_pointer

MAX_NUM_FORMATS = 4096
MAX_REPEAT = 256

Json = dict[str, Any]

# Type -> its fields; those with a default are optional.
FORMATS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order", "max_whitespace_cnt", "excludes"),
    "any_text": ("excludes", "max_tokens", "max_chars"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "token": ("token",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "token_triggered_tags": ("trigger_tokens", "tags", "at_least_one", "stop_after_first", "exclude_tokens"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("min", "max", "content"),
    "dispatch": ("rules", "loop", "excludes"),
}
_FLAGS: Json = {"any_order": False, "at_least_one": False, "stop_after_first": False, "loop": True}
# Only this value of these fields is supported.
_ONLY: Json = {
    "style": "json",
    "max_whitespace_cnt": None,
    "max_tokens": None,
    "max_chars": None,
    "exclude_tokens": [],
}
_DEFAULTS: Json = {**_FLAGS, **_ONLY, "excludes": []}
_BY_TOKENS = ("exclude_token", "any_tokens", "token_dispatch")
LEAVES = ("json_schema", "regex", "grammar")


def describe_tags(value: Any) -> Json:
    """Validate a structural tag and return it as a JSON value in the newer form."""
    if not isinstance(value, Mapping):
        raise InvalidGrammar(f"a structural tag is an object, not {type(value).__name__}")
    if "structures" in value or "triggers" in value:
        return {"type": "structural_tag", "is_legacy": True, "format": _read_legacy(value)}
    unknown = set(value) - {"type", "format"}
    if unknown or value.get("type", "structural_tag") != "structural_tag" or "format" not in value:
        raise InvalidGrammar(
            'a structural tag is {"type": "structural_tag", "format": ...}'
            + (f"; unknown key {sorted(unknown)[0]!r}" if unknown else "")
        )
    described = _Reader().read(value["format"], "/format", 0)
    return {"type": "structural_tag", "is_legacy": False, "format": described}


def make_const(text: str) -> Json:
    return {"type": "const_string", "value": text}


def make_tag(begin: str, content: Json, end: str) -> Json:
    """Return the format of a content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def make_sequence(*elements: Json) -> Json:
    return {"type": "sequence", "elements": list(elements)}


def make_choice(elements: Sequence[Json]) -> Json:
    return {"type": "or", "elements": list(elements)}


def make_optional(content: Json) -> Json:
    return {"type": "optional", "content": content}


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


def _read_legacy(value: Mapping[str, Any]) -> Json:
    unknown = set(value) - {"type", "structures", "triggers"}
    structures, triggers = value.get("structures"), value.get("triggers")
    if unknown or not isinstance(structures, list) or not isinstance(triggers, list):
        raise InvalidGrammar('the older structural tag is {"structures": [...], "triggers": [...]}')
    tags = []
    for index, item in enumerate(structures):
        if not isinstance(item, Mapping) or set(item) != {"begin", "schema", "end"}:
            raise InvalidGrammar(f"/structures/{index} is an object with begin, schema and end")
        content = {"type": "json_schema", "json_schema": item["schema"]}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    return _Reader().read({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "/format", 0)


class _Reader:
    """Validates formats from the outside in; refuses unknown fields, which would otherwise be ignored."""

    MAX_DEPTH = 32

    def __init__(self) -> None:
        self._num_formats = 0

    def read(self, part: Any, where: str, depth: int) -> Json:
        """Return a format with all its fields, defaults included."""
        if not isinstance(part, Mapping):
            raise InvalidGrammar(f"the format at {where} is {type(part).__name__}, not an object")
        self._num_formats += 1
        if depth > self.MAX_DEPTH or self._num_formats > MAX_NUM_FORMATS:
            raise InvalidGrammar(
                f"a structural tag has at most {MAX_NUM_FORMATS} formats, {self.MAX_DEPTH} levels deep"
            )
        kind = part.get("type")
        if kind in _BY_TOKENS:
            raise UnsupportedGrammar(where, str(kind), "free text is delimited by characters, not by tokens")
        if not isinstance(kind, str) or kind not in FORMATS:
            said = f"type {str(kind)[:80]!r}" if "type" in part else "no type"
            raise InvalidGrammar(f"{where} has {said}; choose from {list(FORMATS)}")
        missing = [key for key in FORMATS[kind] if key not in part and key not in _DEFAULTS]
        unknown = [str(key) for key in part if key not in (*FORMATS[kind], "type")]
        if missing or unknown:
            problem = f"lacks {missing[0]!r}" if missing else f"has the unknown field {unknown[0]!r}"
            raise InvalidGrammar(f"the {kind} at {where} {problem}")
        read = {"type": kind} | {key: part.get(key, _DEFAULTS.get(key)) for key in FORMATS[kind]}
        for key in read.keys() & (_ONLY.keys() | ({"excludes"} if kind == "json_schema" else set())):
            if read[key] != _DEFAULTS[key]:
                reason = f"{str(read[key])[:80]!r}; only {_DEFAULTS[key]!r} is enforced"
                raise UnsupportedGrammar(where, key, reason)
        read |= {key: self._read_field(key, read[key], f"{where}/{key}", depth + 1) for key in FORMATS[kind]}
        if kind == "repeat":
            _check_repeat(read, where)
        return read

    def _read_field(self, key: str, value: Any, where: str, depth: int) -> Any:
        match key:
            case "value" | "pattern" | "grammar" | "separator":
                return _read_text(value, where)
            case "content":
                return self.read(value, where, depth)
            case "elements":
                return [
                    self.read(each, f"{where}/{i}", depth) for i, each in enumerate(_read_list(value, where))
                ]
            case "tags":
                return [
                    self._read_tag(each, f"{where}/{i}", depth)
                    for i, each in enumerate(_read_list(value, where))
                ]
            case "begin":
                return self._read_mark(value, where, depth)
            case "end":
                ends = value if isinstance(value, list) else [value]
                return [self._read_mark(each, where, depth) for each in _read_list(ends, where)]
            case "token":
                return _read_token(value, where)
            case "trigger_tokens":
                return [_read_token(each, where) for each in _read_list(value, where)]
            case "triggers" | "excludes":
                listed = _read_list(value, where) if value or key == "triggers" else []
                texts = [_read_text(each, f"{where}/{i}") for i, each in enumerate(listed)]
                if not all(texts):
                    raise InvalidGrammar(f"{where} holds an empty text")
                return list(dict.fromkeys(texts))
            case "rules":
                return [
                    self._read_rule(each, f"{where}/{i}", depth)
                    for i, each in enumerate(_read_list(value, where))
                ]
        if key in _FLAGS and not isinstance(value, bool):
            raise InvalidGrammar(f"{where} is true or false, not {str(value)[:80]!r}")
        return value

    def _read_tag(self, value: Any, where: str, depth: int) -> Json:
        # Only tags are allowed here, so xgrammar makes their type optional.
        tag = self.read({"type": "tag", **value} if isinstance(value, Mapping) else value, where, depth)
        if tag["type"] != "tag":
            raise InvalidGrammar(f"{where} has type {tag['type']!r}; a tag is wanted")
        return tag

    def _read_mark(self, value: Any, where: str, depth: int) -> Any:
        if not isinstance(value, Mapping):
            return _read_text(value, where)
        read = self.read({"type": "token", **value}, where, depth)
        if read["type"] != "token":
            raise InvalidGrammar(f"{where} is a text or a token")
        return read

    def _read_rule(self, rule: Any, where: str, depth: int) -> list[Any]:
        if not isinstance(rule, list | tuple) or len(rule) != 2:
            raise InvalidGrammar(f"{where} is a list of a text and a format")
        return [_read_text(rule[0], f"{where}/0"), self.read(rule[1], f"{where}/1", depth)]


def _read_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidGrammar(f"{where} is a list with at least one entry")
    return list(value)


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidGrammar(f"{where} is a text, not {type(value).__name__}")
    return value


def _read_token(value: Any, where: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise InvalidGrammar(f"{where} is the id of a token or its text, not {str(value)[:80]!r}")
    return value


def _check_repeat(part: Json, where: str) -> None:
    least, most = part["min"], part["max"]
    for key, count in (("min", least), ("max", most)):
        if isinstance(count, bool) or not isinstance(count, int) or not -1 <= count <= MAX_REPEAT:
            place = join_pointer(where, key)
            raise InvalidGrammar(f"{place} is an integer from 0 to {MAX_REPEAT}, or -1 for max without end")
    if least < 0 or (most != -1 and most < least):
        raise InvalidGrammar(f"{where}: min={least} and max={most} allow nothing")
