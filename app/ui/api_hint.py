"""The API tab: the address of this server and two snippets that work as they are."""

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
)
print(answer.choices[0].message.content)"""

STRUCTURED = """from openai import OpenAI
from pydantic import BaseModel


class Contact(BaseModel):
    name: str
    email: str


client = OpenAI(base_url="{base_url}", api_key="{api_key}")
answer = client.chat.completions.parse(
    model="{model}",
    messages=[{{"role": "user", "content": "Ada Lovelace, ada@example.com"}}],
    response_format=Contact,
)
print(answer.choices[0].message.parsed)"""


EXTRACT_AIOHTTP = """import asyncio
import aiohttp

SCHEMA = {{
    "type": "object",
    "properties": {{"name": {{"type": "string"}}, "age": {{"type": "integer"}}}},
    "required": ["name", "age"],
}}


async def main():
    headers = {{"Authorization": "Bearer {api_key}"}}
    body = {{"schema": SCHEMA, "text": "Ada is 36 years old."}}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post("{base_url}/extract", json=body) as answer:
            found = await answer.json()
    print(found["record"], found["flags"], found["evidence"])


asyncio.run(main())"""

EXTRACT_OPENAI = """import asyncio
from openai import AsyncOpenAI

SCHEMA = {{
    "type": "object",
    "properties": {{"name": {{"type": "string"}}, "age": {{"type": "integer"}}}},
    "required": ["name", "age"],
}}


async def main():
    async with AsyncOpenAI(base_url="{base_url}", api_key="{api_key}") as client:
        body = {{"schema": SCHEMA, "text": "Ada is 36 years old."}}
        found = await client.post("/extract", body=body, cast_to=object)
    print(found["record"], found["flags"], found["evidence"])


asyncio.run(main())"""


def build_api_tab(demo: gr.Blocks, engine: Engine, needs_key: bool) -> None:
    """Put the address and the snippets on the page; they follow the address the page was opened at."""
    gr.Markdown(
        "The same engine speaks the OpenAI API, on the same port. Point any client at the base URL. "
        "[/openapi.json](/openapi.json) describes every route."
    )
    base_url = gr.Textbox(label="Base URL", interactive=False, buttons=["copy"], max_lines=1)
    with gr.Row(equal_height=False):
        with gr.Column(min_width=300):
            curl = gr.Code(
                language="shell", label="curl", interactive=False, wrap_lines=True, lines=3, max_lines=6
            )
            python = gr.Code(language="python", label="Python", interactive=False, wrap_lines=True)
        with gr.Column(min_width=300):
            structured = gr.Code(
                language="python",
                label="Python, a record instead of text",
                interactive=False,
                wrap_lines=True,
            )

    with gr.Row(equal_height=False):
        extracts = [
            gr.Code(language="python", label=label, interactive=False, wrap_lines=True, min_width=300)
            for label in ("Extract a record, aiohttp", "Extract a record, OpenAI client")
        ]

    def fill(request: gr.Request) -> tuple[str, ...]:
        base_url, *others = make_snippets(
            find_page_url(request, demo.root_path), engine.model_name, needs_key
        )
        return base_url, *others, *make_extract_snippets(base_url, "YOUR_KEY" if needs_key else "none")

    demo.load(
        fill,
        None,
        [base_url, curl, python, structured, *extracts],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )


def make_extract_snippets(base_url: str, api_key: str) -> tuple[str, str]:
    """Python for POST /v1/extract with aiohttp, and with the OpenAI client."""
    aiohttp, openai = (
        text.format(base_url=base_url, api_key=api_key) for text in (EXTRACT_AIOHTTP, EXTRACT_OPENAI)
    )
    return aiohttp, openai


def find_page_url(request: gr.Request, root_path: str) -> str:
    """The address that the page was opened at, as Gradio tells it to the page: behind a proxy its headers count."""
    asked = request.request
    assert asked is not None, "an event outside the queue has its own request"
    return get_root_url(asked, asked.url.path, root_path)


def make_snippets(page_url: str, model: str, needs_key: bool) -> tuple[str, str, str, str]:
    """Base URL, curl, Python and Python for a record, for a page address such as http://127.0.0.1:7860/."""
    base_url = page_url.rstrip("/") + "/v1"
    api_key = "YOUR_KEY" if needs_key else "none"
    key_line = f"\n  -H 'Authorization: Bearer {api_key}' \\" if needs_key else ""
    curl = CURL.format(base_url=base_url, model=model, key_line=key_line)
    python, structured = (
        text.format(base_url=base_url, model=model, api_key=api_key) for text in (PYTHON, STRUCTURED)
    )
    return base_url, curl, python, structured
