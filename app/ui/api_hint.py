"""The API tab: the address of this server, and code for it that runs as it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr
from gradio.route_utils import get_root_url

from app.extraction.cases import find_schemas
from app.ui.batch.downloads import make_slug
from app.ui.extract.schema_panel import parse_schema
from engine import Engine

EXTRACT, CHAT = "Extract a record", "Chat"
LANGUAGES = {"curl": "shell", "Python": "python", "JavaScript": "javascript"}  # of the code boxes, by their labels
MAX_TEXT_CHARS = 800  # of the text in the code
MAX_LINE_CHARS = 64
TEXT = "Ada Lovelace, Analyst, Northwind Ltd, ada@example.com, +44 20 7946 0018"  # while Extract has none
# A long text stays in the browser.
CUT_TEXT = f"(kind, schema, text) => [kind, schema, (text || '').slice(0, {MAX_TEXT_CHARS})]"

NAME_DOWNLOADS = """document.querySelector("#snippets").addEventListener("click", (event) => {
  const link = event.target.closest("a[download]");
  if (link && props.value) link.download = link.download.replace(/^[^.]*/, props.value);
}, true);"""

CURL = """curl {base_url}/{route} \\
  -H 'Content-Type: application/json' \\{key_line}
  -d @- <<'JSON'
{json}
JSON"""
PYTHON_EXTRACT = """from openai import OpenAI

schema = {schema}
text = {text}

client = OpenAI(base_url="{base_url}", api_key="{api_key}")
found = client.post("/extract", body={{"schema": schema, "text": text}}, cast_to=object)
print(found["record"], found["flags"], found["evidence"])"""
PYTHON_CHAT = """from openai import OpenAI

client = OpenAI(base_url="{base_url}", api_key="{api_key}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""
JAVASCRIPT = """const body = {json};

fetch("{base_url}/{route}", {{
  method: "POST",
  headers: {{"Content-Type": "application/json"{key_entry}}},
  body: JSON.stringify(body),
}})
  .then((reply) => reply.json())
  .then((found) => console.log({shown}));"""

ENDPOINTS = """{key}

| Endpoint | What it does | Clients |
|---|---|---|
| `POST /v1/extract` | a record that keeps to a JSON Schema, with evidence and confidence | any |
| `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses` | chat and text; `"stream": true` streams | OpenAI |
| `POST /v1/embeddings` | embeddings, of models that make them | OpenAI |
| `POST /v1/messages` | chat | Anthropic |
| `POST /api/chat`, `/api/generate` | chat, text | Ollama |
| `GET /v1/models`, `/health`, `/metrics` | models, state, figures for Prometheus | any |"""
KEY_NEEDED = "**Key:** send the server's `--api-key` as `Authorization: Bearer YOUR_KEY`."
KEY_FREE = "**Key:** none is needed; a client that insists on one takes any. `--api-key` makes one necessary."


dump = partial(json.dumps, ensure_ascii=False)


def build_api_tab(
    demo: gr.Blocks, tab: gr.Tab, engine: Engine, schema: gr.Code, text: gr.Textbox, needs_key: bool
) -> None:
    """Put the address and the code on the page; it uses the address at which the page was opened.

    Args:
        tab: this tab; the code is written when it is opened.
        engine: the model of the chat.
        schema, text: of the Extract tab.
    """
    gr.Markdown(
        "This server has an OpenAI-compatible API on the same port. Give the base URL to any client. "
        "[/openapi.json](/openapi.json) describes every route."
    )
    base_url = gr.Textbox(label="Base URL", interactive=False, buttons=["copy"], max_lines=1)
    kind = gr.Radio(
        [EXTRACT, CHAT], value=EXTRACT, label="Code for", show_label=False, container=False, elem_id="code-kind",
        elem_classes="chips", info="“Extract a record” has the schema and the beginning of the text open in Extract.",
    )
    codes: list[gr.Code] = []
    with gr.Row(equal_height=True, elem_id="snippets"):
        for label, language in LANGUAGES.items():
            with gr.Column(min_width=300):
                codes.append(gr.Code(
                    language=language, label=label, interactive=False, lines=1, max_lines=24, wrap_lines=True,  # type: ignore[arg-type]
                ))

    # Never displayed; the downloads of the code boxes are all called "file" otherwise.
    saved_as = gr.HTML(
        "", html_template="", apply_default_css=False, elem_id="snippet-name", js_on_load=NAME_DOWNLOADS
    )
    ready_made = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in find_schemas().items()}

    def fill(kind: str, schema: str, text: str, request: gr.Request) -> tuple[str, ...]:
        url = find_page_url(request, demo.root_path)
        found = parse_schema(schema) or {}
        asked = next((name for name, each in ready_made.items() if each == found), found)
        if not text.strip():
            asked, text = "contact", TEXT
        title = asked if isinstance(asked, str) else asked.get("title", "")
        name = "chat" if kind == CHAT else make_slug(f"extract {title}")
        return *make_snippets(url, engine.model_name, needs_key, kind, asked, text), name

    gr.Markdown(ENDPOINTS.format(key=KEY_NEEDED if needs_key else KEY_FREE), elem_id="endpoints")
    gr.on(
        [demo.load, tab.select, kind.input], fill, [kind, schema, text], [base_url, *codes, saved_as], js=CUT_TEXT,
        queue=False, show_progress="hidden", api_visibility="private", trigger_mode="always_last",
    )


def find_page_url(request: gr.Request, root_path: str) -> str:
    """Return the page's address from Gradio's headers, which are right behind a proxy."""
    asked = request.request
    assert asked is not None, "an event outside the queue has its own request"
    return get_root_url(asked, asked.url.path, root_path)


def make_snippets(
    page_url: str, model: str, needs_key: bool, kind: str = CHAT, schema: str | dict[str, Any] = "", text: str = ""
) -> tuple[str, ...]:
    """Return the base URL for a page address such as http://127.0.0.1:7860/, and the code in each language."""
    is_chat = kind == CHAT
    body: dict[str, Any] = {"schema": schema, "text": text}
    if is_chat:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    values = {
        "base_url": page_url.rstrip("/") + "/v1", "model": model, "api_key": "YOUR_KEY" if needs_key else "none",
        "key_line": "\n  -H 'Authorization: Bearer YOUR_KEY' \\" if needs_key else "",
        "key_entry": ', Authorization: "Bearer YOUR_KEY"' if needs_key else "",
        "route": "chat/completions" if is_chat else "extract",
        "shown": "found.choices[0].message.content" if is_chat else "found.error ?? found.record, found.flags",
        "json": lay_out(body, dump), "text": repr(text),
        "schema": f"{schema!r}  # or a JSON Schema" if isinstance(schema, str) else lay_out(schema, repr),
    }
    python = PYTHON_CHAT if is_chat else PYTHON_EXTRACT
    return values["base_url"], *(code.format(**values) for code in (CURL, python, JAVASCRIPT))


def lay_out(value: Any, spell: Callable[[Any], str], indent: str = "") -> str:
    """Return a JSON value as code, with line breaks where a line would be too long; `spell` writes it on one line."""
    line = spell(value)
    if len(indent) + len(line) <= MAX_LINE_CHARS or not isinstance(value, dict | list):
        return line
    inner = f"{indent}  "
    if isinstance(value, dict):
        parts = [f"{inner}{spell(name)}: {lay_out(each, spell, inner)}" for name, each in value.items()]
    else:
        parts = [f"{inner}{lay_out(each, spell, inner)}" for each in value]
    return "\n".join([line[0], ",\n".join(parts), f"{indent}{line[-1]}"])
