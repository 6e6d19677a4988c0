"""A record as plain tables: single values in one, every list of objects in one of its own."""

from __future__ import annotations

import html
import json
from typing import Any

from app.ui.record_view import show_pointer


def render_table(record: Any) -> str:
    """The tables of a record as HTML."""
    singles, lists = _split(record, "")
    parts = []
    if singles:
        heads = "".join(f'<th scope="col">{show_pointer(pointer) or "value"}</th>' for pointer, _ in singles)
        cells = "".join(f"<td>{_cell(value)}</td>" for _, value in singles)
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>")
    for pointer, items in lists:
        parts.append(f"<h4>{show_pointer(pointer) or 'items'}</h4>{_render_list(items)}")
    return f'<div class="tables" tabindex="0">{"".join(parts)}</div>' if parts else ""


def _split(value: Any, pointer: str) -> tuple[list[tuple[str, Any]], list[tuple[str, list[dict[str, Any]]]]]:
    """Values that stand once, and lists of objects, each with its pointer."""
    if isinstance(value, dict):
        singles: list[tuple[str, Any]] = []
        lists: list[tuple[str, list[dict[str, Any]]]] = []
        for name, inner in value.items():
            more, others = _split(inner, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")
            singles += more
            lists += others
        return singles, lists
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [], [(pointer, value)]
    return [(pointer, value)], []


def _render_list(items: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for item in items for name in item))
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(item.get(name))}</td>" for name in columns) + "</tr>" for item in items
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
