"""The API tab: the address of this server and code snippets for it."""

from __future__ import annotations

import gradio as gr
from gradio.route_utils import get_root_url

from engine import Engine

CURL = """curl {base_url}/chat/completions \\
  -H 'Content-Type: application/json' \\{key_line}
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""

PYTHON = """from openai import OpenAI

client = OpenAI(base_url="{base_url}", api_key="{api_key}")
answer = client.chat.completions.create(
    model="{model}",
    messages=[{{"role": "user", "content": "Hello!"}}],
    stream=True,
)
for chunk in answer:
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""

EXTRACT_OPENAI = """from openai import OpenAI

client = OpenAI(base_url="{base_url}", api_key="{api_key}")
body = {{"schema": "contact", "text": "{text}"}}  # or a JSON Schema
found = client.post("/extract", body=body, cast_to=object)
print(found["record"], found["flags"], found["evidence"])"""

TEXT = "Ada Lovelace, Analyst, Northwind Ltd, ada@example.com, +44 20 7946 0018"

ENDPOINTS = """{key}

| Endpoint | What it does | Clients |
|---|---|---|
| `POST /v1/chat/completions`, `/v1/completions`, `/v1/responses` | chat and text; `"stream": true` streams | OpenAI |
| `POST /v1/embeddings` | embeddings, of models that make them | OpenAI |
| `POST /v1/messages` | chat | Anthropic |
| `POST /api/chat`, `/api/generate` | chat, text | Ollama |
| `POST /v1/extract` | a record that keeps to a JSON Schema, with evidence and confidence | any |
| `GET /v1/models`, `/health`, `/metrics` | models, state, figures for Prometheus | any |"""
KEY_NEEDED = "**Key:** send the server's `--api-key` as `Authorization: Bearer YOUR_KEY`."
KEY_FREE = "**Key:** none is needed; a client that insists on one takes any. `--api-key` makes one necessary."

# label -> language and text
SNIPPETS = {
    "curl": ("shell", CURL),
    "Python, streamed": ("python", PYTHON),
    "Extract a record, OpenAI client": ("python", EXTRACT_OPENAI),
}


def build_api_tab(demo: gr.Blocks, engine: Engine, needs_key: bool) -> None:
    """Put the address and the snippets on the page; they use the address at which the page was opened."""
    gr.Markdown(
        "This server has an OpenAI-compatible API on the same port. Give the base URL to any client. "
        "[/openapi.json](/openapi.json) describes every route."
    )
    base_url = gr.Textbox(label="Base URL", interactive=False, buttons=["copy"], max_lines=1)
    codes: list[gr.Code] = []
    with gr.Row(equal_height=True, elem_id="snippets"):
        for label, (language, _) in SNIPPETS.items():
            with gr.Column(min_width=300):
                codes.append(gr.Code(language=language, label=label, interactive=False, lines=1, wrap_lines=True))  # type: ignore[arg-type]

    def fill(request: gr.Request) -> tuple[str, ...]:
        return make_snippets(find_page_url(request, demo.root_path), engine.model_name, needs_key)

    gr.Markdown(ENDPOINTS.format(key=KEY_NEEDED if needs_key else KEY_FREE), elem_id="endpoints")
    demo.load(fill, None, [base_url, *codes], queue=False, show_progress="hidden", api_visibility="private")


def find_page_url(request: gr.Request, root_path: str) -> str:
    """Return the page's address from Gradio's headers, which are right behind a proxy."""
    asked = request.request
    assert asked is not None, "an event outside the queue has its own request"
    return get_root_url(asked, asked.url.path, root_path)


def make_snippets(page_url: str, model: str, needs_key: bool) -> tuple[str, ...]:
    """Return the base URL and the snippets for a page address such as http://127.0.0.1:7860/."""
    values = {
        "base_url": page_url.rstrip("/") + "/v1", "model": model, "text": TEXT,
        "api_key": "YOUR_KEY" if needs_key else "none",
        "key_line": "\n  -H 'Authorization: Bearer YOUR_KEY' \\" if needs_key else "",
    }
    return values["base_url"], *(text.format(**values) for _, text in SNIPPETS.values())
