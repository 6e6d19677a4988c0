"""make_demo: the whole page as one gr.Blocks."""

from __future__ import annotations

import gradio as gr

from app.api.context import ApiContext
from app.api.model_pool import ModelPool
from app.ui.api_hint import build_api_tab
from app.ui.batch.tab import BatchTab
from app.ui.chat.tab import ChatTab
from app.ui.chat.welcome import choose_settings
from app.ui.examples import load_examples
from app.ui.extract.tab import ExtractTab
from app.ui.header import build_header
from app.ui.lean import make_lean
from app.ui.models import ModelPanel
from app.ui.observatory.tab import INTRO, build_observatory_tab
from engine import Engine

# Uploads and downloads: checked every hour, deleted after a day.
KEEP_FILES_S = (3600, 86400)

def make_demo(context: ApiContext, chat_context: ApiContext | None = None, pool: ModelPool | None = None) -> gr.Blocks:
    """Build the page; mount it with `mount_options()`. The engines may still be starting.

    Args:
        chat_context: the model of the chat, if it is another one.
        pool: further models, which may be chosen on the page.
    """
    engine, talker = context.engine, (chat_context or context).engine
    examples = load_examples()

    def list_engines() -> list[Engine]:
        return list(dict.fromkeys([engine, talker, *(pool.engines if pool is not None else ())]))

    with gr.Blocks(
        title="Troupe", analytics_enabled=False, fill_height=True, fill_width=True, delete_cache=KEEP_FILES_S
    ) as demo:
        build_header(list_engines)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Extract", elem_id="extract-tab") as extract_tab:
                extract = ExtractTab(engine, examples, context.store, pool=pool)
                extract.build(demo)
            with gr.Tab("Batch", elem_id="batch-tab") as batch_tab:
                batch = BatchTab(context, examples, pool=pool)
                batch.build(demo, extract.panel, extract.to_batch, [extract.opened, extract.reader.dropdown])
            with gr.Tab("Chat", elem_id="chat-tab"):
                ChatTab(talker, context.store, choose_settings(talker), pool=pool).build(demo)
            with gr.Tab("Engine", elem_id="engine-tab"):
                gr.HTML(INTRO, apply_default_css=False)
                if pool is not None:
                    ModelPanel(pool).build()
                build_observatory_tab(list_engines)
            with gr.Tab("API", elem_id="api-tab") as api_tab:
                needs_key = bool(context.config.api_key)
                build_api_tab(demo, api_tab, talker, extract.panel.code, extract.text, needs_key)

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
