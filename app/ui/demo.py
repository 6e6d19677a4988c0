"""make_demo: the whole page as one gr.Blocks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import gradio as gr

from app.api.context import ApiContext
from app.api.model_pool import ModelPool
from app.ui.api_hint import build_api_tab
from app.ui.batch.tab import BatchTab
from app.ui.chat.settings import Settings, recommend_settings
from app.ui.chat.tab import ChatTab
from app.ui.examples import is_demo_model, load_examples
from app.ui.extract.tab import ExtractTab
from app.ui.header import build_header
from app.ui.lean import make_lean
from app.ui.models import ModelPanel
from app.ui.observatory.tab import build_observatory_tab
from engine import ConfigError, Engine, read_sampling_defaults

# Uploads and downloads: checked every hour, deleted after a day.
KEEP_FILES_S = (3600, 86400)

WELCOME = "## Troupe\n{about}\n\nAnswers stream from the engine in this process; nothing leaves this machine."
ABOUT_DEMO = (
    "This is the **embedded demo model**: a few million parameters, trained to extract data from short texts. "
    "In the chat it knows little beyond this app. For a real model load one under [Engine](#engine), or start with "
    "`--model Qwen/Qwen3-0.6B`."
)
ABOUT_DUMMY = "**Random weights** (`--load-format dummy`): this shows the engine, the text means nothing."
DEMO_EXAMPLES = ["Hello! Who are you?", "What can you do?", "How do I extract data from a text?"]
EXAMPLES = [
    "Explain paged attention to a new colleague.",
    "Write a haiku about a cache that is never cold.",
    "What is the difference between a process and a thread?",
]


def make_demo(context: ApiContext, chat_context: ApiContext | None = None, pool: ModelPool | None = None) -> gr.Blocks:
    """Build the page; mount it with `mount_options()`. The engines may still be starting.

    Args:
        chat_context: the model of the chat, if it is another one.
        pool: further models, which may be chosen on the page.
    """
    engine, talker = context.engine, (chat_context or context).engine
    examples = load_examples()
    with gr.Blocks(
        title="Troupe", analytics_enabled=False, fill_height=True, fill_width=True, delete_cache=KEEP_FILES_S
    ) as demo:
        build_header(engine)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Extract", elem_id="extract-tab") as extract_tab:
                extract = ExtractTab(engine, examples, context.store, pool=pool)
                extract.build(demo)
            with gr.Tab("Batch", elem_id="batch-tab") as batch_tab:
                batch = BatchTab(context, examples, pool=pool)
                batch.build(demo, extract.panel, extract.to_batch, extract.opened)
            with gr.Tab("Chat", elem_id="chat-tab"):
                chat = ChatTab(
                    talker, describe_model(talker), choose_examples(talker), context.store, choose_settings(talker),
                    pool=pool,
                )
                chat.build(demo)
            with gr.Tab("Engine", elem_id="engine-tab"):
                if pool is not None:
                    ModelPanel(pool).build()
                build_observatory_tab(engine)
            with gr.Tab("API", elem_id="api-tab"):
                build_api_tab(demo, talker, needs_key=bool(context.config.api_key))

        # Another model may have been loaded meanwhile.
        extract.connect_opening(demo.load, extract_tab.select)
        batch.reader.connect(demo.load, batch_tab.select)

        async def leave(request: gr.Request) -> None:
            # A handler's stream reports a closed tab only after the page has opened it.
            session = str(request.session_hash)
            extract.stops.ask(session, "leave")
            batch.leave(session)

        demo.unload(leave)
    make_lean(demo)
    return demo


def describe_model(engine: Engine) -> str:
    """Describe the model in the empty chat."""
    if engine.config.load_format == "dummy":
        return WELCOME.format(about=ABOUT_DUMMY)
    if is_demo_model(engine):
        return WELCOME.format(about=ABOUT_DEMO)
    if engine.refusal:
        return f"{engine.model_name}: {engine.refusal}."
    return WELCOME.format(about=f"You talk to **{engine.model_name}**.")


def choose_examples(engine: Engine) -> list[str]:
    return DEMO_EXAMPLES if is_demo_model(engine) else EXAMPLES


def choose_settings(engine: Engine) -> Settings:
    """Choose settings that fit the model. The demo model was mostly trained without a system prompt."""
    if is_demo_model(engine):
        return Settings(system_prompt="", temperature=0.0)
    return recommend_settings(read_defaults(engine))


def read_defaults(engine: Engine) -> dict[str, Any]:
    """Return the sampling that the model recommends; nothing if its files cannot be read, which the start reports."""
    with suppress(ConfigError):
        return read_sampling_defaults(engine.config.model, engine.config.generation_config)
    return {}
