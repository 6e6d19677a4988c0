"""The soak's requests. Request n of a seed is always the same, so it can be sent again, alone, to a fresh server."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.app.extraction.pdf_files import make_pdf
from tests.engine.vision_folders import make_picture, to_bytes
from tests.hostile_images import list_hostile, make_part
from tests.soak.model import DATA, NUM_ADAPTERS

NUM_SCHEMAS, NUM_PER_SCHEMA = 120, 40
NUM_REQUESTS = NUM_SCHEMAS * NUM_PER_SCHEMA
KINDS = {"schema": 60, "tools": 9, "regex": 8, "hostile": 5, "text": 7, "upload": 6, "image": 5}
WORDS = (
    "amount", "order", "ship", "river", "light", "number", "copper", "seven", "glass", "market", "letter", "window",
)  # fmt: skip
REGEXES = (
    r"[a-z]{{2,{n}}}-\d{{1,{n}}}", r"(yes|no|maybe){{1,{n}}}", r"\d{{4}}-\d{{2}}-\d{{2}} .{{{n}}}",
    r"([A-Z][a-z]+ ){{{n}}}end",
    r"#[0-9a-f]{{6}}(, #[0-9a-f]{{6}}){{0,{n}}}",
)  # fmt: skip
GRAMMARS = (
    'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+', 'root ::= "(" root ")" | "x"',
    'root ::= term ("+" term)*\nterm ::= [0-9] [0-9]? | "(" root ")"',
)
DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(60):
    DEEP = {"anyOf": [{"type": "array", "items": DEEP}, {"type": "string", "maxLength": 3}]}
HOSTILE: tuple[dict[str, Any], ...] = (
    {"regex": "(a{1,1000}){1,1000}"}, {"regex": "(x+x+)+y"}, {"regex": "(a|aa|aaa){500}b"}, {"regex": "("},
    {"regex": r"(\w+\s?){80}\d{40}"}, {"regex": "(?=a)b"}, {"regex": "[^\\d\\D]"},
    {"grammar": "root ::= root root | root"}, {"grammar": "root ::= missing"},
    {"grammar": "root ::= " + "(" * 400 + '"a"' + ")" * 400},
    {"json": {"type": "string", "minLength": 10**9}}, {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}},
    {"json": {"enum": [f"word {n}" for n in range(5000)]}}, {"json": {"enum": []}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}},
    {"json": DEEP}, {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(600)}}},
    {"json": {"allOf": [{"type": "object", "properties": {f"k{n}": {"pattern": "^(a|b)*c$"}}} for n in range(40)]}},
    {"json": {"type": "string", "pattern": "^(([a-z]{1,40})+\\.){1,40}$"}}, {"choice": ["x" * 4000, "y"]},
    {"json": {"oneOf": [{"type": "number", "multipleOf": 0.01}, {"type": "number", "multipleOf": 0.03}]}},
)  # fmt: skip
FILES: tuple[tuple[str, bytes], ...] = (
    ("rows.csv", b"id,note\n1,The order has 3 lamps\n2,Nothing\n3,River stone\n"),
    ("rows.jsonl", b'{"text": "Seven copper ships"}\n{"text": "A letter"}\n'),
    ("note.txt", b"The market opens at seven. The glass costs 12 EUR.\n"),
    ("page.pdf", make_pdf("Invoice 17, total 12.50 EUR")),
    ("many.pdf", make_pdf(*["A page of a long file"] * 40)), ("empty.pdf", make_pdf("")),
    ("keys.jsonl", json.dumps({f"key {n}": n for n in range(20_000)}).encode()),
    ("same.jsonl", b"{" + b",".join(b'"a": 1' for _ in range(20_000)) + b"}"),
    ("blank.txt", b"\n" * 200_000), ("deep.jsonl", b"[" * 50_000), ("broken.pdf", b"%PDF-1.7\n" + b"1 0 obj <<" * 500),
    ("wide.csv", b",".join(b"c%d" % n for n in range(5000)) + b"\n" + b",".join(b"1" for _ in range(5000))),
    ("quote.csv", b'a,b\n"' + b"x" * 300_000), ("image.txt", bytes(range(256)) * 50),
)  # fmt: skip
# The first requests use every schema, file, hostile grammar and pool of threads once.
FIRST = ["schema"] * NUM_SCHEMAS + ["upload"] * len(FILES) + ["image"] * 2 + ["hostile"] * len(HOSTILE)


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        form: the fields of a form with a file, in place of a body.
        leaves_after: events of the stream after which the client closes the connection.
    """

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    file: tuple[str, bytes] | None = None
    leaves_after: int | None = None


class Work:
    """All requests of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Half of the schemas are from the collection of real ones, if there is one; the others are made up."""
        rng = random.Random(f"schemas {self.seed}")
        path, real = DATA / "maskbench_dev.jsonl", []
        if path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) < 20_000]
            real = [json.loads(line)["schema"] for line in rng.sample(lines, NUM_SCHEMAS // 2)]
        return real + [_make_schema(rng) for _ in range(NUM_SCHEMAS - len(real))]

    @cached_property
    def images(self) -> list[Any]:
        pictures = [make_part(to_bytes(make_picture((30 + 9 * n, 40), n))) for n in range(12)]
        return pictures + [part for name, part in list_hostile() if "bomb" not in name]

    def make(self, number: int) -> Request:
        """Return the request of that number. Of the first ones, each has another schema, file, image or grammar."""
        rng = random.Random(f"{self.seed} {number}")
        kind = FIRST[number] if number < len(FIRST) else rng.choices([*KINDS], [*KINDS.values()])[0]
        model = f"a{rng.randrange(NUM_ADAPTERS)}" if rng.random() < 0.3 else "base"
        body: dict[str, Any] = {"model": model}
        if rng.random() < 0.4:
            body["cache_salt"] = f"salt {self.seed} {number}"
        if kind == "upload":
            return self._upload(number, rng, body)
        text = " ".join(rng.choices(WORDS, k=rng.choice((2, 8, 30, 200))))
        body |= {"seed": number, "temperature": rng.choice((0.0, 0.7, 1.3))}
        body["max_tokens"] = rng.choice((8, 24, 60, 120))
        leaves_after = None
        if rng.random() < 0.5:
            body["stream"] = True
            leaves_after = rng.randrange(1, 12) if rng.random() < 0.25 else None
        path, content = "/v1/chat/completions", text
        match kind:
            case "schema":
                schema = self.schemas[number % NUM_SCHEMAS]
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            case "tools":
                body |= _choose_tools(rng)
            case "image":
                parts = [rng.choice(self.images[:12] if rng.random() < 0.7 else self.images)]
                body["messages"] = [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]
            case _:
                path = "/v1/completions"
                body["prompt"] = text
                if kind != "text":
                    hostile = HOSTILE[number % len(HOSTILE)]
                    body["structured_outputs"] = hostile if kind == "hostile" else _choose_pattern(rng)
                elif rng.random() < 0.3:
                    body["logprobs"] = 2
        if path == "/v1/chat/completions" and "messages" not in body:
            body["messages"] = [{"role": "user", "content": content}]
        return Request(number, kind, path, body, leaves_after=leaves_after)

    def _upload(self, number: int, rng: random.Random, body: dict[str, Any]) -> Request:
        properties: dict[str, Any] = {"a": {"type": "string", "maxLength": 20}, "n": {"type": "integer"}}
        if rng.random() < 0.3:
            properties[rng.choice(WORDS)] = {"type": "boolean"}
        schema = {"type": "object", "properties": properties}
        options = {"verbatim": rng.random() < 0.3, "bounds": True}
        fields = body | {"schema": json.dumps(schema), "options": json.dumps(options)}
        return Request(number, "upload", "/v1/extract", fields, file=FILES[(number - NUM_SCHEMAS) % len(FILES)])


def _make_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in rng.sample(WORDS, rng.randrange(2, 6)):
        properties[name] = rng.choice(
            (
                {"type": "string", "maxLength": rng.randrange(1, 60)},
                {"type": "integer", "minimum": 0, "maximum": rng.randrange(9, 9999)},
                {"type": "number"}, {"type": "boolean"}, {"enum": rng.sample(WORDS, 3)},
                {"type": "string", "format": rng.choice(("date", "email", "uuid", "date-time", "ipv4"))},
                {"type": "string", "pattern": f"^[A-Z]{{2}}-\\d{{{rng.randrange(1, 7)}}}$"},
                {"type": "array", "items": {"type": "integer"}, "maxItems": rng.randrange(1, 6)},
                {"type": ["string", "null"]},
            )
        )  # fmt: skip
    if depth < 2 and rng.random() < 0.5:
        properties["inner"] = _make_schema(rng, depth + 1)
    required = [name for name in properties if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _choose_tools(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 4))
    functions = [{"name": name, "parameters": _make_schema(rng, 1)} for name in names]
    tools = [{"type": "function", "function": each} for each in functions]
    named = {"type": "function", "function": {"name": names[0]}}
    return {"tools": tools, "tool_choice": rng.choice(("auto", "required", "required", named))}


def _choose_pattern(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"grammar": rng.choice(GRAMMARS)}
    return {"regex": rng.choice(REGEXES).format(n=rng.randrange(2, 12))}
