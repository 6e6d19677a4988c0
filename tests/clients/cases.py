"""What the clients' modules share: a schema, a tool, and `run`, which runs the cases of one client.

A case is a public method of the client's class; it may be async. It fails if it raises.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "demo_model"
QUESTION = "Hello! Who are you?"
ASK: Any = [{"role": "user", "content": QUESTION}]
FACT: Any = [{"role": "user", "content": "Ada Lovelace was born in 1815 in London."}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Person(BaseModel):
    """A person of the text."""

    # an open schema allows more properties, and a small model may go on with them until its limit
    model_config = ConfigDict(extra="forbid")

    kind: Literal["person", "place"]
    name: str = Field(max_length=20)
    year: int = Field(ge=0, le=2100)


SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "find_weather", "description": "Find the weather.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
NAMED: Any = {"type": "function", "function": {"name": "find_weather"}}
SHAPE: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def is_city(value: object) -> bool:
    """Whether a value, or the JSON text of one, fits SCHEMA."""
    found = json.loads(value) if isinstance(value, str) else value
    return isinstance(found, dict) and list(found) == ["city"] and found["city"] in ("Rome", "Oslo")


def refused(error: type[Exception], call: Callable[..., Any], *args: Any, **fields: Any) -> Any:
    """Return the error with which a call must fail."""
    try:
        call(*args, **fields)
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__} was raised")


def run(client: Callable[[str, str], object]) -> None:
    """Run every case of `client(url, key)`; one line of JSON for each says its name and its error."""
    url, key = sys.argv[1:3]
    for name in vars(client):
        if name.startswith("_") or not sys.argv[3:] <= [name]:
            continue
        error = None
        try:
            result = getattr(client(url, key), name)()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as raised:  # whatever a client raises is the result of its case
            where = traceback.extract_tb(raised.__traceback__)
            line = next((each.line for each in where if each.name == name), "")
            error = f"{type(raised).__name__}: {raised} [{line}]"
        print(json.dumps({"case": name.replace("_", " "), "error": error}), flush=True)
