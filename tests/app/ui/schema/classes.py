"""Pydantic classes as Pydantic itself sees them."""

import importlib.util
import json
from pathlib import Path
from typing import Any


def load_record(code: str, folder: Path) -> Any:
    """The class that the code ends with, imported as a program would."""
    path = folder / "written.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, code.split("\nclass ")[-1].split("(")[0])


def simplify(schema: Any, definitions: Any = None) -> Any:
    """One spelling of what two schemas say alike: references resolved, titles, names and order left out."""
    if isinstance(schema, list):
        return sorted((simplify(item, definitions) for item in schema), key=_spell)
    if not isinstance(schema, dict):
        return schema
    definitions = schema.get("$defs", definitions)
    if "$ref" in schema:
        rest = {name: value for name, value in schema.items() if name not in ("$ref", "default")}
        return simplify({**definitions[schema["$ref"].split("/")[-1]], **rest}, definitions)
    if isinstance(schema.get("type"), list):
        first, *rest = ({**schema, "type": kind} for kind in schema["type"])
        own = {k: v for k, v in first.items() if k != "description"}
        schema = {"anyOf": [own, *({"type": each["type"]} for each in rest)]} | {
            k: v for k, v in schema.items() if k == "description"
        }
    silent = ("title", "$schema", "$defs", "default") if "properties" not in schema else ("$schema", "$defs")
    found = {k: simplify(v, definitions) for k, v in schema.items() if k not in silent}
    if "prefixItems" in found:
        found["prefixItems"] = [simplify(item, definitions) for item in schema["prefixItems"]]
    if "properties" in found:
        found.pop("title", None)
        found["properties"] = {k: simplify(v, definitions) for k, v in schema["properties"].items()}
    return found


def _spell(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True)
