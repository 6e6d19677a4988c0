"""The parts of a message's content, in every dialect, as texts, images and files of chat completions.

text, input_text, output_text, refusal                    a text
search_result, tool_reference, searches of a service      their texts
image_url, input_image, image                             {"type": "image_url", "image_url": {"url": ...}}
file, input_file, document, an image's file_id            a text, or {"type": "file", "file": {...}} (documents.py)
what no model here can read, such as audio                {"type": "unseen", "text": what it was}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from app.api.errors import refuse
from app.api.protocol import check_choice, read_text
from app.api.wording import Path

Json = dict[str, Any]

# type of a text part -> the key of its text
TEXT_KEYS = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "summary_text": "text",
    "reasoning_text": "text", "tool_reference": "tool_name",
}
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
IMAGE_DETAILS = ("auto", "low", "high", "original")  # accepted; the model's image processor chooses the size
# what services of others have done for a message that comes back: the text that the model then had
DONE = ("server_tool_use", "mcp_tool_use", "mcp_tool_result")


def read_parts(where: Path, content: object, is_history: bool = False) -> list[Json]:
    """Return the parts of a content; those that are chat's already stay.

    Args:
        is_history: of an assistant or a tool. What no model here can read is unseen there: refusing it would end the
            conversation, which contains it from now on.
    """
    if isinstance(content, str):
        return [make_text(content)]
    if not isinstance(content, list):
        raise refuse(where, " must be a text or a list of parts")
    return [one for i, part in enumerate(content) for one in read_part((*where, i), part, is_history)]


def make_text(text: str) -> Json:
    """Return a part that is a text."""
    return {"type": "text", "text": text}


def read_part(where: Path, part: object, is_history: bool = False) -> list[Json]:
    """Return a part as `read_parts` does; a document may be several."""
    given: Mapping[str, Any] = part if isinstance(part, dict) else {}
    found = _read(where, given, is_history)
    if not is_history and given.get("type") != "unseen" and any(one["type"] == "unseen" for one in found):
        rule = f": content of type {str(given.get('type'))[:40]!r} is not supported in this form"
        raise refuse(where, rule, "unsupported_content")
    return found


def _read(where: Path, given: Mapping[str, Any], is_history: bool) -> list[Json]:
    match kind := given.get("type"):
        case "image_url" | "input_image":
            return [_read_image(where, given)]
        case "image":
            return [_read_image_source((*where, "source"), given.get("source"))]
        case "file" | "input_file":
            return [_read_file(where, given)]
        case "document":
            return _read_document(where, given)
        case "search_result":
            head = [str(given[name]) for name in ("title", "source") if given.get(name)]
            return [*map(make_text, head), *read_parts((*where, "content"), given.get("content"), is_history)]
        case str() if kind in TEXT_KEYS:
            return [make_text(read_text((*where, TEXT_KEYS[kind]), given.get(TEXT_KEYS[kind])))]
        case str() if kind in DONE or kind.endswith("_tool_result"):
            return [make_text(describe_block(given))]
        case "unseen" if isinstance(given.get("text"), str):
            return [dict(given)]
        case str() if is_history:
            return [make_unseen(kind[:40])]
    raise refuse(where, f": content of type {str(kind)[:40]!r} is not supported", "unsupported_content")


def _read_image(where: Path, part: Mapping[str, Any]) -> Json:
    """Read an image of chat completions, {"url", "detail"}, or of responses, the URL itself."""
    image = part.get("image_url")
    if image is None and part.get("file_id"):
        return make_stored(where, part["file_id"])
    url, detail = (image, part.get("detail")) if isinstance(image, str) else (None, None)
    if isinstance(image, dict):
        url, detail = image.get("url"), image.get("detail")
    if not isinstance(url, str):
        raise refuse((*where, "image_url"), " must have the url of an image, such as data:image/png;base64,...")
    if detail is not None:
        check_choice((*where, "detail"), detail, IMAGE_DETAILS)
    return {"type": "image_url", "image_url": {"url": url}}


def _read_image_source(where: Path, source: object) -> Json:
    found = source if isinstance(source, dict) else {}
    match found.get("type"):
        case "base64" if found.get("media_type") in IMAGE_TYPES:
            data = read_text((*where, "data"), found.get("data"))
            return {"type": "image_url", "image_url": {"url": f"data:{found['media_type']};base64,{data}"}}
        case "url":
            return {"type": "image_url", "image_url": {"url": read_text((*where, "url"), found.get("url"))}}
        case "base64" if isinstance(media_type := found.get("media_type"), str):
            return make_unseen(f"image of type {media_type[:40]}")
        case "file":
            return make_stored(where, found.get("file_id"))
    rule = f" must be base64 with a media_type of {', '.join(IMAGE_TYPES)}, a url, or a file"
    raise refuse(where, rule, "unsupported_content")


def _read_file(where: Path, part: Mapping[str, Any]) -> Json:
    """Read a file of chat completions, {"filename", "file_data"} or {"file_id"} in `file`, or of responses."""
    file = part.get("file") if part["type"] == "file" else part
    file = file if isinstance(file, dict) else {}
    name = str(file.get("filename") or "file")
    if file.get("file_data") is None:
        if file.get("file_id"):
            return make_stored(where, file["file_id"])
        if file.get("file_url"):
            return make_unseen(f"file {name[:80]}")
        raise refuse(where, " must have file_data, a data: URL, or the file_id of /v1/files", "unsupported_content")
    return make_file(where, name, read_text((*where, "file_data"), file["file_data"]))


def _read_document(where: Path, block: Mapping[str, Any]) -> list[Json]:
    found = block.get("source")
    source: Mapping[str, Any] = found if isinstance(found, dict) else {}
    before = [make_text(str(block[name])) for name in ("title", "context") if block.get(name)]
    match source.get("type"):
        case "text":
            return [*before, make_text(read_text((*where, "source", "data"), source.get("data")))]
        case "content":
            return [*before, *read_parts((*where, "source", "content"), source.get("content"))]
        case "base64":
            data = read_text((*where, "source", "data"), source.get("data"))
            media_type = read_text((*where, "source", "media_type"), source.get("media_type"))
            name = str(block.get("title") or "document")
            return [*before, make_file(where, name, f"data:{media_type};base64,{data}")]
        case "file":
            return [*before, make_stored((*where, "source"), source.get("file_id"))]
        case "url":
            return [*before, make_unseen("document")]
    check_choice((*where, "source", "type"), source.get("type"), ("text", "base64", "content", "url", "file"))
    return []


def make_file(where: Path, name: str, data: str) -> Json:
    """Return a part that is a file, as chat completions have it, with its place for errors."""
    return {"type": "file", "file": {"filename": name, "file_data": data}, "where": where}


def make_stored(where: Path, file_id: object) -> Json:
    """Return a part that is a file or an image of /v1/files, with its place for errors."""
    return {"type": "file", "file": {"file_id": read_text((*where, "file_id"), file_id)}, "where": where}


def make_unseen(what: str) -> Json:
    """Return a part that no model here can read."""
    return {"type": "unseen", "text": what}


def describe_block(block: Mapping[str, Any]) -> str:
    """Return what a service did as JSON, without ids and what only the service can read."""
    hidden = ("id", "status", "tool_use_id", "encrypted_content", "encrypted_index", "cache_control", "type")

    def strip(found: Json) -> Json:
        return {name: inner for name, inner in found.items() if name not in hidden}

    # a walk in Python would need two calls for each level of a deep value
    kept = json.loads(json.dumps(block), object_hook=strip)
    return f"[{block['type']}] {json.dumps(kept, ensure_ascii=False)}"
