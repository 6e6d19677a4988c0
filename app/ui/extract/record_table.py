"""Shows a record as plain tables: single values in one, and one table per list of objects."""

from __future__ import annotations

import html
import json
from typing import Any

from app.extraction.json_spans import Path
from app.ui.extract.record_view import show_path


def render_table(record: Any) -> str:
    """Return the tables of a record as HTML."""
    singles, lists = _split(record, ())
    parts = []
    if singles:
        heads = "".join(f'<th scope="col">{show_path(path) or "value"}</th>' for path, _ in singles)
        cells = "".join(f"<td>{_cell(value)}</td>" for _, value in singles)
        parts.append(f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>")
    for path, items in lists:
        parts.append(f"<h2>{show_path(path) or 'items'}</h2>{_render_list(items)}")
    return f'<div class="tables" tabindex="0">{"".join(parts)}</div>' if parts else ""


def _split(value: Any, path: Path) -> tuple[list[tuple[Path, Any]], list[tuple[Path, list[dict[str, Any]]]]]:
    """Split single values from lists of objects, each with its path."""
    if isinstance(value, dict):
        singles: list[tuple[Path, Any]] = []
        lists: list[tuple[Path, list[dict[str, Any]]]] = []
        for name, inner in value.items():
            more, others = _split(inner, (*path, name))
            singles += more
            lists += others
        return singles, lists
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [], [(path, value)]
    return [(path, value)], []


def _render_list(items: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for item in items for name in item))
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(item.get(name))}</td>" for name in columns) + "</tr>" for item in items
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(value: Any) -> str:
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
